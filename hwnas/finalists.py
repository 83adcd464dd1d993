"""Which trials become finalists, and what of a finalist goes on to training and verification."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwnas.architecture import Architecture
from hwnas.errors import StudyError
from hwnas.pareto import layers


@dataclass(frozen=True, slots=True)
class Finalist:
    """A network to train in full, with what the search knew of it (top-1 as a fraction, latency in ms)."""

    architecture: Architecture
    top1_proxy: float
    latency_ms: float
    latency_ms_low: float
    latency_ms_high: float
    reward: float | None = None
    reward_winner: bool = False

    @property
    def id(self) -> str:
        """The architecture's id."""
        return self.architecture.id

    @classmethod
    def of_trial(cls, row: Mapping[str, Any], architecture: Architecture, reward_winner: bool) -> Finalist:
        """From a row of trials.csv."""
        return cls(architecture, row["top1_proxy"], row["latency_ms_predicted"], row["latency_ms_predicted_low"],
                   row["latency_ms_predicted_high"], row.get("reward"), reward_winner)


def finalists_of(trials: Sequence[Mapping[str, Any]], architectures: Mapping[str, Architecture], k: int,
                 ) -> list[Finalist]:
    """`choose_finalists` with its rows' architectures, by id."""
    rows = usable_trials(trials)
    winner = reward_winner(rows)
    return [Finalist.of_trial(row, architectures[row["id"]], row["id"] == winner)
            for row in choose_finalists(rows, k)]


def choose_finalists(trials: Sequence[Mapping[str, Any]], k: int) -> list[Mapping[str, Any]]:
    """At most `k` rows of trials.csv: spread over the front's log latency, each the best there by validation top-1.

    The range of log latency of the front is cut into k equal parts, and the best of each is taken; parts without a
    network give their places to the networks of the front farthest (in log latency) from those chosen. A front
    smaller than k is filled from the next layers by top-1. The reward's winner is always in: it takes the place of
    the chosen one that is nearest in log latency, but not of the most accurate. Fastest first.
    StudyError when no trial was evaluated.
    """
    rows = usable_trials(trials)
    if not rows:
        raise StudyError("no trial was evaluated, so there is nothing to verify. Raise n_trials or the cap.")
    depth = [[rows[index] for index in layer] for layer in layers(
        [(row["top1_proxy"], row["latency_ms_predicted"]) for row in rows], (False, True))]
    chosen = _spread(depth[0], k)
    for layer in depth[1:]:
        chosen += sorted(layer, key=_rank)[: k - len(chosen)]
    winner = next((row for row in rows if row["id"] == reward_winner(rows)), None)
    if winner is not None and winner["id"] not in {row["id"] for row in chosen}:
        if len(chosen) >= k:
            others = sorted(chosen, key=_rank)[1:] or chosen
            chosen.remove(min(others, key=lambda row: abs(_log_latency(row) - _log_latency(winner))))
        chosen.append(winner)
    return sorted(chosen, key=lambda row: (row["latency_ms_predicted"], -row["top1_proxy"]))


def usable_trials(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Evaluated rows with a top-1 and a latency, one a network; those stopped early only where no other is left."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in trials:
        if row.get("state") == "COMPLETE" and row.get("outcome") == "evaluated" and row.get("feasible") is not False \
                and _is_value(row.get("top1_proxy")) and _is_value(row.get("latency_ms_predicted")):
            found.setdefault(row["id"], row)
    whole = [row for row in found.values() if not row.get("stopped")]
    return whole or list(found.values())


def reward_winner(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Id of the row with the highest reward; None where no row has one."""
    rewarded = [row for row in rows if _is_value(row.get("reward"))]
    return str(max(rewarded, key=lambda row: row["reward"])["id"]) if rewarded else None


def _spread(front: Sequence[Mapping[str, Any]], k: int) -> list[Mapping[str, Any]]:
    if len(front) <= k:
        return list(front)
    low, high = min(map(_log_latency, front)), max(map(_log_latency, front))
    width = (high - low) / k or 1.0
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for row in front:
        parts.setdefault(min(k - 1, int((_log_latency(row) - low) / width)), []).append(row)
    chosen = [min(part, key=_rank) for part in parts.values()]
    while len(chosen) < k:
        left = [row for row in front if row not in chosen]
        chosen.append(max(left, key=lambda row: min(abs(_log_latency(row) - _log_latency(one)) for one in chosen)))
    return chosen


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Most accurate first, then fastest."""
    return -row["top1_proxy"], row["latency_ms_predicted"]


def _log_latency(row: Mapping[str, Any]) -> float:
    return math.log(row["latency_ms_predicted"])


def _is_value(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
