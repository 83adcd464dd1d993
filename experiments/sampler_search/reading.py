"""What a run folder says of its search: evaluations in the order they ended, what they took, the verified front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import DataError
from hwnas.front.rows import FrontRow, load_front
from hwnas.study.record import DUPLICATE, EVALUATED, FAILED, INFEASIBLE, INTERRUPTED, LOST
from hwnas.system.run_folder import RunFolder

Array = NDArray[np.float64]
Span = tuple[float, float]  # start and end in seconds
AT_WORK = (EVALUATED, DUPLICATE, INFEASIBLE, FAILED, INTERRUPTED)  # a lost trial's end is when it was found dead


@dataclass(frozen=True, eq=False)
class SearchRun:
    """One finished search. Arrays have one entry an evaluation, in the order in which they ended.

    `top1` is NaN where training was stopped early: such a network can be no finalist, but was paid for. `wall_s`:
    seconds since the first trial began in which any trial was at work, so that pauses between restarts do not count.
    `training_s`, `asking_s`: sums over all trials ended by then, workers together; asking is what trials took besides
    training: the sampler, the latency model and the study. `counts`: trials by outcome. `identity`: what the study
    depends on; empty without a study.db. `front`: its finalists and the baselines, as timed with those of the others.
    """

    sampler: str
    seed: int
    ids: tuple[str, ...]
    top1: Array
    latency_ms: Array
    wall_s: Array
    training_s: Array
    asking_s: Array
    counts: Mapping[str, int]
    front: tuple[FrontRow, ...] = ()
    comparisons: tuple[Mapping[str, Any], ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)

    @property
    def asks(self) -> int:
        """Trials that were started."""
        return sum(self.counts.values())

    @property
    def finalists(self) -> list[FrontRow]:
        """Verified ones, fastest first."""
        found = [row for row in self.front if row.verified and row.is_finalist]
        return sorted(found, key=lambda row: row.latency_ms or 0.0)

    @property
    def baselines(self) -> list[FrontRow]:
        """Verified ones."""
        return [row for row in self.front if row.verified and row.is_baseline]


def read_run(path: Path, sampler: str, seed: int, together: Path | None = None) -> SearchRun:
    """Read `path`, and from the run folder `together` what its finalists came to (None: they were not verified).

    DataError when there is no evaluation, StudyError when a front is missing.
    """
    run = RunFolder(path)
    rows = run.read_trials()
    spans, identity = _study(path)
    spans = {**{int(row["number"]): span for row in rows if (span := _span(row))}, **spans}
    ended = [row for row in rows if row["outcome"] in AT_WORK and row["number"] in spans]
    ended.sort(key=lambda row: (spans[row["number"]][1], row["number"]))
    at = [index for index, row in enumerate(ended) if row["outcome"] == EVALUATED]
    if not at:
        raise DataError(f"{run.trials_csv}: no evaluated network. Give the same command again, or search anew.")
    evaluated = [ended[index] for index in at]
    begun = [spans[row["number"]] for row in ended]
    training = np.array([row["seconds"] or 0.0 for row in ended], float)
    asking = np.array([_asking(row, *span) for row, span in zip(ended, begun, strict=True)])
    return SearchRun(
        sampler, seed, tuple(str(row["id"]) for row in evaluated),
        np.array([np.nan if row["stopped"] else row["top1_proxy"] for row in evaluated], float),
        np.array([row["latency_ms_predicted"] for row in evaluated], float),
        at_work(begun, [begun[index][1] for index in at]), training.cumsum()[at], asking.cumsum()[at], _counts(rows),
        _front(run, RunFolder(together)) if together else (),
        tuple(run.read_json(run.comparisons, default=[])) if together else (), identity)


def at_work(spans: Sequence[Span], moments: Sequence[float]) -> Array:
    """Seconds until each moment that lie in one span at least."""
    merged: list[list[float]] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([first, end])
    starts, ends = np.array(merged).reshape(-1, 2).T
    return np.array([np.maximum(np.minimum(ends, moment) - starts, 0.0).sum() for moment in moments])


def _study(path: Path) -> tuple[dict[int, Span], dict[str, str]]:
    """Exact moments by trial number (trials.csv has whole seconds) and the identity; empty without a study.db."""
    if not RunFolder(path).study.is_file():
        return {}, {}
    from hwnas.study.study import database_path, identity_of, load_study

    study = load_study(database_path(path))
    spans = {trial.number: (trial.datetime_start.timestamp(), trial.datetime_complete.timestamp())
             for trial in study.get_trials(deepcopy=False) if trial.datetime_start and trial.datetime_complete}
    return spans, identity_of(study)


def _front(run: RunFolder, together: RunFolder) -> tuple[FrontRow, ...]:
    mine = {row.id for row in load_front(run)}
    return tuple(row for row in load_front(together) if row.id in mine)


def _span(row: Mapping[str, Any]) -> Span | None:
    if not row["started"] or not row["finished"]:
        return None
    return datetime.fromisoformat(row["started"]).timestamp(), datetime.fromisoformat(row["finished"]).timestamp()


def _asking(row: Mapping[str, Any], first: float, end: float) -> float:
    """Seconds of a trial besides training; 0 where what it trained in vain is not known."""
    return 0.0 if row["outcome"] in (FAILED, INTERRUPTED) else max(end - first - (row["seconds"] or 0.0), 0.0)


def _counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    names = [str(row["outcome"]) for row in rows]
    return {name: names.count(name) for name in dict.fromkeys((EVALUATED, DUPLICATE, INFEASIBLE, FAILED, LOST, *names))}
