"""A tiny data set and the settings to make networks deployable with, shared by tests of the verification."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwnas.data.dataset import Dataset, Split
from hwnas.front.finalists import Finalist
from hwnas.front.make import Making
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.space.architecture import Architecture
from hwnas.target.target import Target
from hwnas.training.recipe import FINALIST, Recipe


def tiny_split(n: int, seed: int) -> Split:
    """Images of 16 px whose left half is bright in class 0, the right half in class 1."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    images = rng.integers(0, 60, (n, 1, 16, 16))
    for image, label in zip(images, labels, strict=True):
        image[:, :, 8 * label : 8 * label + 8] += 150
    return Split(images.astype(np.uint8), labels.astype(np.int64))


def tiny_dataset() -> Dataset:
    """Two classes, 96 / 16 / 40 images."""
    return Dataset("sides", tiny_split(96, 0), tiny_split(16, 1), tiny_split(40, 2), ("left", "right"), 1, 16, (0.4,),
                   (0.3,), "sides-1")


def tiny_architecture(width: int = 8, size: int = 16) -> Architecture:
    return Architecture(((f"ds_r1_k3_s2_c{width}",),), 8, 2, 0, "relu", size, 1, 2)


def tiny_finalist(width: int = 8, **changes: Any) -> Finalist:
    values = {"top1_proxy": 0.8, "latency_ms": 0.1, "latency_ms_low": 0.05, "latency_ms_high": 0.4, "reward": 0.7}
    return Finalist(tiny_architecture(width), **{**values, **changes})


def tiny_recipe(**changes: Any) -> Recipe:
    values = {"epochs": 3, "min_steps": 24, "shift": 0.0, "zoom": 0.0, "rotate": 0.0, "threads": 1, **changes}
    return Recipe.from_config(values, FINALIST)


def tiny_making(target: Target | None = None, **changes: Any) -> Making:
    target = target or Target("ort_int8", "onnxruntime", "int8")
    return Making(**{"dataset": tiny_dataset(), "recipe": tiny_recipe(), "seed": 0, "target": target,
                     "n_calibration": 64, "threads": 1, **changes})


def measured(ms: float, quiet_ms: float = 0.1, reference_ms: float = 0.1) -> Measurement:
    """Eight turns of about `ms`; INVALID when the reference stands far above its quiet time."""
    turns = tuple(Turn((ms * (1 + i / 1000),) * 10, reference_ms) for i in range(8))
    return Measurement(turns, quiet_ms, Protocol())
