"""One ask of the known-objective sampler in the largest space, by how many trials are finished."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from hwnas.latency.model import LatencyModel
from hwnas.samplers.informed import Context, informed
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import Objective
from synthetic import synthetic_table

LIMIT_S = {500: 0.25}


@pytest.mark.parametrize("finished", [100, 500, 1000, 2000])
def test_ask(benchmark: Any, within: Any, finished: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = SearchSpace.load("mnasnet", channels=3, classes=10)
    model = LatencyModel.fit(synthetic_table(space), space)
    sampler = informed(Context(space, model.predict, Objective(target_ms=1.0)), 0, 8)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    codes = space.sample(np.random.default_rng(0), finished)
    distributions = {one.name: CategoricalDistribution(one.choices) for one in space.parameters}
    for row, latency_ms in zip(codes, model.predict(codes).mean, strict=True):
        params = space.to_params(row)
        top1 = 1 - 1 / (1 + space.decode(params).macs / 1e8)
        attrs = {"top1_proxy": top1, "top1_std": 0.01}
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, user_attrs=attrs,
                                            values=[top1, float(latency_ms)]))

    def ask() -> None:
        trial = study.ask(distributions)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)

    for _ in itertools.repeat(None, 2):  # weights are tuned at some asks only; the mean over asks counts those
        ask()
    benchmark.pedantic(ask, rounds=8)
    if finished in LIMIT_S:
        within(benchmark, LIMIT_S[finished], per=1)
