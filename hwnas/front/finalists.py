"""Choose the finalists among the trials, and draw random networks to compare them with.

Training and verification fill in their rows of the front later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median, stdev
from typing import Any

import numpy as np

from hwnas.errors import StudyError
from hwnas.front.rows import FrontRow
from hwnas.networks.network import FoundNetwork, Network
from hwnas.space.search_space import SearchSpace
from hwnas.stats import layers
from hwnas.study.candidate import Candidate
from hwnas.study.objective import Predict, known_costs, upper_ms
from hwnas.system.run_folder import ESTIMATED

Trial = Mapping[str, Any]  # a row of trials.csv
NEAR = 0.2  # a network at most this share below the cap shows what the cap buys
ENOUGH = 6  # least number of networks whose spread can be judged
TINY = 1e-9  # a cost of 0, as another package may count, is so much on a log scale


def finalists_of(trials: Sequence[Trial], network_of: Callable[[Trial], Network], k: int, target: str, host: str,
                 cap_ms: float | None = None, by_reward: bool = False) -> list[FrontRow]:
    """Return the chosen finalists as rows of the later front. `network_of` gives the network of a row of trials.csv."""
    usable = usable_trials(trials)
    winner = reward_winner(usable)
    return [FrontRow.of(
        network_of(trial), target=target, host=host, top1_proxy=trial["top1_proxy"],
        **{name: trial.get(name) for name in ESTIMATED},
        latency_ms_predicted=trial["latency_ms_predicted"], latency_ms_predicted_low=trial["latency_ms_predicted_low"],
        latency_ms_predicted_high=trial["latency_ms_predicted_high"], reward=trial.get("reward"),
        reward_winner=trial["id"] == winner) for trial in choose_finalists(usable, k, cap_ms, by_reward)]


def choose_finalists(trials: Sequence[Trial], k: int, cap_ms: float | None = None, by_reward: bool = False
                     ) -> list[Trial]:
    """Choose at most `k` rows of trials.csv, spread over the front's log cost, fastest first.

    Rows count with the top-1 that the model of all trials estimates (`top1_estimated`), otherwise with the trial's own.
    The best of many short trainings is partly luck, so its own top-1 is too high. The cost is the one that the search
    minimised: latency, unless the rows say otherwise. Its range over the front is cut into k equal parts, and each part
    gives its row with the best top-1. Empty parts give their places to the front's rows that are farthest, in log cost,
    from the chosen ones. With `cap_ms`, the range is from the fastest network to the cap, over all rows: short
    trainings rank networks by how fast they learn, and a user who allows so much time wants to see what it buys. With
    two costs, the parts are neighbourhoods of k rows: the most accurate one, then always the one farthest from all
    before. If the front has fewer than k rows, the next layers fill it by top-1.

    Two more rows are required. One has the highest reward. The other, with `cap_ms`, is the most accurate one near the
    cap (20 %). A row does not count there if, by the model's intervals, a faster one is better. Each replaces the
    nearest chosen row, but not the most accurate one, unless k is 1 and the search was for the reward (`by_reward`).
    Raises StudyError if no trial was evaluated.
    """
    rows = usable_trials(trials)
    if not rows:
        raise StudyError("no network was trained and scored, so there is nothing to verify. trials.csv says why each "
                         "failed. Raise n_trials or the cap.")
    # 1. Spread the places over the front, and fill those that are left from the next layers.
    points = [(believed(row), *known_costs(row)) for row in rows]
    depth = [[rows[index] for index in layer]
             for layer in layers(points, [column > 0 for column in range(len(points[0]))])]
    only_latency = all(known_costs(row) == (row["latency_ms_predicted"],) for row in rows)
    chosen = _choose_spread(rows, depth[0], k, cap_ms if only_latency else None)
    for layer in depth[1:]:
        chosen += sorted((row for row in layer if row not in chosen), key=_rank)[: k - len(chosen)]
    # 2. Find the required rows: the highest reward, and one near the cap if none was chosen there.
    winner = next((row for row in rows if row["id"] == reward_winner(rows)), None)
    required = [] if winner is None else [winner]
    near = [row for row in rows if cap_ms is not None and (1 - NEAR) * cap_ms <= row["latency_ms_predicted"] <= cap_ms
            and not any(_clearly_better(other, row) for other in rows)]
    if near and k > 1 and not any(row in near for row in chosen):
        required.append(min(near, key=_rank))
    # 3. Put each required row in. If all k places are taken, it replaces the nearest one that is neither required nor
    # the most accurate.
    for row in required:
        if row["id"] in {other["id"] for other in chosen}:
            continue
        if len(chosen) >= k:
            others = [other for other in sorted(chosen, key=_rank)[1:] if other not in required]
            if not others and not (by_reward and k == 1):
                continue
            others = others or chosen
            chosen.remove(min(others, key=lambda other: _distance(other, row)))
        chosen.append(row)
    return sorted(chosen, key=lambda row: (row["latency_ms_predicted"], -believed(row)))


def believed(row: Trial) -> float:
    """Return the top-1 by which a row of trials.csv is chosen: the model's estimate, or else the trial's own."""
    estimated = row.get(ESTIMATED[0])
    return float(row["top1_proxy"] if estimated is None else estimated)


def _clearly_better(row: Trial, other: Trial) -> bool:
    """Return whether `row` is faster than `other`, and its whole interval of estimated top-1 is above the other's."""
    low, high = row.get(ESTIMATED[1]), other.get(ESTIMATED[2])
    faster = row["latency_ms_predicted"] < other["latency_ms_predicted"]
    return faster and low is not None and high is not None and bool(low > high)


def doubts(trials: Sequence[Trial], finalists: Sequence[FrontRow], cap_ms: float | None) -> list[str]:
    """Return what a user should know before minutes are spent on `finalists`: a line for each doubt, with a remedy."""
    lines = []
    rows = usable_trials(trials)
    # Estimates that differ by no more than their own error do not rank networks.
    stds = [row["top1_std"] for row in rows if (row.get("top1_std") or 0.0) > 0]
    if len(rows) >= ENOUGH and len(stds) == len(rows):
        spread, noise = stdev(row["top1_proxy"] for row in rows), median(stds)
        if spread <= noise:
            lines.append(f"the estimates of {len(rows)} networks differ by {100 * spread:.1f} points (standard "
                         f"deviation), no more than their own error of {100 * noise:.1f}: they do not rank these "
                         "networks. Train longer (proxy.min_steps=, proxy.max_steps=), on larger images "
                         "(dataset.image_size=), or look at controls before you believe the choice.")
    slowest = max((row.latency_ms_predicted or 0.0 for row in finalists), default=0.0)
    if cap_ms is not None and finalists and slowest < cap_ms / 2:
        lines.append(f"all finalists are far below budget.latency_ms={cap_ms:g}: the slowest is predicted at "
                     f"{slowest:.3g} ms. To use what is allowed: objective=cap, larger images (dataset.image_size=), "
                     "or a space with larger networks.")
    return lines


def usable_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Return the evaluated rows with top-1 and latency, one for each network."""
    by_id: dict[str, Trial] = {}
    for row in trials:
        if row.get("state") == "COMPLETE" and row.get("outcome") == "evaluated" and row.get("feasible") is not False \
                and all(value is not None and math.isfinite(value) for value in (
                    row.get("top1_proxy"), row.get("latency_ms_predicted"), *known_costs(row))):
            by_id.setdefault(row["id"], row)
    return list(by_id.values())


def reward_winner(rows: Sequence[Trial]) -> str | None:
    """Return the id of the row with the highest reward at its estimated top-1; None if no row has a reward."""
    rewarded = [row for row in rows if row.get("reward") is not None]
    if not rewarded:
        return None
    return str(max(rewarded, key=lambda row: row["reward"] * believed(row) / (row["top1_proxy"] or 1.0))["id"])


def _choose_spread(rows: Sequence[Trial], front: Sequence[Trial], k: int, cap_ms: float | None = None) -> list[Trial]:
    """Return the most accurate row of each k-th of the range of log cost: of the front, or of all `rows` up to the cap.
    Empty parts give their places to the front."""
    low = min((_position(row)[0] for row in rows), default=0.0)
    if cap_ms is not None and math.log(cap_ms) > low:
        chosen = [min(part, key=_rank) for part in _parts(rows, k, low, math.log(cap_ms))]
        if len(chosen) < k:
            chosen += _choose_spread(rows, [row for row in front if row not in chosen], k - len(chosen))
        return chosen
    if len(front) <= k:
        return list(front)
    at = [_position(row)[0] for row in front]
    parts = _parts(front, k, min(at), max(at)) if len(known_costs(front[0])) == 1 else _surroundings(front, k)
    chosen = [min(part, key=_rank) for part in parts]
    while len(chosen) < k:
        chosen.append(_farthest(front, chosen))
    return chosen


def _parts(rows: Sequence[Trial], k: int, low: float, high: float) -> list[list[Trial]]:
    """Group the rows by k equal parts of a range of log cost. Empty parts are left out."""
    width = (high - low) / k or 1.0
    parts: dict[int, list[Trial]] = {}
    for row in rows:
        parts.setdefault(min(k - 1, int((_position(row)[0] - low) / width)), []).append(row)
    return list(parts.values())


def _surroundings(front: Sequence[Trial], k: int) -> list[list[Trial]]:
    """Group the front: each row belongs to the nearest of k rows that are far from each other."""
    centres = [min(front, key=_rank)]
    while len(centres) < k:
        centres.append(_farthest(front, centres))
    parts: list[list[Trial]] = [[centre] for centre in centres]
    for row in front:
        if row not in centres:
            parts[min(range(k), key=lambda index: _distance(row, centres[index]))].append(row)
    return parts


def _farthest(front: Sequence[Trial], chosen: Sequence[Trial]) -> Trial:
    left = [row for row in front if row not in chosen]
    return max(left, key=lambda row: min(_distance(row, other) for other in chosen))


def _rank(row: Trial) -> tuple[float, float]:
    """Return a sort key: most accurate first, then fastest."""
    return -believed(row), row["latency_ms_predicted"]


def _position(row: Trial) -> tuple[float, ...]:
    return tuple(math.log(max(cost, TINY)) for cost in known_costs(row))


def _distance(row: Trial, other: Trial) -> float:
    """Return the distance of two rows in log cost, in which a factor of two counts the same for every cost."""
    return math.dist(_position(row), _position(other))


WITHIN = 0.05  # share by which the predicted latencies of a finalist and its control may differ
_DRAWS, _BATCHES = 4096, 16  # networks that are drawn at once, and how often at most


def draw_controls(finalists: Sequence[FrontRow], space: SearchSpace, predict: Predict, k: int, seed: int,
                  say: Callable[[str], None]) -> list[FrontRow]:
    """Return the rows of `k` controls, each within 5 % of the predicted latency of the finalist in its `control_of`.
    They are the first fitting ones of networks drawn as `SearchSpace.sample` draws them, so their accuracy is unknown.
    Finalists take turns, slow ones and fast ones evenly. `say` is called for each control that was not found."""
    ordered = sorted((row for row in finalists if row.latency_ms_predicted),
                     key=lambda row: -(row.latency_ms_predicted or 0.0))
    # Each finalist gets `rounds` controls; the rest goes to finalists spread evenly from slow to fast.
    rounds, rest = divmod(k, max(1, len(ordered)))
    spread = np.linspace(0, len(ordered) - 1, rest).round().astype(int) if ordered else ()
    partners = [*ordered * rounds, *(ordered[at] for at in spread)]
    rng = np.random.default_rng([seed, *b"controls"])
    taken, controls = {row.id for row in finalists}, []
    for _ in range(_BATCHES):
        if not partners:
            break
        codes = space.sample(rng, _DRAWS)
        predicted = predict(codes)
        for partner in list(partners):
            # Take the first network of the batch that is as fast as the partner and not taken yet.
            apart = np.abs(predicted.mean / (partner.latency_ms_predicted or np.nan) - 1)
            for at in np.flatnonzero(apart <= WITHIN):
                architecture = space.decode(space.to_params(codes[at]))
                if architecture.id not in taken:
                    taken.add(architecture.id)
                    partners.remove(partner)
                    controls.append(_control(Candidate(architecture, predicted.of(int(at))), partner, partner.id))
                    break
    for partner in partners:
        say(f"a control fewer: of {_DRAWS * _BATCHES} networks drawn from {space.name} no other one is predicted "
            f"within 5 % of {partner.id}'s {partner.latency_ms_predicted:.4g} ms.")
    return controls


def known_controls(space: SearchSpace, predict: Predict, beside: Sequence[FrontRow], cap_ms: float | None,
                   quantile: float, say: Callable[[str], None]) -> list[FrontRow]:
    """Return rows of the space's known networks, except the ones that are in `beside` already. A network whose
    predicted latency is over the cap at this `quantile` is left out, and `say` is called with a line about it."""
    rows, taken = [], {row.id for row in beside}
    for name, architecture in space.known.items():
        candidate = Candidate(architecture, predict(space.to_codes(space.known_params[name])[None]))
        if cap_ms is not None and float(upper_ms(candidate.latency, quantile)[0]) > cap_ms:
            say(f"the known network {name} is left out: its predicted {candidate.latency_ms:.4g} ms do not keep "
                f"budget.latency_ms={cap_ms:g}.")
        elif architecture.id not in taken:
            taken.add(architecture.id)
            rows.append(replace(_control(candidate, beside[0]), name=name))
    return rows


def _control(candidate: Candidate, like: FrontRow, control_of: str = "") -> FrontRow:
    return FrontRow.of(FoundNetwork(candidate.architecture), target=like.target, host=like.host, is_control=True,
                       control_of=control_of, **candidate.columns)
