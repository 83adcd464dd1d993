"""The `proxy` estimator: accuracy by short training."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hwnas.accuracy.estimator import Estimate
from hwnas.cli.options import Config, names_of, option, read_options
from hwnas.data.dataset import CLASSIFICATION, Dataset, Subsets
from hwnas.networks.network import build
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import Architecture
from hwnas.stats import binomial_std
from hwnas.system.libraries import release_memory
from hwnas.training.loop import grade, plain, seeded, short_training
from hwnas.training.recipe import PROXY, Recipe, all_recipe


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """The images of a proxy training. The Recipe holds the other options.

    `train_images` and `validation_images` are the sizes of fixed stratified subsets (0: all). `image_size` 0 means the
    architecture's own.
    """

    train_images: int = option(5120, low=0, high=10**9, help="training images, a stratified subset (0: all)")
    validation_images: int = option(2048, low=0, high=10**9, help="validation images (0: all)")
    image_size: int = option(0, low=0, high=1024, help="px (0: the architecture's own)")


@dataclass(eq=False)
class Proxy:
    """An AccuracyEstimator that trains an architecture for a few steps and returns its validation top-1.

    Validation images and training subset are the same for every architecture. The same architecture and seed give the
    same value on one machine.
    """

    dataset: Dataset
    recipe: Recipe = PROXY
    options: ProxyOptions = ProxyOptions()

    def __post_init__(self) -> None:
        self._subsets = Subsets(self.dataset, self.options.train_images, self.options.validation_images)

    @property
    def fingerprint(self) -> str:
        """A digest of all that decides the values, except the architecture."""
        task = [] if self.dataset.task == CLASSIFICATION else [self.dataset.task]
        text = "|".join((self.dataset.fingerprint, self.recipe.fingerprint, str(self.options), *task))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def steps(self) -> int:
        """The optimiser steps of an evaluation."""
        return self.recipe.steps_for(len(self._subsets.train))

    @property
    def validating_steps(self) -> float:
        """The time of the last check, in steps of training: a forward pass is about a third of a step."""
        images = len(self._subsets.validation) / self.recipe.batch_for(len(self._subsets.train))
        return images / 3

    def evaluate(self, architecture: Architecture, seed: int = 0) -> Estimate:
        """Return validation top-1 after a short training, with its 90 % interval; TrainingError if it diverges."""
        start = time.perf_counter()
        images, validation = self._subsets.at(self.options.image_size or architecture.image_size)
        with seeded(seed, self.recipe.threads):
            training = short_training(build(architecture), images, self.recipe, self.dataset, seed)
            training.run()
            with training.in_memory():
                value = grade(training.current, validation, self.dataset).score
        weights = {name: plain(tensor) for name, tensor in training.current.state_dict().items()}
        del training
        release_memory()  # before the next one needs it
        return Estimate.of_top1(value, binomial_std(value, len(validation)), "proxy",
                                seconds=time.perf_counter() - start, weights=weights, steps=self.steps)


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option with its value, for `--show-config`."""
    options, recipe = _read_options(given)
    return {**all_recipe(recipe), **asdict(options)}


def load(config: Config, dataset: Dataset) -> Proxy:
    """Return the estimator with `config`: fields of ProxyOptions and Recipe (preset `proxy`). Raises
    UnknownName, ConfigError."""
    import_timm()  # now, so that no network's seconds contain its import
    options, recipe = _read_options(config)
    if dataset.train.boxes is not None:
        recipe.check_boxes()
    return Proxy(dataset, recipe, options)


def _read_options(section: Mapping[str, Any]) -> tuple[ProxyOptions, Recipe]:
    own = names_of(ProxyOptions)
    options = read_options(ProxyOptions, section, "proxy", others=names_of(Recipe))
    return options, Recipe.from_config({key: each for key, each in section.items() if key not in own}, PROXY, "proxy")
