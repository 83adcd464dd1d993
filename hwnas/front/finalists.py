"""Which trials become finalists: rows of the front to come, which training and verification fill in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hwnas.errors import StudyError
from hwnas.front.rows import FrontRow
from hwnas.networks.network import Network
from hwnas.stats.pareto import layers
from hwnas.study.costs import known_costs


def finalists_of(trials: Sequence[Mapping[str, Any]], network_of: Callable[[Mapping[str, Any]], Network], k: int,
                 target: str, host: str) -> list[FrontRow]:
    """`choose_finalists` as rows of the front to come; `network_of` tells the network of a row of trials.csv."""
    usable = usable_trials(trials)
    winner = reward_winner(usable)
    return [FrontRow.of(
        network_of(trial), target=target, host=host, top1_proxy=trial["top1_proxy"],
        latency_ms_predicted=trial["latency_ms_predicted"], latency_ms_predicted_low=trial["latency_ms_predicted_low"],
        latency_ms_predicted_high=trial["latency_ms_predicted_high"], reward=trial.get("reward"),
        reward_winner=trial["id"] == winner) for trial in choose_finalists(usable, k)]


def choose_finalists(trials: Sequence[Mapping[str, Any]], k: int) -> list[Mapping[str, Any]]:
    """At most `k` rows of trials.csv: spread over the front's log cost, each the best there by validation top-1.

    Cost is what the search minimised: latency, unless rows say otherwise. Its range over the front is cut into k equal
    parts, and the best of each is taken; parts without a network give their places to the networks of the front
    farthest (in log cost) from those chosen. Of two costs the parts are the surroundings of k networks of the front:
    the most accurate, and then always the one farthest from those before. A front smaller than k is filled from the
    next layers by top-1. The reward's winner is always in: it takes the place of the chosen one that is nearest in log
    cost, but not of the most accurate. Fastest first. StudyError when no trial was evaluated.
    """
    rows = usable_trials(trials)
    if not rows:
        raise StudyError("no trial was evaluated, so there is nothing to verify. Raise n_trials or the cap.")
    points = [(row["top1_proxy"], *known_costs(row)) for row in rows]
    depth = [[rows[index] for index in layer]
             for layer in layers(points, [column > 0 for column in range(len(points[0]))])]
    chosen = _spread(depth[0], k)
    for layer in depth[1:]:
        chosen += sorted(layer, key=_rank)[: k - len(chosen)]
    winner = next((row for row in rows if row["id"] == reward_winner(rows)), None)
    if winner is not None and winner["id"] not in {row["id"] for row in chosen}:
        if len(chosen) >= k:
            others = sorted(chosen, key=_rank)[1:] or chosen
            chosen.remove(min(others, key=lambda row: _distance(row, winner)))
        chosen.append(winner)
    return sorted(chosen, key=lambda row: (row["latency_ms_predicted"], -row["top1_proxy"]))


def usable_trials(trials: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Evaluated rows with a top-1 and a latency, one a network; those stopped early only where no other is left."""
    by_id: dict[str, Mapping[str, Any]] = {}
    for row in trials:
        if row.get("state") == "COMPLETE" and row.get("outcome") == "evaluated" and row.get("feasible") is not False \
                and all(map(_is_value, (row.get("top1_proxy"), row.get("latency_ms_predicted"), *known_costs(row)))):
            by_id.setdefault(row["id"], row)
    whole = [row for row in by_id.values() if not row.get("stopped")]
    return whole or list(by_id.values())


def reward_winner(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Id of the row with the highest reward; None where no row has one."""
    rewarded = [row for row in rows if _is_value(row.get("reward"))]
    return str(max(rewarded, key=lambda row: row["reward"])["id"]) if rewarded else None


def _spread(front: Sequence[Mapping[str, Any]], k: int) -> list[Mapping[str, Any]]:
    if len(front) <= k:
        return list(front)
    parts = _lengths(front, k) if len(known_costs(front[0])) == 1 else _surroundings(front, k)
    chosen = [min(part, key=_rank) for part in parts]
    while len(chosen) < k:
        chosen.append(_farthest(front, chosen))
    return chosen


def _lengths(front: Sequence[Mapping[str, Any]], k: int) -> list[list[Mapping[str, Any]]]:
    """The front by equal parts of its range of log cost, those without a network left out."""
    at = [_position(row)[0] for row in front]
    width = (max(at) - min(at)) / k or 1.0
    parts: dict[int, list[Mapping[str, Any]]] = {}
    for row, position in zip(front, at, strict=True):
        parts.setdefault(min(k - 1, int((position - min(at)) / width)), []).append(row)
    return list(parts.values())


def _surroundings(front: Sequence[Mapping[str, Any]], k: int) -> list[list[Mapping[str, Any]]]:
    """The front by which of k networks, far from each other, is nearest."""
    centres = [min(front, key=_rank)]
    while len(centres) < k:
        centres.append(_farthest(front, centres))
    parts: list[list[Mapping[str, Any]]] = [[centre] for centre in centres]
    for row in front:
        if row not in centres:
            parts[min(range(k), key=lambda index: _distance(row, centres[index]))].append(row)
    return parts


def _farthest(front: Sequence[Mapping[str, Any]], chosen: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    left = [row for row in front if row not in chosen]
    return max(left, key=lambda row: min(_distance(row, other) for other in chosen))


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    """Most accurate first, then fastest."""
    return -row["top1_proxy"], row["latency_ms_predicted"]


def _position(row: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(math.log(cost) for cost in known_costs(row))


def _distance(row: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """In log cost: twice as much counts alike for every cost."""
    return math.dist(_position(row), _position(other))


def _is_value(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
