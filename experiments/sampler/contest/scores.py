"""What runs are worth: the share of the true hypervolume after each evaluation, and means over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.common import hypervolume_2d
from experiments.sampler.contest.replay import Run
from experiments.sampler.contest.table import Table
from hwnas.stats import non_dominated

MARKS = (25, 50, 100, 200, 250, 400)  # evaluations
WRITTEN = (25, 50, 100, 200, 400)  # of these in contest.csv
LEVELS = (0.90, 0.95, 0.99)
EVERY = 5  # evaluations between two points of a curve


@dataclass(frozen=True)
class Scores:
    """One sampler's hypervolume shares [seeds, evaluations]."""

    sampler: str
    runs: tuple[Run, ...]
    shares: np.ndarray

    @property
    def evals(self) -> int:
        """How many networks each run evaluated."""
        return int(self.shares.shape[1])

    def at(self, evals: int) -> tuple[float, float | None] | None:
        """Mean share and its standard error; None where no run went so far, no error with a single seed."""
        if not 1 <= evals <= self.evals:
            return None
        return mean_and_error(self.shares[:, evals - 1])

    def needed(self, level: float) -> list[int]:
        """Evaluations to a share, of the seeds that reached it."""
        reached = self.shares >= level
        return [int(row.argmax()) + 1 for row in reached if row.any()]

    def summary(self) -> dict[str, Any]:
        """One flat row."""
        row: dict[str, Any] = {"sampler": self.sampler, "seeds": len(self.runs), "evals": self.evals}
        for mark in MARKS:
            found = self.at(mark)
            row[f"mean_{mark}"] = None if found is None else round(found[0], 6)
            row[f"error_{mark}"] = None if found is None or found[1] is None else round(found[1], 6)
        for level in LEVELS:
            needed = self.needed(level)
            row[f"evals_to_{100 * level:.0f}"] = round(float(np.mean(needed)), 1) if needed else None
            row[f"seeds_to_{100 * level:.0f}"] = len(needed)
        asks = sum(run.asks for run in self.runs)
        row["seconds_an_ask"] = round(sum(run.seconds for run in self.runs) / asks, 5)
        return {**row, "asks": asks, "outside": sum(run.outside for run in self.runs),
                "drawn": sum(run.drawn for run in self.runs)}


def scored(table: Table, runs: Iterable[Run], *, wide: bool = False) -> list[Scores]:
    """Samplers in the order of their first run; `wide`: hypervolume from the table's wide reference point."""
    reference = table.wide_reference if wide else table.reference
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.sampler, []).append(run)
    return [Scores(name, tuple(group), np.array([shares(table, run.networks, reference) for run in group]))
            for name, group in groups.items()]


def shares(table: Table, networks: Sequence[int], reference: tuple[float, float] | None = None) -> np.ndarray:
    """Share of the true hypervolume after each of these evaluations [n]."""
    reference = reference or table.reference
    whole = table.hypervolume_of(reference)
    points = np.column_stack([table.accuracy, np.log2(table.latency_ms)])[list(networks)]
    found = np.zeros(len(points))
    front, share = points[:0], 0.0
    for index, point in enumerate(points):
        if not ((front[:, 0] >= point[0]) & (front[:, 1] <= point[1])).any():
            front = np.vstack([front, point])
            front = front[non_dominated(front, (False, True))]
            share = hypervolume_2d(front[:, 0], front[:, 1], reference) / whole
        found[index] = share
    return found


def mean_and_error(values: np.ndarray) -> tuple[float, float | None]:
    """Mean and its standard error, None with a single value."""
    n = len(values)
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None


def rows_at(found: Sequence[Scores], marks: Iterable[int]) -> list[Mapping[str, Any]]:
    """A row a sampler, seed and mark; the last evaluation is a mark too."""
    rows: list[Mapping[str, Any]] = []
    for one in found:
        at = sorted({mark for mark in marks if mark < one.evals} | {one.evals})
        rows += [{"sampler": run.sampler, "seed": run.seed, "evals": mark, "hv_share": round(float(row[mark - 1]), 6)}
                 for run, row in zip(one.runs, one.shares, strict=True) for mark in at]
    return rows


def curve_rows(found: Sequence[Scores], every: int = EVERY) -> list[Mapping[str, Any]]:
    """A row a sampler and every so many evaluations: mean share, its standard error, how many seeds."""
    rows = []
    for one in found:
        for evals in sorted({*range(every, one.evals + 1, every), one.evals}):
            mean, error = mean_and_error(one.shares[:, evals - 1])
            rows.append({"sampler": one.sampler, "evals": evals, "mean": round(mean, 6),
                         "error": None if error is None else round(error, 6), "seeds": len(one.runs)})
    return rows
