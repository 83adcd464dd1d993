"""What the searches found, after each evaluation and in the end, and how soon each found what another did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.sampler_search.reading import SearchRun
from hwnas.errors import StudyError
from hwnas.stats import hypervolume_2d

Array = NDArray[np.float64]
Reference = tuple[float, float]  # top-1, log2 of ms
REFERENCES = {  # percentiles, in top-1 and in latency, of all networks that any of the searches evaluated
    "the 25th percentile of top-1 and the 90th of latency": (25.0, 90.0),  # as in sampler_contest
    "the worst top-1 and the worst latency": (0.0, 100.0),
}
MAIN, WIDE = REFERENCES


@dataclass(frozen=True, eq=False)
class Scored:
    """A search with its proxy hypervolume [n] (top-1 times octaves of latency) after each evaluation, and the same as
    a share of what all searches of its seed found together."""

    run: SearchRun
    hypervolume: Array
    share: Array

    def needed(self, level: float) -> int | None:
        """Evaluations until the hypervolume is at least `level`; None where it never is."""
        reached = self.hypervolume >= level * (1 - 1e-12)
        return int(reached.argmax()) + 1 if reached.any() else None


@dataclass(frozen=True)
class Race:
    """How `sampler` came to the final hypervolume of `other`, seed by seed: evaluations (None: not within the budget)
    and seconds at work, each with what the other itself took to its last gain; `ended`: the share of it in the end."""

    sampler: str
    other: str
    evaluations: tuple[int | None, ...]
    others_evaluations: tuple[int, ...]
    wall_s: tuple[float | None, ...]
    others_wall_s: tuple[float, ...]
    ended: tuple[float, ...]


def scored(runs: Sequence[SearchRun], name: str = MAIN) -> tuple[list[Scored], Reference]:
    """Every run, cut to the number of evaluations that all have, against the one reference point of all runs.

    StudyError when runs of a seed differ in space, data, target, table or accuracy.
    """
    budget = min(len(run.ids) for run in runs)
    at = reference(runs, budget, name)
    found = []
    for seed in dict.fromkeys(run.seed for run in runs):
        of_seed = [run for run in runs if run.seed == seed]
        _check_same(of_seed)
        together = _area(np.concatenate([run.top1[:budget] for run in of_seed]),
                         np.concatenate([run.latency_ms[:budget] for run in of_seed]), at)
        for run in of_seed:
            areas = np.array([_area(run.top1[:n], run.latency_ms[:n], at) for n in range(1, budget + 1)])
            found.append(Scored(run, areas, areas / together if together else np.full(budget, np.nan)))
    return found, at


def reference(runs: Sequence[SearchRun], budget: int, name: str = MAIN) -> Reference:
    """One of REFERENCES, over networks trained to the end."""
    top1 = np.concatenate([run.top1[:budget] for run in runs])
    latency = np.log2(np.concatenate([run.latency_ms[:budget] for run in runs]))
    low, high = REFERENCES[name]
    whole = ~np.isnan(top1)
    return float(np.percentile(top1[whole], low)), float(np.percentile(latency[whole], high))


def races(found: Sequence[Scored]) -> list[Race]:
    """Every ordered pair of samplers, the first sampler's first."""
    names = list(dict.fromkeys(one.run.sampler for one in found))
    return [_race([one for one in found if one.run.sampler == name], [one for one in found if one.run.sampler == other])
            for name, other in permutations(names, 2)]


def _race(mine: Sequence[Scored], others: Sequence[Scored]) -> Race:
    by_seed = {one.run.seed: one for one in others}
    pairs = [(one, by_seed[one.run.seed]) for one in mine]
    levels = [float(other.hypervolume[-1]) for _, other in pairs]
    needed = [one.needed(level) for (one, _), level in zip(pairs, levels, strict=True)]
    theirs = [other.needed(level) or len(other.hypervolume) for (_, other), level in zip(pairs, levels, strict=True)]
    return Race(
        mine[0].run.sampler, others[0].run.sampler, tuple(needed), tuple(theirs),
        tuple(None if n is None else float(one.run.wall_s[n - 1]) for (one, _), n in zip(pairs, needed, strict=True)),
        tuple(float(other.run.wall_s[n - 1]) for (_, other), n in zip(pairs, theirs, strict=True)),
        tuple(float(one.hypervolume[-1]) / level if level else float("nan")
              for (one, _), level in zip(pairs, levels, strict=True)))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error, None with a single value."""
    n = len(values)
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None


def rows(found: Sequence[Scored]) -> list[dict[str, Any]]:
    """A row an evaluation: search.csv."""
    return [{"sampler": one.run.sampler, "seed": one.run.seed, "evaluation": index + 1, "id": one.run.ids[index],
             "top1_proxy": None if np.isnan(one.run.top1[index]) else round(float(one.run.top1[index]), 6),
             "latency_ms_predicted": round(float(one.run.latency_ms[index]), 6),
             "hypervolume": round(float(one.hypervolume[index]), 6), "share": round(float(one.share[index]), 6),
             "seconds": round(float(one.run.wall_s[index]), 2),
             "training_seconds": round(float(one.run.training_s[index]), 2),
             "asking_seconds": round(float(one.run.asking_s[index]), 3)}
            for one in found for index in range(len(one.hypervolume))]


def _area(top1: Array, latency_ms: Array, at: Reference) -> float:
    return hypervolume_2d(top1, np.log2(latency_ms), at)


def _check_same(runs: Sequence[SearchRun]) -> None:
    first: Mapping[str, str] = runs[0].identity
    for other in runs[1:]:
        for key in [*first, *other.identity]:
            if first and other.identity and first.get(key) != other.identity.get(key):
                raise StudyError(f"seed {other.seed}: {key} is {first.get(key)} with {runs[0].sampler}, "
                                 f"{other.identity.get(key)} with {other.sampler}. Take another out=DIR.")
