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

from hwnas.accuracy.estimator import Estimate
from hwnas.errors import StudyError
from hwnas.samplers.informed import Context
from hwnas.samplers.loading import load_sampler
from hwnas.search.reuse import reuse_trials
from hwnas.search.trial import SearchOptions
from hwnas.space.search_space import SearchSpace
from hwnas.stats.pareto import hypervolume_2d
from hwnas.study.objective import Objective
from hwnas.study.record import DUPLICATE, EVALUATED, LOST, REUSED, known, outcome
from hwnas.study.study import load_study, open_study, release_lost, storage_of
from hwnas.system.processes import worker_name

WORKER = Path(__file__).with_name("study_worker.py")
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


def named(seed: int) -> str:
    return f"seed-{seed}"


def opened(place: Path | str, sampler: str = "hwnas", seed: int = 0, objective: Objective = OBJECTIVE,
           cap_ms: float | None = None, identity: dict[str, str] | None = None, **options: Any) -> Any:
    """The study in a folder or behind a URL."""
    if isinstance(place, Path):
        place.mkdir(exist_ok=True)
        place = url(place)
    context = Context(SPACE, predict, objective, cap_ms)
    return open_study(place, identity or IDENTITY, objective, load_sampler(sampler, seed, context), **options)


def search(study: Any, n: int, seconds: float = 0.0, **options: Any) -> Any:
    return searched(study, n, SPACE, Larger(seconds), predictor=predict, **options)


def asked(study: Any) -> list[Any]:
    return [trial.params for trial in study.trials if trial.state == TrialState.COMPLETE]


def share(study: Any, n: int | None = None) -> float:
    """Hypervolume of the first `n` evaluations that ended."""
    done = sorted((trial for trial in study.trials if trial.state == TrialState.COMPLETE),
                  key=lambda trial: trial.datetime_complete)
    values = np.array([trial.values for trial in done[:n]])
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


def race(place: Path | str, n: int, seeds: tuple[int, ...], workers: int = 4) -> dict[int, list[tuple[int, str]]]:
    """What `workers` processes were told of evaluations, by seed, once all have ended."""
    command = [sys.executable, WORKER, place, n, 0.0, 30, 120, ",".join(map(str, seeds))]
    crew = [subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True)
            for _ in range(workers)]
    outputs = [one.communicate(timeout=400)[0].splitlines() for one in crew]
    assert [one.returncode for one in crew] == [0] * workers
    told: dict[int, list[tuple[int, str]]] = {seed: [] for seed in seeds}
    for lines in outputs:
        for word, *rest in map(str.split, lines):
            if word == "seed":
                seed = int(rest[0])
            elif word == "told-evaluated":
                told[seed].append((int(rest[0]), rest[1]))
    return told


def check_race(study: Any, told: list[tuple[int, str]], n: int, workers: int = 4) -> int:
    """Nothing is lost or done twice; how many asks were for duplicates."""
    done = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    held = [(trial.number, trial.user_attrs["architecture_id"]) for trial in done]
    assert sorted(told) == sorted(held)
    assert n <= len({name for _, name in held}) == len(held) < n + workers  # those at work when the last one was done
    assert not [trial for trial in study.trials if not trial.state.is_finished()]
    assert [trial.number for trial in study.trials] == list(range(len(study.trials)))
    return sum(outcome(trial) == DUPLICATE for trial in study.trials)


def test_four_workers_lose_nothing_and_ask_for_no_duplicate(tmp_path: Path) -> None:
    told = race(tmp_path, 40, (0,))
    study = load_study(url(tmp_path), name=named(0))
    assert check_race(study, told[0], 40) <= math.ceil(0.02 * 40)
    search(opened(tmp_path / "alone"), 40)
    assert share(study, 40) > 0.93 * share(opened(tmp_path / "alone"))


def test_a_network_whose_worker_died_between_its_result_and_the_telling_is_evaluated_again(tmp_path: Path) -> None:
    study = opened(tmp_path / "s")
    storage, trial_id = storage_of(study), study._storage.create_new_trial(study._study_id)
    gone = worker_name().rsplit("/", 1)[0] + "/1"
    storage.write_attrs(trial_id, {"worker": gone, "architecture_id": "ab", "outcome": EVALUATED, "top1_proxy": 0.5})
    assert release_lost(study) == 1
    assert outcome(study.trials[0]) == LOST
    assert known(study.trials) == {}
