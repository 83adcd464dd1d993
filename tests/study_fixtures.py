"""A small space, its predictions and scores without training: what the tests of the study and its workers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna

from hwnas.accuracy.estimator import Estimate
from hwnas.samplers.informed import Context
from hwnas.samplers.loading import RepeatableSampler, read_sampler
from hwnas.search.sampling import SamplingWorker, SearchEvent, SearchOutcome
from hwnas.space.architecture import Architecture
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import Objective
from hwnas.study.study import open_study
from hwnas.system.clock import Deadline

IDENTITY = {"space": "tiny 1a2b", "dataset": "digits 0f", "target": "xeon_int8", "host": "zen5-2"}
OBJECTIVE = Objective(target_ms=1.5)


class Parameter(NamedTuple):
    name: str
    choices: tuple[Any, ...]


class TinySpace:
    """Stages of one inverted residual each: kernel, expansion, SE, which means nothing at kernel 3 and expansion 1."""

    def __init__(self, stages: int = 2, kernels: tuple[int, ...] = (3, 5, 7)) -> None:
        self.parameters = tuple(
            Parameter(f"stage{stage}.{name}", choices) for stage in range(stages)
            for name, choices in (("kernel", kernels), ("expansion", (1, 3, 6)), ("se", (0.0, 0.25))))
        self.size = (6 * len(kernels))**stages
        self.n_architectures = (6 * len(kernels) - 1)**stages

    def to_codes(self, params: Mapping[str, Any]) -> np.ndarray:
        return np.array([p.choices.index(params[p.name]) for p in self.parameters], dtype=np.int64)

    def to_params(self, codes: np.ndarray) -> dict[str, Any]:
        return {p.name: p.choices[int(code)] for p, code in zip(self.parameters, codes, strict=True)}

    def sample(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.integers(0, [len(p.choices) for p in self.parameters], size=(n, len(self.parameters)))

    def decode(self, params: Mapping[str, Any]) -> Architecture:
        stages = []
        for kernel, expansion, se in np.array([params[p.name] for p in self.parameters], dtype=float).reshape(-1, 3):
            active = "" if kernel == 3 and expansion == 1 else f"_se{se:g}" if se else ""
            stages.append((f"ir_r1_k{kernel:g}_s1_e{expansion:g}_c{8 if kernel == 3 else 16}{active}",))
        return Architecture(tuple(stages), 8, 2, 0, "relu", 16, 1, 10)

    def every(self) -> list[dict[str, Any]]:
        return [self.to_params(np.array(row)) for row in product(*(range(len(p.choices)) for p in self.parameters))]


@dataclass
class Predictions:
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    deployment: None = None

    def of(self, at: int) -> Predictions:
        return Predictions(*(part[at:at + 1] for part in (self.mean, self.low, self.high)))


def predict(codes: np.ndarray) -> Predictions:
    """1 ms and a tenth for each step up a choice, 10 % either way."""
    mean = 1 + np.asarray(codes).sum(axis=1) * 0.1
    return Predictions(mean, mean * 0.9, mean * 1.1)


class Scores:
    """Top-1 from the architecture's name alone; counts its calls, may take its time or fail."""

    def __init__(self, seconds: float = 0.0, fail: Callable[[Architecture], None] | None = None) -> None:
        self.seconds, self.fail = seconds, fail
        self.calls: list[str] = []

    def evaluate(self, architecture: Architecture, seed: int) -> Estimate:
        self.calls.append(architecture.id)
        if self.fail is not None:
            self.fail(architecture)
        time.sleep(self.seconds)
        top1 = 0.3 + 0.6 * int(architecture.id, 16) / 16**8
        return Estimate(top1, top1 - 0.02, top1 + 0.02, 0.01, "proxy", 0.5)


def load_sampler(name: str, seed: int, context: Context | None = None, **options: Any) -> RepeatableSampler:
    """The sampler of a name, with its options."""
    return read_sampler(name, seed, options)(context)


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


def opened(folder: Path, sampler: str = "random", seed: int = 0, **kwargs: Any) -> optuna.Study:
    options = kwargs.pop("sampler_options", {})
    return open_study(url(folder), kwargs.pop("identity", IDENTITY), kwargs.pop("objective", OBJECTIVE),
                      load_sampler(sampler, seed, **options), **kwargs)


def searched(study: optuna.Study, n_trials: int, space: Any = None, estimator: Any = None,
             progress: Callable[[SearchEvent], None] = lambda event: None, predictor: Any = predict,
             until: Deadline | None = None, first: Sequence[Mapping[str, Any]] = (), **options: Any) -> SearchOutcome:
    options = {"objective": OBJECTIVE, **options}
    return SamplingWorker(study, space or TinySpace(), predictor, estimator or Scores(),
                          SearchOptions(n_trials, **options), until, progress).search(first)
