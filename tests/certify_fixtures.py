"""A tiny space, trainings that never ran, estimators that know: what the tests of certificates share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.accuracy.estimator import Estimate
from hwnas.certify.truth import COST, FAILED, CertifyPlan, macs_of, spread
from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.training.job import SUMMARY

SPACE = """
image_size: 8
stem: {width: 8, stride: 1}
head: 16
activation: relu
defaults: {op: [ds, ir_e2], kernel: [3, 5], se: 0, skip: true, multipliers: [0.5, 1, 2]}
stages:
  - {channels: 8, repeats: 1, stride: 1}
  - {channels: 16, repeats: 1, stride: 2}
"""


def write_space(folder: Path, text: str = SPACE) -> Path:
    """The tiny space as a file."""
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def tiny_space(folder: Path) -> SearchSpace:
    """The tiny space for digits."""
    return SearchSpace.load(write_space(folder), channels=1, classes=10)


def digits(seed: int = 0) -> Dataset:
    """Digits at 8 px."""
    return load_dataset({"name": "digits", "validation_fraction": 0.2, "test_fraction": 0.2}, 8, seed)


def plan_of(out: Path, space: SearchSpace, n: int = 8, seeds: int = 2) -> CertifyPlan:
    """A plan whose networks are spread over MACs."""
    networks = tuple(spread(space, n, 0, macs_of(space)))
    plan = CertifyPlan(out, networks, "macs", "MACs", {"name": "digits"}, {"epochs": 3}, 0, seeds, {"n": n})
    plan.write()
    return plan


def pretend_trained(plan: CertifyPlan, dataset: Dataset, top1: Callable[[int, int], float | None]) -> None:
    """Write what trainings leave: `top1(network's row, seed)`, None for one that failed."""
    for row, network in enumerate(plan.networks):
        for seed in range(plan.seeds):
            folder = plan.folder(network, seed)
            folder.mkdir(parents=True, exist_ok=True)
            value = top1(row, seed)
            if value is None:
                content = {**FAILED.header, "reason": "loss is nan in epoch 1"}
                (folder / "failed.json").write_text(json.dumps(content))
                continue
            identity = {"seed": seed, "dataset.fingerprint": dataset.fingerprint}
            (folder / "summary.json").write_text(json.dumps({
                **SUMMARY.header, "id": network.id, "top1_test": value, "n_test": 400, "seconds_training": 50.0,
                "identity": identity}))
            (folder / "cost.json").write_text(json.dumps({**COST.header, "cpu_seconds": 40.0, "epochs_timed": 3}))


class Told:
    """An estimator that is told every value; `histories` is what it was given."""

    def __init__(self, values: dict[str, Any], fingerprint: str = "told") -> None:
        self.values, self.fingerprint, self.histories = values, fingerprint, list[Sequence[Sequence[float]]]()

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]], seed: int) -> Estimate:
        self.histories.append([list(curve) for curve in history])
        value = self.values[architecture.id]
        if isinstance(value, BaseException):
            raise value
        return Estimate(value, value, value, 0.01, "proxy", 1.0, (value / 2, value))


class ToldAmong(Told):
    """One that asks for the search's state, and has work to do first."""

    setup_seconds = 0.0
    prepared = 0

    def prepare(self, console: Any) -> None:
        self.prepared += 1
        self.setup_seconds = 123.0

    def evaluate_among(self, architecture: Architecture, costs: Sequence[float], earlier: Sequence[Any],
                       seed: int) -> Estimate:
        self.histories.append([one.costs for one in earlier])
        assert np.isfinite(costs).all()
        return super().evaluate(architecture, (), seed)
