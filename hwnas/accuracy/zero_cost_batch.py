"""Scorer: zero-cost scores of architectures, on one fixed batch of a data set."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hwnas.accuracy.dataset import Dataset, digest, resize
from hwnas.accuracy.memory import release_memory
from hwnas.accuracy.splits import subset
from hwnas.accuracy.training import no_memory, seeded
from hwnas.architecture import Architecture
from hwnas.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_NEXT_SEED = 1_000_003
_CONTROLS = {"params": lambda one: math.log(one.params), "macs": lambda one: math.log(max(one.macs, 1))}


class Scorer:
    """Scores architectures of a data set's channels and classes on `images` of its training images (not augmented),
    averaged over `seeds` initial weights. ConfigError when there are fewer images."""

    def __init__(self, dataset: Dataset, images: int, seeds: int = 1, seed: int = 0, threads: int = 1) -> None:
        if images > len(dataset.train):
            raise ConfigError(f"zero_cost.images={images}, but {dataset.name} has {len(dataset.train)} training "
                              f"images. Set zero_cost.images={len(dataset.train)} or less.")
        self._dataset, self._seeds, self._threads = dataset, seeds, threads
        rows = subset(dataset.train.labels, images, seed)
        # Data sets may lie in the order of their classes, and ZiCo compares parts of the batch.
        self._part = dataset.train.take(np.random.default_rng(seed).permutation(rows)[:images])
        self._sized: dict[int, tuple[Tensor, Tensor]] = {}
        self.fingerprint = digest(dataset.fingerprint, images, seeds, seed)

    def scores(self, architecture: Architecture, names: Sequence[str], seed: int = 0
               ) -> tuple[dict[str, float], dict[str, float]]:
        """Scores, and the seconds that each took, by name (of SCORES and CONTROLS); TrainingError where there is none.

        Parameters and MACs are logarithms, as SynFlow and the gradient norm are. `seed` decides the initial weights.
        """
        self._check(architecture)
        values = {name: _CONTROLS[name](architecture) for name in names if name in _CONTROLS}
        seconds = dict.fromkeys(values, 0.0)
        for name in names:
            if name not in _CONTROLS:
                start = time.perf_counter()
                values[name] = self._score(architecture, name, seed)
                seconds[name] = time.perf_counter() - start
        return values, seconds

    def _score(self, architecture: Architecture, name: str, seed: int) -> float:
        from hwnas.accuracy.zero_cost_scores import SCORE_FUNCTIONS
        from hwnas.network import build

        images, labels = self._at(architecture.image_size)
        found = []
        for index in range(self._seeds):
            with (seeded(seed + _NEXT_SEED * index, self._threads),
                  no_memory(f"scoring {len(images)} images ({name})", "Set fewer images, or a smaller image_size.")):
                found.append(SCORE_FUNCTIONS[name](build(architecture), images, labels))
        release_memory()
        return float(np.mean(found))

    def _at(self, image_size: int) -> tuple[Tensor, Tensor]:
        import torch

        if image_size not in self._sized:
            images = self._dataset.normalise(resize(self._part.images, image_size))
            self._sized[image_size] = torch.from_numpy(images), torch.from_numpy(self._part.labels)
        return self._sized[image_size]

    def _check(self, architecture: Architecture) -> None:
        mine = (self._dataset.channels, len(self._dataset.class_names))
        if (architecture.channels, architecture.classes) != mine:
            raise ValueError(f"architecture of {architecture.channels} channels, {architecture.classes} classes, data "
                             f"of {mine[0]} channels, {mine[1]} classes")
