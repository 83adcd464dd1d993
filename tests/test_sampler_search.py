"""The known-objective sampler in a search: repeatable over restarts, within the cap, with workers, reusing runs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState
from study_fixtures import IDENTITY, OBJECTIVE, Predictions, Scores, searched, url

from hwnas.errors import StudyError
from hwnas.estimate import Estimate
from hwnas.objective import Objective
from hwnas.pareto import hypervolume_2d
from hwnas.reuse import reuse_trials
from hwnas.samplers import load_sampler
from hwnas.samplers.informed import Context
from hwnas.search_trial import SearchOptions
from hwnas.space import SearchSpace
from hwnas.study import load_study, open_study
from hwnas.trial_record import DUPLICATE, REUSED, outcome

SPACE = SearchSpace.load("mnasnet_small", channels=1, classes=10)


def predict(codes: np.ndarray) -> Predictions:
    """Made-up latencies: a sum over segments, each with a time of its own."""
    segments = SPACE.segments(np.asarray(codes, np.int64))
    mean = (0.02 + 0.05 * (segments * 2654435761 % 1009) / 1009).sum(axis=1)
    return Predictions(mean, mean * 0.95, mean * 1.05, mean * 0.03)


class Larger(Scores):
    """Top-1 by size, with a part of its own."""

    def evaluate(self, architecture, history, seed) -> Estimate:
        found = super().evaluate(architecture, history, seed)
        top1 = 0.9 - 2 / np.log2(architecture.macs) + 0.02 * found.value
        return Estimate(top1, top1, top1, 0.002, "proxy", 0.1, (top1 / 2, top1))


def opened(folder: Path, sampler: str = "hwnas", seed: int = 0, objective: Objective = OBJECTIVE,
           cap_ms: float | None = None, identity: dict[str, str] | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    context = Context(SPACE, predict, objective, cap_ms)
    return open_study(url(folder), identity or IDENTITY, objective, load_sampler(sampler, seed, context))


def search(study: Any, n: int, **options: Any) -> Any:
    return searched(study, n, SPACE, Larger(), predictor=predict, **options)


def asked(study: Any) -> list[Any]:
    return [trial.params for trial in study.trials if trial.state == TrialState.COMPLETE]


def share(study: Any) -> float:
    values = np.array([trial.values for trial in study.trials if trial.state == TrialState.COMPLETE])
    return hypervolume_2d(values[:, 0], np.log2(values[:, 1]), (0.7, 0.0))


def test_same_seed_same_networks_over_restarts_and_better_than_random_ones(tmp_path: Path) -> None:
    search(opened(tmp_path / "whole"), 24)
    for n in (9, 15, 24):
        search(opened(tmp_path / "parts"), n)
    assert asked(opened(tmp_path / "whole")) == asked(opened(tmp_path / "parts"))
    search(opened(tmp_path / "random", "random"), 24)
    assert share(opened(tmp_path / "whole")) > share(opened(tmp_path / "random"))


@pytest.mark.parametrize("kind", ["pareto", "reward", "cap"])
def test_no_ask_is_over_the_cap_and_none_is_asked_twice(tmp_path: Path, kind: str) -> None:
    objective, cap_ms = Objective(0.4, kind), 0.42
    ended = search(opened(tmp_path / kind, objective=objective, cap_ms=cap_ms), 20, cap_ms=cap_ms, objective=objective)
    assert (ended.n_complete, ended.n_pruned, ended.n_duplicates) == (20, 0, 0)


def test_an_earlier_run_for_another_target_is_reused_once(tmp_path: Path) -> None:
    search(opened(tmp_path / "a"), 16)
    study = opened(tmp_path / "b", identity={**IDENTITY, "target": "ort_int8", "host": "other"})
    options = SearchOptions(10, OBJECTIVE, cap_ms=0.6)
    added = reuse_trials(study, tmp_path / "a", SPACE, predict, options)
    assert 0 < added <= 16
    assert reuse_trials(study, tmp_path / "a", SPACE, predict, options) == 0
    ended = search(study, 10, cap_ms=0.6)
    assert ended.n_complete == 10  # evaluated here, besides those reused
    held = load_study(url(tmp_path / "b")).trials
    assert sum(REUSED in trial.user_attrs for trial in held) == added
    names = [trial.user_attrs["architecture_id"] for trial in held if trial.state == TrialState.COMPLETE]
    assert len(set(names)) == len(names) == 10 + added
    foreign = opened(tmp_path / "c", identity={**IDENTITY, "space": "fused 00"})
    with pytest.raises(StudyError, match=r"its space is tiny 1a2b, here it is fused 00"):
        reuse_trials(foreign, tmp_path / "a", SPACE, predict, options)


WORKER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_sampler_search import opened, search
search(opened(Path(sys.argv[1]), seed=int(sys.argv[2])), 40)
"""


def test_four_workers_lose_nothing_and_ask_for_no_duplicate(tmp_path: Path) -> None:
    opened(tmp_path / "s")
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(Path(__file__).parent)))
    crew = [subprocess.Popen([sys.executable, script, tmp_path / "s", "0"]) for _ in range(4)]
    assert [one.wait(timeout=400) for one in crew] == [0, 0, 0, 0]
    study = load_study(url(tmp_path / "s"))
    names = [trial.user_attrs["architecture_id"] for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert 40 <= len(set(names)) == len(names) <= 43  # those that were at work when the last one was done
    assert sum(outcome(trial) == DUPLICATE for trial in study.trials) <= math.ceil(0.02 * 40)
    search(opened(tmp_path / "alone"), 40)
    assert share(study) > 0.93 * share(opened(tmp_path / "alone"))
