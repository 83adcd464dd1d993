"""The sampler with one ingredient taken out at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from experiments.sampler_contest.table import Table
from hwnas.samplers import model
from hwnas.samplers.coding import Coding, Settings
from hwnas.samplers.facts import Domain, Inputs, Learnt
from hwnas.samplers.known import KnownObjectiveSampler, Mix
from hwnas.samplers.model import Process, Warp, Weights, tuned

Patch = tuple[Any, str, Any]  # object, attribute, what it becomes


@dataclass(frozen=True)
class Variant:
    """`what` is taken out, in words; by these patches, another mix of candidates, or another class of sampler."""

    what: str
    patches: tuple[Patch, ...] = ()
    mix: Mix | None = None
    latency_known: bool = True
    noise_told: bool = True
    duplicates_known: bool = True


class Ablated(KnownObjectiveSampler):
    """Asks under patches; the latency may have to be guessed from the networks evaluated so far."""

    def __init__(self, table: Table, variant: Variant, seed: int, learnt: Learnt | None) -> None:
        self._variant, self._table = variant, table
        self._guess = _Guess(table)
        super().__init__(
            table.distributions, roles=("learnt", "known"), seed=seed, mix=variant.mix, learnt=learnt,
            known=table.known_latency if variant.latency_known else self._guess,
            features=table.known_features if table.features.shape[1] else None,
            canonical=table.canonical if variant.duplicates_known else None)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
                        ) -> dict[str, Any]:
        if not self._variant.latency_known:
            self._guess.learn(study)
            self._at = None  # the domain reads ranges off the known objectives: they have changed
        with contextlib.ExitStack() as stack:
            for thing, name, value in self._variant.patches:
                stack.enter_context(patch.object(thing, name, value))
            return super().sample_relative(study, trial, search_space)


class _Guess:
    """Latency as it can be told without a table: measured for evaluated networks, for others the mean of a Gaussian
    process on those. Kinder than a black box, as the guess counts as certain."""

    def __init__(self, table: Table) -> None:
        self._coding = Coding(table.distributions)
        self._ms: dict[bytes, float] = {}
        self._weights: tuple[int, Weights] | None = None
        self._process: Process | None = None

    def learn(self, study: optuna.Study) -> None:
        """Fit anew on what the study holds, once there is enough."""
        done = [trial for trial in study.get_trials(deepcopy=False) if trial.values]
        codes = [self._coding.encode(trial.params) for trial in done]
        self._ms = {row.tobytes(): 2 ** trial.values[1]  # a contest tells log2
                    for row, trial in zip(codes, done, strict=True) if row is not None}
        if len(self._ms) < model.LEAST:
            return
        rows = np.array([np.frombuffer(key) for key in self._ms])
        logs = np.log(list(self._ms.values()))
        size = model.tuning_size(len(rows), 10)
        if self._weights is None or self._weights[0] != size:
            self._weights = size, tuned(self._inputs(rows[:size]), _unit(logs[:size]), np.zeros(size))
        self._process = Process(self._inputs(rows), _unit(logs), np.zeros(len(rows)), self._weights[1])
        self._middle, self._width = float(logs.mean()), float(logs.std()) or 1.0

    def __call__(self, settings: Settings) -> np.ndarray:
        if self._process is None:
            return np.ones((len(settings), 1))
        guessed = self._process.predict(self._inputs(settings.codes))[0] * self._width + self._middle
        found = [self._ms.get(row.tobytes(), ms) for row, ms in zip(settings.codes, np.exp(guessed), strict=True)]
        return np.array(found)[:, None]

    def _inputs(self, codes: np.ndarray) -> Inputs:
        return Inputs(self._coding.embed(codes), self._coding.owner, self._coding.counts(codes))


def _unit(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std() or 1.0)


def _no_features(self: Domain, codes: np.ndarray, costs: np.ndarray) -> np.ndarray:
    return np.zeros((len(codes), 0))


def _no_counts(self: Coding, codes: np.ndarray) -> np.ndarray:
    return np.zeros((len(codes), 0))


def _straight(values: np.ndarray) -> Warp:
    return Warp(float(values.mean()), float(values.std()) or 1.0, 1.0, 0.0, 1.0)


def _certain(*given: Any) -> Weights:
    return replace(tuned(*given), calibration=1.0)


VARIANTS: Mapping[str, Variant] = {
    "whole": Variant("nothing"),
    "latency_guessed": Variant("known latency: guessed from the networks evaluated", latency_known=False),
    "duplicates_unknown": Variant("which settings are one network", duplicates_known=False),
    "no_features": Variant("features: latency, counts of values, the table's own",
                           ((Domain, "_described", _no_features),)),
    "no_counts": Variant("counts of values among the features", ((Coding, "counts", _no_counts),)),
    "no_warp": Variant("warp of the accuracies", ((Warp, "of", staticmethod(_straight)),)),
    "no_doubt": Variant("calibration of the model's errors", ((model, "tuned", _certain),)),
    "noise_untold": Variant("the noise of each accuracy (with noisy=… or drawn_noise=…)", noise_told=False),
    "no_evolution": Variant("evolution: as many first candidates", mix=Mix(1167, 583, 0)),
    "no_crossings": Variant("crossings of evaluated networks", mix=Mix(750, 0)),
}


def make(table: Table, name: str, seed: int, stds: np.ndarray) -> Ablated:
    """A sampler told accuracies whose noise has these standard deviations [networks] (0: none)."""
    variant = VARIANTS[name]

    def learnt(trial: FrozenTrial) -> tuple[float, float]:
        row = table.row_of(trial.params)
        std = float(stds[table.entry[row]]) if variant.noise_told and row is not None else 0.0
        return float(trial.values[0]), std

    return Ablated(table, variant, seed, learnt)


def names(chosen: Sequence[str]) -> list[str]:
    """In the order above, the whole sampler first."""
    return [name for name in VARIANTS if name in chosen or name == "whole"]

