"""Measurements: raw samples of one network, with the protocol that took them.

Statistics are computed on read, never stored in the samples' place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hwnas.cli.options import option, read_options
from hwnas.errors import TableError
from hwnas.stats import student_t
from hwnas.system.documents import WRONG
from hwnas.system.gpu import GpuState

_LEAST_US = 1e-6  # smaller ones become 0 in ms
P90_SAMPLES, P99_SAMPLES = 64, 662  # MLPerf LoadGen's least sample counts for a percentile


@dataclass(frozen=True, slots=True)
class Protocol:
    """How latency is timed.

    A round runs every candidate once, in a new random order, `block` at a time. Each turn makes `round_ms` worth of
    calls (between `min_calls` and `max_calls`) and counts as their `quantile`. A fixed reference network runs before
    and after each block.

    A turn is bad when its reference stood more than `drift` above the run's quiet reference. It is also bad when the
    hypervisor stole more than `steal` of the block. All turns are bad when the run's quiet reference stands more than
    `run_drift` above the calibration's.

    A candidate is done after `min_rounds` good turns if its 90 % interval has a half-width of `half_width` or less. It
    is done at the latest after `max_rounds` good turns. Bad turns are repeated until `max_seconds` are over.
    """

    warmup_calls: int = 10
    round_ms: float = 5.0
    min_calls: int = 6
    max_calls: int = 64
    quantile: float = option(0.25, low=0, high=1)
    copies: int = option(4, low=1)
    min_rounds: int = option(12, low=1)
    max_rounds: int = 24
    half_width: float = 0.02
    block: int = 6
    drift: float = 0.05
    run_drift: float = 0.15
    steal: float = 0.02
    max_seconds: float = 60.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for tables and reports."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """Inverse of `to_dict`; ConfigError for a value of another type, UnknownName for another key."""
        return read_options(cls, data, "protocol")


@dataclass(frozen=True, slots=True)
class Turn:
    """One candidate's calls in one round, the reference beside them, the share of time stolen, and whether heat
    slowed it; the GPU's state at the worse of the block's two ends, where one ran it."""

    samples_ms: tuple[float, ...]
    reference_ms: float
    steal: float = 0.0
    throttled: bool = False
    gpu: GpuState | None = None

    def low_ms(self, quantile: float) -> float:
        """The sample at `quantile`, from below (sorting a few floats beats numpy at this size)."""
        return sorted(self.samples_ms)[int(quantile * (len(self.samples_ms) - 1))]


@dataclass(frozen=True)
class Measurement:
    """All turns of one network in one run. `quiet_ms` is the run's (or the table's) quiet reference time.

    Turn i is of copy i mod `protocol.copies`. `latency_ms` is the mean over copies of the median over their good turns
    of each turn's low quantile; `latency_ms_low`/`_high` bound the mean of these copies with 90 % confidence. All are
    what the machine does when nobody disturbs it.
    """

    turns: tuple[Turn, ...]
    quiet_ms: float
    protocol: Protocol

    @cached_property
    def good(self) -> np.ndarray:
        """Mask of the turns that count."""
        return np.array([
            turn.reference_ms <= self.quiet_ms * (1 + self.protocol.drift) and turn.steal <= self.protocol.steal
            and not turn.throttled for turn in self.turns], bool)

    @cached_property
    def turn_values_ms(self) -> np.ndarray:
        """Low quantile of each turn, good or bad."""
        return np.array([turn.low_ms(self.protocol.quantile) for turn in self.turns])

    @cached_property
    def values_ms(self) -> np.ndarray:
        """Low quantile of each good turn."""
        return self.turn_values_ms[self.good] if self.turns else np.empty(0)

    @cached_property
    def copies_ms(self) -> np.ndarray:
        """Latency of each copy that had a good turn."""
        copy = np.arange(len(self.turns))[self.good] % self.protocol.copies if self.turns else np.empty(0)
        return np.array([np.median(self.values_ms[copy == number]) for number in np.unique(copy)])

    @cached_property
    def _deviations_ms(self) -> np.ndarray:
        """Each good turn less the latency of its copy."""
        copy = np.arange(len(self.turns))[self.good] % self.protocol.copies
        medians = dict(zip(np.unique(copy), self.copies_ms, strict=True))
        return np.asarray(self.values_ms - np.array([medians[number] for number in copy]))

    def at_ms(self, quiet_ms: float) -> float:
        """`latency_ms` at the speed at which the reference takes `quiet_ms`: what runs share is the ratio to the
        reference."""
        return self.latency_ms * quiet_ms / self.quiet_ms

    @property
    def reason(self) -> str:
        """Why it is INVALID; empty when it is a number."""
        return self.reason_in("turns", "steal")

    def reason_in(self, turns: str, steal: str) -> str:
        """`reason`, with these words for the turns and for what disturbed them."""
        good, needed = len(self.values_ms), min(3, self.protocol.min_rounds)
        if good >= needed:
            return ""
        if not self.turns:
            return "no turn was timed before the time cap"
        worst = max(turn.reference_ms for turn in self.turns) / self.quiet_ms - 1
        return (f"only {good} of {len(self.turns)} {turns} were quiet (reference up to {worst:.0%} above its quiet "
                f"{self.quiet_ms:.3f} ms, {steal} up to {max(turn.steal for turn in self.turns):.0%}"
                f"{', throttled' if any(turn.throttled for turn in self.turns) else ''})")

    @property
    def valid(self) -> bool:
        """Whether enough turns were quiet for a number."""
        return not self.reason

    @property
    def latency_ms(self) -> float:
        """The estimate; NaN when INVALID."""
        return float(self.copies_ms.mean()) if self.valid else float("nan")

    @property
    def std_ms(self) -> float:
        """Standard error of `latency_ms`, as the mean of these copies."""
        if not self.valid:
            return float("nan")
        n, copies = len(self.values_ms), len(self.copies_ms)
        if n <= copies:
            return float("inf")
        return robust_error(self._deviations_ms) * float(np.sqrt(n / (n - copies))) if copies > 1 else robust_error(
            self.values_ms)

    @property
    def copy_spread(self) -> float:
        """Standard deviation from one copy to the next, as a share of the latency; NaN with fewer than two copies."""
        if not self.valid or len(self.copies_ms) < 2:
            return float("nan")
        return float(self.copies_ms.std(ddof=1) / self.latency_ms)

    @property
    def latency_ms_low(self) -> float:
        """Lower end of the 90 % interval."""
        return self.latency_ms - self._half_width_ms

    @property
    def latency_ms_high(self) -> float:
        """Upper end of the 90 % interval."""
        return self.latency_ms + self._half_width_ms

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval, as a share of the estimate."""
        return self._half_width_ms / self.latency_ms if self.valid else float("inf")

    @property
    def _half_width_ms(self) -> float:
        return student_t(0.95, len(self.values_ms) - 1) * self.std_ms if self.valid else float("nan")

    @property
    def converged(self) -> bool:
        """Whether no more turns are needed: the interval is narrow enough, or all rounds are spent."""
        good = len(self.values_ms)
        return good >= self.protocol.min_rounds and (
            self.half_width <= self.protocol.half_width or good >= self.protocol.max_rounds)

    def percentile_ms(self, q: float, undisturbed: bool = True) -> float | None:
        """p50, p90 or p99 over every call of the good turns (of all turns, with what else the machine did, if not
        `undisturbed`); None where the samples are too few for it."""
        calls = [ms for turn, good in zip(self.turns, self.good, strict=True) if good or not undisturbed
                 for ms in turn.samples_ms]
        needed = P99_SAMPLES if q > 0.9 else P90_SAMPLES if q > 0.5 else 1
        return float(np.quantile(calls, q)) if len(calls) >= needed else None

    def halves_ms(self) -> tuple[float, float]:
        """Latency from the even and from the odd turns: what two measurements of one network differ by.

        With an even number of copies each half has copies of its own, so that their spread is part of it.
        """
        even, odd = (self._part(start) for start in (0, 1))
        return even.latency_ms, odd.latency_ms

    def _part(self, start: int) -> Measurement:
        """Every second turn, beginning with `start`."""
        copies = self.protocol.copies
        protocol = replace(self.protocol, copies=copies // 2 if copies % 2 == 0 else copies, min_rounds=1)
        return Measurement(self.turns[start::2], self.quiet_ms, protocol)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a table; times in microseconds, to a hundredth: some networks take ten."""
        return {"quiet_us": round(self.quiet_ms * 1e3, 2),
                "reference_us": [round(turn.reference_ms * 1e3, 2) for turn in self.turns],
                "steal": [round(turn.steal, 4) for turn in self.turns],
                **({"throttled": [turn.throttled for turn in self.turns]} if any(
                    turn.throttled for turn in self.turns) else {}),
                **({"gpu": [astuple(turn.gpu or GpuState()) for turn in self.turns]} if any(
                    turn.gpu for turn in self.turns) else {}),
                "samples_us": [[round(ms * 1e3, 2) for ms in turn.samples_ms] for turn in self.turns]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], protocol: Protocol, where: str) -> Measurement:
        """Inverse of `to_dict`; TableError on negative, zero or missing times, naming `where`."""
        try:
            hot = data.get("throttled") or [False] * len(data["steal"])
            states = [GpuState(*map(int, state)) for state in data["gpu"]] if data.get("gpu") else [None] * len(hot)
            times = zip(data["samples_us"], data["reference_us"], data["steal"], hot, states, strict=True)
            turns = tuple(Turn(_positive(samples), _positive([reference])[0], float(steal), bool(throttled), state)
                          for samples, reference, steal, throttled, state in times)
            return cls(turns, _positive([data["quiet_us"]])[0], protocol)
        except WRONG as error:
            raise TableError(f"{where}: {error or 'times are missing'}") from None


def robust_error(values: np.ndarray) -> float:
    """Standard error of a median from the median absolute deviation (normal scale factors 1.4826 and 1.2533)."""
    if len(values) < 2:
        return float("inf")
    deviation = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * deviation / float(np.sqrt(len(values)))


def _positive(times_us: Sequence[float]) -> tuple[float, ...]:
    """Milliseconds; a table holds a hundred thousand of them, so the checks are those that run in C."""
    if not times_us or not (min(times_us) > _LEAST_US and sum(times_us) < float("inf")):
        raise ValueError("times must be positive and finite")
    return tuple([us / 1e3 for us in times_us])
