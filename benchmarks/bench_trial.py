"""Everything of a trial other than its training: asking, decoding, predicting, recording in SQLite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hwnas.accuracy.estimator import Estimate
from hwnas.latency.model import LatencyModel
from hwnas.samplers.informed import Context
from hwnas.samplers.loading import read_sampler
from hwnas.search.sampling import SamplingWorker
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import Objective
from hwnas.study.study import database_path, open_study
from synthetic import synthetic_table

LIMIT_S = 0.05


class Instant:
    """An accuracy estimator that trains nothing: larger networks are said to be better."""

    def evaluate(self, architecture: Architecture, seed: int) -> Estimate:
        value = 1 - 1 / (1 + architecture.macs / 1e6)
        return Estimate(value, value, value, 0.01, "proxy", 0.0)


def search(folder: Path, sampler: str, n_trials: int) -> Callable[[], None]:
    """A whole search from an empty folder; table and model are made before."""
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    model = LatencyModel.fit(synthetic_table(space), space)
    objective = Objective(target_ms=1.0)

    def run() -> None:
        known = read_sampler(sampler, 0, {})(Context(space, model.predict, objective))
        study = open_study(database_path(folder), {"space": space.name}, objective, known)
        ended = SamplingWorker(study, space, model.predict, Instant(), SearchOptions(n_trials, objective)).search()
        assert ended.counts.evaluated == n_trials

    return run


@pytest.mark.parametrize("sampler", ["nsga2", "tpe", "random"])
def test_trial_without_training(benchmark: Any, within: Any, tmp_path: Path, sampler: str) -> None:
    benchmark.pedantic(search(tmp_path, sampler, 100), rounds=1)
    within(benchmark, LIMIT_S, per=100)


@pytest.mark.parametrize("sampler", ["hwnas", "gp"])
def test_trial_without_training_by_a_model(benchmark: Any, tmp_path: Path, sampler: str) -> None:
    """Recorded without a limit: fitting a Gaussian process at each ask is what these samplers are."""
    benchmark.pedantic(search(tmp_path, sampler, 20), rounds=1)
    benchmark.extra_info["median_s"] = benchmark.stats.stats.median / 20
