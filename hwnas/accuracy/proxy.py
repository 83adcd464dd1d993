"""Accuracy by short training: the `proxy` estimator."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.estimator import Estimate
from hwnas.cli.options import Config, option
from hwnas.data.dataset import Dataset, Split, Subsets, subset, top1
from hwnas.lazy import nn
from hwnas.networks.build import build
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import Architecture
from hwnas.stats import binomial_std
from hwnas.system.libraries import release_memory
from hwnas.training.loop import predict, seeded, train
from hwnas.training.recipe import PROXY, Recipe, all_with_recipe, content, read_with_recipe

CHECK_IMAGES = 512


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Images, seeds and the stopping rule of a proxy training. The Recipe holds the rest.

    `train_images` and `validation_images` are the sizes of fixed stratified subsets (0: all). `image_size` 0 means
    the architecture's own. The result is the mean over `seeds` trainings.
    The stopping rule looks at the gain over chance after each epoch that `min_history` earlier runs reached. A run
    stops when its gain is below `stop_ratio` (0: never) of their median gain, by more than two standard deviations.
    An epoch decides nothing while that median is below half of its final gain, and the last epoch decides nothing.
    With the preset recipe, a data set of at least `train_images` is passed once, so nothing is stopped.
    """

    train_images: int = option(5120, low=0, high=10**9, help="training images, a stratified subset (0: all)")
    validation_images: int = option(2048, low=0, high=10**9, help="validation images (0: all)")
    image_size: int = option(0, low=0, high=1024, help="px (0: the architecture's own)")
    seeds: int = option(1, low=1, high=100, help="trainings that are averaged")
    stop_ratio: float = option(0.5, low=0, high=1, as_given=True, help="stop below this share of the median's gain")
    min_history: int = option(8, low=1, high=10**6, help="earlier runs before one is stopped")


# Fingerprints in use depend on this order.
_NAMED = ("train_images", "validation_images", "image_size", "seeds", "stop_ratio", "min_history")


@dataclass(eq=False)
class Proxy:
    """An AccuracyEstimator: trains an architecture for a few epochs and returns its validation top-1.

    Validation images and training subset are the same for every architecture. Same architecture, history and seed:
    same value on one machine.
    """

    dataset: Dataset
    recipe: Recipe = PROXY
    options: ProxyOptions = ProxyOptions()

    def __post_init__(self) -> None:
        self._subsets = Subsets(self.dataset, self.options.train_images, self.options.validation_images)

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the values, except the architecture."""
        options = f"ProxyOptions({content(self.options, _NAMED, separator=', ')})"
        text = "|".join((self.dataset.fingerprint, self.recipe.fingerprint, options))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def steps(self) -> int:
        """Optimiser steps of an evaluation, all seeds together."""
        return self.options.seeds * self.recipe.steps_for(len(self._subsets.train))

    @property
    def validating_steps(self) -> float:
        """The time of the last check, in steps of training: a forward pass is about a third of a step."""
        images = len(self._subsets.validation) / self.recipe.batch_for(len(self._subsets.train))
        return self.options.seeds * images / 3

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]] = (), seed: int = 0) -> Estimate:
        """Validation top-1 after a short training, its 90 % interval and curve; TrainingError when it diverges.

        `std` combines the validation set's binomial error with the spread over seeds, if there are several.
        """
        self._subsets.check(architecture)
        start = time.perf_counter()
        sets = self._subsets.at(self.options.image_size or architecture.image_size)
        curves: list[list[float]] = []
        stopped = False
        for index in range(self.options.seeds):
            curve, stopped = self._run(architecture, sets, history, seed + 1_000_003 * index)
            curves.append(curve)
            if stopped:
                break
        mean_curve = np.mean([curve for curve in curves if len(curve) == len(curves[-1])], axis=0)
        return self._estimate(curves, mean_curve, stopped, time.perf_counter() - start)

    def _run(self, architecture: Architecture, sets: tuple[Split, Split], history: Sequence[Sequence[float]],
             seed: int) -> tuple[list[float], bool]:
        """One training: its curve, and whether it was stopped. Checks before the last epoch use fewer images."""
        images, validation = sets
        epochs = self.recipe.epochs_for(len(images))
        checked = validation.take(subset(validation.labels, CHECK_IMAGES, 0))
        curve: list[float] = []
        hopeless = False

        def after(epoch: int, network: nn.Module) -> bool:
            nonlocal hopeless
            part = validation if epoch == epochs else checked
            curve.append(top1(predict(network, part.images, self.dataset), part.labels))
            hopeless = epoch < epochs and self.hopeless(curve, history, len(part))
            return hopeless

        with seeded(seed, self.recipe.threads):
            train(build(architecture), images, recipe=self.recipe, dataset=self.dataset, seed=seed, on_epoch=after)
        release_memory()
        return curve, hopeless

    def hopeless(self, curve: Sequence[float], history: Sequence[Sequence[float]], n_images: int) -> bool:
        """Return whether a run that reached `curve`, checked on `n_images`, is far below the median of earlier runs."""
        reached = [earlier[len(curve) - 1] for earlier in history if len(earlier) >= len(curve)]
        if not self.options.stop_ratio or len(reached) < self.options.min_history:
            return False
        chance = 1 / len(self.dataset.class_names)
        gain = statistics.median(reached) - chance
        longest = max(map(len, history))
        final = statistics.median(earlier[-1] for earlier in history if len(earlier) == longest) - chance
        if gain < final / 2:  # so early that good networks too are near chance
            return False
        return curve[-1] + 2 * binomial_std(curve[-1], n_images) < chance + self.options.stop_ratio * gain

    def _estimate(self, curves: list[list[float]], curve: NDArray[np.float64], stopped: bool, seconds: float
                  ) -> Estimate:
        value = float(curve[-1])
        n_images = len(self._subsets.validation)
        n_images = min(CHECK_IMAGES, n_images) if stopped else n_images
        ends = [run[-1] for run in curves if len(run) == len(curve)]
        spread = statistics.variance(ends) / len(ends) if len(ends) > 1 else 0.0
        std = (binomial_std(value, n_images) ** 2 + spread) ** 0.5
        return Estimate.of_top1(value, std, "proxy", seconds=seconds, curve=tuple(float(x) for x in curve),
                                stopped=stopped)


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, for `--show-config`."""
    return all_with_recipe(ProxyOptions, given, PROXY, "proxy")


def load(config: Config, dataset: Dataset, space: object = None) -> Proxy:
    """The door of `hwnas.accuracy.load_estimator`. `config`: fields of ProxyOptions and of Recipe (preset `proxy`).
    UnknownName, ConfigError."""
    import_timm()  # no network's seconds hold its import
    options, recipe = read_with_recipe(ProxyOptions, config, PROXY, "proxy")
    return Proxy(dataset, recipe, options)
