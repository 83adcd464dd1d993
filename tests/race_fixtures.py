"""Searches by several processes, some of them killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from optuna.trial import TrialState
from study_fixtures import IDENTITY, OBJECTIVE, Predictions, Scores, load_sampler, searched, url

from experiments.common import hypervolume_2d
from hwnas.accuracy.estimator import Estimate
from hwnas.samplers.informed import Context
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import Objective
from hwnas.study.record import DUPLICATE, EVALUATED, outcome, trial_rows
from hwnas.study.study import open_study

WORKER = Path(__file__).with_name("study_worker.py")
SPACE = SearchSpace.load("mnasnet_small", channels=1, classes=10)


def predict(codes: np.ndarray) -> Predictions:
    """Made-up latencies: a sum over segments, each with a time of its own."""
    segments = SPACE.segments(np.asarray(codes, np.int64))
    mean = (0.02 + 0.05 * (segments * 2654435761 % 1009) / 1009).sum(axis=1)
    return Predictions(mean, mean * 0.95, mean * 1.05)


class Larger(Scores):
    """Top-1 by size, with a part of its own."""

    def evaluate(self, architecture, seed) -> Estimate:
        found = super().evaluate(architecture, seed)
        top1 = 0.9 - 2 / np.log2(architecture.macs) + 0.02 * found.value
        return Estimate(top1, top1, top1, 0.002, "proxy", 0.1)


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


def share(study: Any, n: int | None = None) -> float:
    """Hypervolume of the first `n` evaluations that ended."""
    done = sorted((trial for trial in study.trials if trial.state == TrialState.COMPLETE),
                  key=lambda trial: trial.datetime_complete)
    values = np.array([trial.values for trial in done[:n]])
    return hypervolume_2d(values[:, 0], np.log2(values[:, 1]), (0.7, 0.0))


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
    """Nothing is lost; how many asks were for duplicates. An estimate takes no time here, so on a busy machine two
    workers may end the same network at one moment: then the second one's row says that it is a duplicate."""
    done = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    held = [(trial.number, trial.user_attrs["architecture_id"]) for trial in done]
    assert sorted(told) == sorted(held)
    evaluated = [row["id"] for row in trial_rows(study) if row["outcome"] == EVALUATED]
    assert n <= len({name for _, name in held}) == len(evaluated) < n + workers  # those at work at the end
    assert len(held) < n + workers
    assert not [trial for trial in study.trials if not trial.state.is_finished()]
    assert [trial.number for trial in study.trials] == list(range(len(study.trials)))
    return sum(outcome(trial) == DUPLICATE for trial in study.trials)


class Worker:
    """A worker process whose lines are read as they come."""

    def __init__(self, folder: Path, n_trials: int, seconds: float, *options: object) -> None:
        command = [sys.executable, str(WORKER), str(folder), str(n_trials), str(seconds), *map(str, options)]
        path = os.pathsep.join([str(WORKER.parent), str(WORKER.parent.parent)])
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
        self.lines: list[str] = []

    def until(self, word: str, times: int = 1) -> None:
        """Read on until a line that begins with `word` has come `times` times."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            times -= line.startswith(word)
            if not times:
                return
        raise AssertionError(f"worker ended before {word!r}: {self.lines}, {self.end()[1]}")

    def end(self) -> tuple[int, str]:
        """Exit status and stderr."""
        out, error = self.process.communicate(timeout=300)
        self.lines += out.splitlines()
        return self.process.returncode, error

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=300)

    def close(self) -> None:
        """Leave neither a process nor an open pipe, also where it ended by itself."""
        with self.process:
            self.process.kill()
