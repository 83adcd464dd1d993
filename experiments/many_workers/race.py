"""One study raced by some workers, each a process of its own, on a space whose every network has a known accuracy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from hwnas.accuracy.estimator import Estimate
from hwnas.accuracy.tabular import Tabular
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable
from hwnas.samplers.informed import Context
from hwnas.samplers.loading import load_sampler
from hwnas.search.loop import SearchEvent, run_search
from hwnas.search.trial import SearchOptions
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import hypervolume_2d
from hwnas.study.objective import Objective
from hwnas.study.record import DUPLICATE, EVALUATED, count, outcome
from hwnas.study.study import load_study, open_study, storage_of

SPACE = "nas_bench_macro"
REFERENCE = (0.25, 0.90)  # quantiles of accuracy and latency that hypervolume is counted from
START_S = 300  # for all processes to be there


@dataclass(frozen=True)
class Problem:
    """The space, what is known of its networks, and the hypervolume of all of them together."""

    space: SearchSpace
    model: LatencyModel
    accuracies: Tabular
    reference: tuple[float, float]
    hypervolume: float

    @classmethod
    def load(cls, accuracies: Path, latencies: Path) -> Problem:
        """TableError, DataError when a file is not what it should be."""
        table = LatencyTable.load(latencies)
        space = SearchSpace.load(SPACE, channels=table.key.channels, classes=table.key.classes)
        known = Tabular.from_config({"path": accuracies, "value_column": "accuracy_cifar10"}, space)
        model = LatencyModel.fit(table, space)
        codes = np.array(list(product(*(range(len(one.choices)) for one in space.parameters))))
        names = [space.decode(space.to_params(row)).id for row in codes]
        top1 = np.array([known.rows[name][0] for name in names])
        latency = np.log2(model.predict(codes).mean)
        reference = (float(np.quantile(top1, REFERENCE[0])), float(np.quantile(latency, REFERENCE[1])))
        return cls(space, model, known, reference, hypervolume_2d(top1, latency, reference))

    def share(self, values: Sequence[Sequence[float]]) -> float:
        """Share of the whole hypervolume under (top-1, latency in ms) [n, 2]."""
        found = np.array(values, float).reshape(-1, 2)
        return hypervolume_2d(found[:, 0], np.log2(found[:, 1]), self.reference) / self.hypervolume


load_problem = cache(Problem.load)


@dataclass(frozen=True)
class Race:
    """Who races: `seconds` is what an evaluation takes in the mean (0.2 to 1.8 times as long, by the network)."""

    storage: str
    sampler: str
    workers: int
    seed: int
    evals: int
    seconds: float


@dataclass(frozen=True)
class Result:
    """A race's figures: share of the hypervolume of its first half and of all its `evals` evaluations, in the order in
    which they ended; asks, duplicates and acknowledged evaluations that the study lacks; wall seconds; mean number of
    other trials at work when one is asked."""

    race: Race
    half: float
    share: float
    evaluated: int
    asks: int
    duplicates: int
    lost: int
    seconds: float
    pending: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a line of JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Of `to_dict`."""
        return cls(**{**data, "race": Race(**data["race"])})


class Taking:
    """Accuracies that take their time."""

    def __init__(self, accuracies: Tabular, seconds: float) -> None:
        self.accuracies, self.seconds = accuracies, seconds

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]], seed: int) -> Estimate:
        """The table's accuracy, later."""
        time.sleep(self.seconds * (0.2 + 1.6 * (int(architecture.id, 16) % 997) / 996))
        return self.accuracies.evaluate(architecture, history, seed)


@contextmanager
def crew(workers: int, files: tuple[Path, Path]) -> Iterator[ProcessPoolExecutor]:
    """Processes that have loaded everything, all of them before the block begins."""
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare, (context.Barrier(workers), *files)) as pool:
        for one in [pool.submit(int) for _ in range(workers)]:
            one.result()
        yield pool


def _prepare(barrier: Any, accuracies: Path, latencies: Path) -> None:
    load_problem(accuracies, latencies)
    barrier.wait(START_S)


def run(race: Race, url: str, pool: ProcessPoolExecutor, files: tuple[Path, Path]) -> Result:
    """Race in a new study of the database at `url`, which is deleted afterwards."""
    name = f"many-workers-{uuid4().hex[:12]}"
    began = time.perf_counter()
    told = [one.result() for one in [pool.submit(_work, race, url, name, files) for _ in range(race.workers)]]
    seconds = time.perf_counter() - began
    study = load_study(url, name=name)
    try:
        acknowledged = {pair for pairs in told for pair in pairs}
        return _result(race, study.get_trials(deepcopy=False), acknowledged, seconds, load_problem(*files))
    finally:
        study._storage.delete_study(study._study_id)
        storage_of(study).engine.dispose()


def _work(race: Race, url: str, name: str, files: tuple[Path, Path]) -> list[tuple[int, str]]:
    """Number and network of the evaluations that were acknowledged to this worker."""
    problem, told = load_problem(*files), list[tuple[int, str]]()
    objective = Objective(target_ms=1.0)
    context = Context(problem.space, problem.model.predict, objective)
    identity = {"space": SPACE, "accuracies": problem.accuracies.fingerprint}
    study = open_study(url, identity, objective, load_sampler(race.sampler, race.seed, context), name=name)

    def hear(event: SearchEvent) -> None:
        if event.kind == EVALUATED and event.number is not None and event.id is not None:
            told.append((event.number, event.id))

    estimator = Taking(problem.accuracies, race.seconds)
    run_search(study, problem.space, problem.model.predict, estimator, SearchOptions(race.evals, objective, race.seed),
               hear)
    storage_of(study).engine.dispose()
    return told


def _result(race: Race, trials: Sequence[FrozenTrial], acknowledged: set[tuple[int, str]], seconds: float,
            problem: Problem) -> Result:
    done = sorted((trial for trial in trials if trial.state == TrialState.COMPLETE), key=_ended)
    held = {(trial.number, str(trial.user_attrs["architecture_id"])) for trial in done}
    values = [trial.values for trial in done[: race.evals]]
    counts = count(trials)
    twice = sum(outcome(trial) == DUPLICATE for trial in trials) + len(done) - counts.evaluated
    return Result(race, problem.share(values[: race.evals // 2]), problem.share(values), counts.evaluated, counts.asks,
                  twice, len(acknowledged - held), seconds, _pending(trials))


def _ended(trial: FrozenTrial) -> Any:
    return trial.datetime_complete


def _pending(trials: Sequence[optuna.trial.FrozenTrial]) -> float:
    """Mean number of other trials that ran when a trial began."""
    spans = [(trial.datetime_start, trial.datetime_complete) for trial in trials
             if trial.datetime_start and trial.datetime_complete]
    return float(np.mean([sum(start < begin < end for start, end in spans) for begin, _ in spans]))
