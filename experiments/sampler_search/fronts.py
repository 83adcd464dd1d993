"""The verified fronts of one seed's searches beside each other; all were timed in the same interleaved rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.sampler_search.reading import SearchRun
from hwnas.front.rows import FrontRow
from hwnas.stats import Z90, hypervolume_2d, non_dominated

DRAWS = 1000


@dataclass(frozen=True)
class Front:
    """A search's verified finalists. `area`: hypervolume of test top-1 and log2 of measured latency against the worst
    of all finalists; `error`: its standard deviation by test images and timing alone, not by training again. `joint`:
    how many of its finalists no finalist of any search dominates."""

    sampler: str
    finalists: int
    area: float
    error: float
    joint: int


def fronts(runs: Sequence[SearchRun]) -> list[Front]:
    """One a search that has verified finalists."""
    able = [run for run in runs if run.finalists]
    every = [row for run in able for row in run.finalists]
    if not every:
        return []
    points = [_point(row) for row in every]
    worst = min(top1 for top1, _ in points), max(latency for _, latency in points)
    joint = {row.id for row, on in zip(every, non_dominated(points, (False, True)), strict=True) if on}
    return [_front(run, worst, joint) for run in able]


def own_front(run: SearchRun) -> list[FrontRow]:
    """Verified finalists that no other finalist of the same search dominates, fastest first."""
    on = non_dominated([_point(row) for row in run.finalists], (False, True))
    return [row for row, chosen in zip(run.finalists, on, strict=True) if chosen]


def to_dict(front: Front, run: SearchRun) -> dict[str, Any]:
    """Entry of summary.json."""
    return {"sampler": front.sampler, "finalists": front.finalists, "hypervolume": round(front.area, 6),
            "hypervolume_std": round(front.error, 6), "on_joint_front": front.joint,
            "best_top1_test": max(row.top1_test or 0.0 for row in run.finalists),
            "against_baselines": [one.get("sentence") for one in run.comparisons]}


def _front(run: SearchRun, worst: tuple[float, float], joint: set[str]) -> Front:
    points = np.array([_point(row) for row in run.finalists])
    spread = np.array([_spread(row) for row in run.finalists])
    rng = np.random.default_rng(0)
    drawn = points + spread * rng.standard_normal((DRAWS, *points.shape))
    areas = [hypervolume_2d(one[:, 0], one[:, 1], worst) for one in drawn]
    return Front(run.sampler, len(points), hypervolume_2d(points[:, 0], points[:, 1], worst), float(np.std(areas)),
                 sum(row.id in joint for row in run.finalists))


def _point(row: FrontRow) -> tuple[float, float]:
    return row.top1_test or 0.0, math.log2(row.latency_ms or math.nan)


def _spread(row: FrontRow) -> tuple[float, float]:
    """Standard deviations, from the 95 % interval of top-1 and the 90 % interval of latency; 0 where there is none."""
    top1 = latency = 0.0
    if row.top1_test_low is not None and row.top1_test_high is not None:
        top1 = (row.top1_test_high - row.top1_test_low) / (2 * 1.96)
    if row.latency_ms_low and row.latency_ms_high:
        latency = math.log2(row.latency_ms_high / row.latency_ms_low) / (2 * Z90)
    return top1, latency
