"""Recipe: how a network is trained, as data. Proxies, finalists and baselines differ in its fields only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hwnas.errors import ConfigError, UnknownName

_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "sgd", "nadamw", "lamb", "lion"),
    "schedule": ("onecycle", "cosine"),
}
_RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1, 10_000), "min_steps": (0, 10**7), "max_steps": (0, 10**9), "batch_size": (2, 8192),
    "lr": (1e-6, 10), "weight_decay": (0, 1), "warmup": (0, 0.9), "label_smoothing": (0, 0.9),
    "ema_decay": (0, 0.99999), "clip_norm": (0, 1000), "shift": (0, 0.5), "zoom": (0, 0.5), "rotate": (0, 180),
    "erase": (0, 1), "threads": (0, 4096),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides a training besides network, data and seed.

    `epochs` are raised until `min_steps` optimiser steps are done and cut at `max_steps` (0: no limit), so that small
    data sets are learnt and large ones end in time. `warmup` is a fraction of all steps. `ema_decay` 0: no moving
    average. `shift` (of the side), `zoom` (scale 1 ± zoom) and `rotate` (degrees) bound the random affine map; `erase`
    is the probability of a random rectangle; mirroring is the data set's (`flip`). `clip_norm` 0: gradients are not
    clipped. `threads` 0: every core the process may use.
    """

    name: str
    epochs: int
    min_steps: int = 0
    max_steps: int = 0
    batch_size: int = 64
    optimizer: str = "adamw"
    lr: float = 2e-2
    weight_decay: float = 0.05
    schedule: str = "onecycle"
    warmup: float = 0.2
    label_smoothing: float = 0.1
    ema_decay: float = 0.0
    clip_norm: float = 1.0
    shift: float = 0.1
    zoom: float = 0.0
    rotate: float = 0.0
    erase: float = 0.0
    channels_last: bool = True
    threads: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], preset: Recipe, where: str = "recipe") -> Recipe:
        """`preset` with the fields in `config` put in its place, checked; ConfigError names key, rule and value.

        Who gives `epochs` gets just these: the preset's `min_steps` and `max_steps` no longer count.
        """
        known = {f.name: type(getattr(preset, f.name)) for f in fields(cls)}
        values: dict[str, Any] = {"min_steps": 0, "max_steps": 0} if "epochs" in config else {}
        for key, value in config.items():
            if key not in known:
                raise UnknownName(f"key of {where}", key, known)
            values[key] = _checked(f"{where}.{key}", key, known[key], value)
        return replace(preset, **values)

    @property
    def fingerprint(self) -> str:
        """Names the recipe's content; `threads` is left out: it changes rounding, not what is asked."""
        content = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in ("name", "threads")]
        return hashlib.sha256(";".join(content).encode()).hexdigest()[:12]

    def batch_for(self, n_images: int) -> int:
        """Images per step: `batch_size`, less for small sets, so that an epoch has eight steps at least."""
        return max(2, min(self.batch_size, n_images // 8))

    def steps_for(self, n_images: int) -> int:
        """Optimiser steps on a set of `n_images`; an incomplete last batch is left out of an epoch."""
        steps = max(self.epochs * max(1, n_images // self.batch_for(n_images)), self.min_steps)
        return min(steps, self.max_steps) if self.max_steps else steps

    def epochs_for(self, n_images: int) -> int:
        """Epochs begun in `steps_for(n_images)` steps; the last may be a part of one."""
        return math.ceil(self.steps_for(n_images) / max(1, n_images // self.batch_for(n_images)))


def recipe_options(given: Mapping[str, Any], preset: Recipe, where: str) -> dict[str, Any]:
    """Every field of `preset` but its name, with `given` in their places, for `--show-config`."""
    recipe = Recipe.from_config(given, preset, where)
    return {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "name"}


def _checked(where: str, key: str, kind: type, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise UnknownName(where, value, _CHOICES[key])
        return value
    if kind is bool or kind is str:
        if not isinstance(value, kind):
            raise ConfigError(f"{where} must be {'true or false' if kind is bool else 'a text'}, got {value!r}.")
        return value
    low, high = _RANGES[key]
    number = isinstance(value, int) or (kind is float and isinstance(value, float))
    if isinstance(value, bool) or not number or not low <= value <= high:
        rule = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{where} must be {rule} from {low:g} to {high:g}, got {value!r}.")
    return kind(value)


PROXY = Recipe("proxy", epochs=1, min_steps=80, max_steps=80, lr=5e-3, schedule="cosine", warmup=0.1, shift=0.06)
FINALIST = Recipe("finalist", epochs=10, min_steps=160, max_steps=2000, warmup=0.15, ema_decay=0.99)
PRESETS = {recipe.name: recipe for recipe in (PROXY, FINALIST)}
