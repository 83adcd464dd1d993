"""Turn: one network's calls in a row, with the readings of the probes beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from hwnas.system.gpu import GpuState

_LEAST_US = 1e-6  # no call is so short


@dataclass(frozen=True, slots=True)
class Turn:
    """One network's calls in a row.

    The probe is read before the first group of calls and after each group, so readings i and i + 1 surround group i.
    All groups have the same number of calls, but the last may have fewer. A single reading belongs to all calls.

    Attributes:
        samples_ms: The wall time of each call.
        probe_us: Readings of the core probe; of the reference network if the calls run on several cores or a GPU.
        lost_ms: For each group, the wall time in which this process did not run. Empty: none, or it is not known.
        first_ms: The time of the call before them, which found caches as other networks had left them; 0: not known.
        memory_us: The mean of the memory probe's readings before and after the turn; 0: not read.
        gpu: The GPU's state at the worse of the block's two ends; None if no GPU ran it, or it is not known.
    """

    samples_ms: tuple[float, ...]
    probe_us: tuple[float, ...]
    lost_ms: tuple[float, ...] = ()
    first_ms: float = 0.0
    memory_us: float = 0.0
    gpu: GpuState | None = None

    @property
    def slowed(self) -> bool:
        """Return whether heat or the power supply held the GPU down."""
        return self.gpu is not None and self.gpu.slowed

    @property
    def calls_in_group(self) -> int:
        """The number of calls between two readings of the probe."""
        return -(-len(self.samples_ms) // max(1, len(self.probe_us) - 1))

    def own_ms(self) -> np.ndarray:
        """Return the time of each call in which this process ran [n], in ms.

        If a group lost time, each of its calls gets an equal part of the rest: nobody knows which call was interrupted.
        """
        own, step = np.array(self.samples_ms), self.calls_in_group
        for number, lost in enumerate(self.lost_ms):
            if lost > 0:
                group = own[number * step : (number + 1) * step]
                group[:] = max(group.sum() - lost, 1e-6) / len(group)
        return own


def turns_to_dict(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return plain values for a file: times in microseconds with two decimals, because some networks take ten."""
    def us(times_ms: Sequence[float]) -> list[float]:
        return [round(ms * 1e3, 2) for ms in times_ms]

    return {"samples_us": [us(turn.samples_ms) for turn in turns],
            "probe_us": [[round(reading, 3) for reading in turn.probe_us] for turn in turns],
            **({"lost_us": [us(turn.lost_ms) for turn in turns]} if any(any(turn.lost_ms) for turn in turns) else {}),
            **({"first_us": us([turn.first_ms for turn in turns])} if any(turn.first_ms for turn in turns) else {}),
            **({"memory_us": [round(turn.memory_us, 2) for turn in turns]} if any(
                turn.memory_us for turn in turns) else {}),
            **({"gpu": [astuple(turn.gpu or GpuState()) for turn in turns]} if any(turn.gpu for turn in turns) else {})}


def turns_from_dict(data: Mapping[str, Any]) -> tuple[Turn, ...]:
    """Read what `turns_to_dict` returned; ValueError, KeyError or TypeError for impossible times or missing values.

    Files written before November 2026 have one `reference_us` a turn, the time of the reference network beside it.
    """
    n = len(data["samples_us"])
    probes = data["probe_us"] if "probe_us" in data else [[us] for us in data["reference_us"]]
    lost = data.get("lost_us") or [()] * n
    states = [GpuState(*map(int, state)) for state in data["gpu"]] if data.get("gpu") else [None] * n
    turns = []
    for samples_us, probe_us, lost_us, first_us, memory_us, gpu in zip(
            data["samples_us"], probes, lost, data.get("first_us") or [0.0] * n, data.get("memory_us") or [0.0] * n,
            states, strict=True):
        turn = Turn(positive_ms(samples_us), tuple(1e3 * ms for ms in positive_ms(probe_us)),
                    tuple([us / 1e3 for us in lost_us]), float(first_us) / 1e3, float(memory_us), gpu)
        if not all(0 <= value < float("inf") for value in (*turn.lost_ms, turn.first_ms, turn.memory_us)):
            raise ValueError("times must not be below 0, and finite")
        n_groups = -(-len(turn.samples_ms) // turn.calls_in_group)
        if len(turn.probe_us) > len(turn.samples_ms) + 1 or (turn.lost_ms and len(turn.lost_ms) != n_groups):
            raise ValueError("readings of the probe do not fit the calls")
        turns.append(turn)
    return tuple(turns)


def positive_ms(times_us: Sequence[float]) -> tuple[float, ...]:
    """Convert to milliseconds; ValueError unless all are positive and finite. Tables are long; min and sum are fast."""
    if not times_us or not (min(times_us) > _LEAST_US and sum(times_us) < float("inf")):
        raise ValueError("times must be positive and finite")
    return tuple([us / 1e3 for us in times_us])
