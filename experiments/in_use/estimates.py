"""Estimates from the disturbed turns of a recording, beside the truth that its quiet turns tell."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.in_use.networks import REFERENCE
from hwnas.latency import quiet as model
from hwnas.latency.measurement import WIDEST, Protocol
from hwnas.latency.quiet import QuietRun, calls_to_warm, estimate, learn_conditions, low_mode, quiet_memory_us
from hwnas.latency.turn import Turn, turns_from_dict

QUIET_CORE, QUIET_REFERENCE = 1.10, 1.06  # of a quiet turn's probe and reference, over their floor
LEAST_QUIET = 5  # turns of a network, to tell the truth
TODAY_DRIFT, TODAY_RUN_DRIFT, TODAY_LEAST = 0.05, 0.15, 3  # the rule before this experiment


def low_ms(turn: Turn, quantile: float) -> float:
    """Return the turn's sample at `quantile`, from below."""
    return sorted(turn.samples_ms)[int(quantile * (len(turn.samples_ms) - 1))]


@dataclass(frozen=True)
class Recording:
    """One state of one deployment: turns of each network, and whether the disturbance was on."""

    deployment: str
    state: str
    host: str
    protocol: Protocol
    kinds: Mapping[str, str]
    turns: Mapping[str, Sequence[Turn]]
    on: Mapping[str, np.ndarray]
    blocks: Mapping[str, np.ndarray]
    weights_mb: Mapping[str, float]

    @classmethod
    def load(cls, path: Path) -> Recording:
        data = json.loads(gzip.decompress(path.read_bytes()))
        of = data["networks"]
        return cls(data["deployment"], data["state"], data["host"], Protocol.from_dict(data["protocol"]),
                   {name: entry["kind"] for name, entry in of.items()},
                   {name: turns_from_dict(entry) for name, entry in of.items()},
                   {name: np.array(entry["on"], bool) for name, entry in of.items()},
                   {name: np.array(entry["block"] or range(len(entry["on"])), int) for name, entry in of.items()},
                   {name: entry["weights_mb"] for name, entry in of.items()})

    def probe_us(self) -> float:
        """Quiet time of the core probe over the whole run."""
        return low_mode(np.array([us for turns in self.turns.values() for turn in turns for us in turn.probe_us]))

    def reference_ms(self) -> np.ndarray:
        """The reference's low quantile in each of its turns."""
        return np.array([low_ms(turn, self.protocol.quantile) for turn in self.turns[REFERENCE]])

    def is_quiet(self, name: str) -> np.ndarray:
        """Mask of the turns in which nothing disturbed, by the probe and by the reference before and after."""
        beside, probe_us = self.reference_ms(), self.probe_us()
        limit = QUIET_REFERENCE * low_mode(beside)
        quiet = []
        for turn, block in zip(self.turns[name], self.blocks[name], strict=True):
            near = beside[block : block + 1 if name == REFERENCE else block + 2]
            quiet.append(max(turn.probe_us) <= QUIET_CORE * probe_us and not any(turn.lost_ms) and max(near) <= limit)
        return np.array(quiet, bool)

    def as_earlier_run(self) -> QuietRun:
        """What the run's quiet turns tell of the reference, as a run on the quiet machine would have."""
        seen = self.is_quiet(REFERENCE) & (~self.on[REFERENCE] | (self.state == "nothing"))
        turns = [turn for turn, at in zip(self.turns[REFERENCE], seen, strict=True) if at]
        probe_us = self.probe_us()
        quietest = [turn for name, turns in self.turns.items() for turn, on in zip(turns, self.is_quiet(name) & (
            ~self.on[name] | (self.state == "nothing")), strict=True) if on]
        return QuietRun(probe_us, float(np.median(warm_ms(turns))), quiet_memory_us(quietest, probe_us))


def warm_ms(turns: Sequence[Turn]) -> np.ndarray:
    """The median of each quiet turn's calls [turns]: those whose caches are warm, and not right after the probe."""
    warm = calls_to_warm(turns)
    found = []
    for turn in turns:
        step, index = turn.calls_in_group, np.arange(len(turn.samples_ms))
        found.append(np.median(np.array(turn.samples_ms)[(index >= warm - 1) & ((step == 1) | (index % step > 0))]))
    return np.array(found)


def judge(recording: Recording) -> list[dict[str, Any]]:
    """Rows of all networks whose truth is known: estimates of each method, and the truth."""
    protocol = recording.protocol
    names = [name for name in recording.turns if name != REFERENCE]
    truth, used = {}, {}
    for name in names:
        quiet, on = recording.is_quiet(name), recording.on[name]
        seen = ~quiet if recording.state == "nothing" else on
        told = [turn for turn, at in zip(recording.turns[name], quiet & ~seen, strict=True) if at]
        truth[name] = warm_ms(told) if told else np.empty(0)
        used[name] = seen
    mine = {name: [turn for turn, at in zip(recording.turns[name], used[name], strict=True) if at] for name in names}
    copies = {name: [int(place) % protocol.copies for place in np.flatnonzero(used[name])] for name in mine}
    reference_on = recording.on[REFERENCE] if recording.state != "nothing" else np.ones(
        len(recording.turns[REFERENCE]), bool)
    beside = [turn for turn, at in zip(recording.turns[REFERENCE], reference_on, strict=True) if at]
    conditions = learn_conditions({**mine, REFERENCE: beside}, {
        **copies, REFERENCE: [int(place) % protocol.copies for place in np.flatnonzero(reference_on)]},
                                  protocol.quantile, reference=REFERENCE, earlier=[recording.as_earlier_run()])
    reference_ms, quiet_ms = recording.reference_ms(), low_mode(recording.reference_ms())
    rows = []
    for name in names:
        if len(truth[name]) < LEAST_QUIET or not mine[name]:
            continue
        logs = np.log(truth[name])
        found = estimate(mine[name], conditions, copies[name], protocol.quantile,
                         weights_mb=recording.weights_mb[name])
        before = reference_ms[recording.blocks[name][used[name]]]
        after = reference_ms[np.minimum(recording.blocks[name][used[name]] + 1, len(reference_ms) - 1)]
        low = np.array([low_ms(turn, protocol.quantile) for turn in mine[name]])
        rows.append({
            "deployment": recording.deployment, "state": recording.state, "host": recording.host, "network": name,
            "kind": recording.kinds[name], "truth_ms": float(np.exp(np.median(logs))), "n_quiet": len(logs),
            "truth_error": 1.2533 * 1.4826 * float(np.median(np.abs(logs - np.median(logs)))) / math.sqrt(len(logs)),
            "n_turns": len(low), "slowdown": float(np.median(low) / np.exp(np.median(logs))),
            "estimate_ms": math.exp(found.quiet), "half": math.sinh(found.half), "invalid": found.half > WIDEST,
            "low_quantile_ms": float(np.quantile([low_ms(turn, 0.1) for turn in mine[name]], 0.05)),
            "ratio_ms": quiet_ms * float(np.median(low / before)),
            **ingredients_of(mine[name], conditions, protocol, recording.weights_mb[name]),
            "today_ms": _today(low, np.maximum(before, after), reference_ms[reference_on], quiet_ms)})
    return rows


def ingredients_of(turns: Sequence[Turn], conditions: model.Conditions, protocol: Protocol,
                   weights_mb: float) -> dict[str, float]:
    """What `quiet.estimate` makes an estimate of: its logarithm before anything is taken off for emptied caches."""
    points = model._Points.of(turns, conditions, protocol.copies, protocol.quantile)
    fit = model._fit(points, conditions, weights_mb)
    plain = fit.quiet - math.log(conditions.level) - conditions.traffic
    longer = plain - math.log(conditions.reference_ms)
    unclear, cut = (float(points.calls[at].sum() / points.calls.sum()) for at in (~points.clear, points.cold > 0))
    reach = abs(conditions.traffic) * (model.REACH_STD + model.REACH_BY_LENGTH * min(abs(longer), model.LONGEST))
    base = math.hypot(fit.std, model.LEVEL_STD, model.UNKNOWN_STD * unclear, conditions.traffic_std, reach)
    return {"plain": plain, "base_std": base, "longer": longer, "unclear": unclear, "cut": cut,
            "weights_mb": weights_mb, "freedom": max(3, len(np.unique(points.turn)) + int(model.FREEDOM) - 1),
            "p50_ms": float(np.median(np.concatenate([turn.samples_ms for turn in turns])))}


def _today(low_ms: np.ndarray, beside_ms: np.ndarray, reference_ms: np.ndarray, stored_ms: float) -> float | None:
    """The median of the turns that looked quiet beside the reference; None: refused as INVALID."""
    quiet_ms = float(np.quantile(reference_ms, 0.2))
    quiet_ms = stored_ms if quiet_ms > stored_ms * (1 + TODAY_RUN_DRIFT) else quiet_ms
    good = low_ms[beside_ms <= quiet_ms * (1 + TODAY_DRIFT)]
    return float(np.median(good)) if len(good) >= TODAY_LEAST else None
