"""Recipes: the way a network is trained, as data. All trainings run the same code and differ in the recipe's fields.

`_NAMED` lists the fields in a recipe's fingerprint, so that a new field makes no stored study or weights void.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

from hwnas.cli.options import Config, names_of, option, read_options
from hwnas.errors import ConfigError
from hwnas.networks.weights import PretrainedOptions
from hwnas.training.place import CPU, PLACES, PRECISIONS, check_precision, resolved

# The order is part of the fingerprints that are in use. A field that is not here is in a fingerprint only if it differs
# from its default. The default of a new field must therefore do what recipes did before the field existed.
_NAMED = ("epochs", "min_steps", "max_steps", "batch_size", "optimizer", "lr", "weight_decay", "schedule", "warmup",
          "label_smoothing", "ema_decay", "clip_norm", "shift", "zoom", "rotate", "erase", "channels_last")
_UNNAMED = ("name", "threads", "device")  # never in a fingerprint: the last two change rounding only
_LENGTH = ("epochs", "min_steps", "max_steps")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides a training besides network, data and seed; `conf/train.yaml` explains each field.

    A training has at least `min_steps` and at most `max_steps` (0: no limit) optimiser steps, whatever `epochs` says.
    So small data sets are learnt, and large ones end in time. After a warm-up, a share of all steps, the learning rate
    falls along a cosine. Mirroring is an option of the data set (`flip`).
    """

    schedule: ClassVar[str] = "cosine"  # a word of fingerprints

    name: str
    epochs: int = option(low=1, high=100_000, help="passes through the training images")
    min_steps: int = option(0, low=0, high=10**9, help="epochs are raised until so many steps are done")
    max_steps: int = option(0, low=0, high=10**9, help="most steps (0: no limit)")
    batch_size: int = option(64, low=2, high=65_536, help="images a step")
    # Only optimisers of timm whose whole state is in `state_dict()`: they can be resumed bit for bit.
    optimizer: str = option("adamw", help="timm's", choices=(
        "adabelief", "adam", "adamw", "lamb", "lars", "lion", "nadamw", "radam", "rmsproptf", "sgd"))
    lr: float = option(5e-3, low=1e-8, high=100, help="highest learning rate")
    layer_decay: float = option(1.0, low=0.01, high=1, help="a layer's rate, as a share of that of the next one")
    weight_decay: float = option(0.05, low=0, high=1, help="not of norms and biases")
    clip_norm: float = option(1.0, low=0, high=1000, help="0: gradients are not clipped")
    warmup: float = option(0.1, low=0, high=0.9, help="share of all steps in which the learning rate rises")
    lr_end: float = option(0.0, low=0, high=100, help="the lowest learning rate")
    ema_decay: float = option(0.0, low=0, high=0.999999, help="moving average of the weights (0: none)")
    label_smoothing: float = option(0.1, low=0, high=0.9, help="share of each label that is spread over all")
    shift: float = option(0.1, low=0, high=0.5, help="share of the side")
    zoom: float = option(0.0, low=0, high=0.5, help="scale 1 ± zoom")
    rotate: float = option(0.0, low=0, high=180, help="degrees")
    rand_augment: int = option(0, low=0, high=10, help="magnitude of RandAugment (0: off)")
    mixup: float = option(0.0, low=0, high=10, help="alpha (0: off)")
    cutmix: float = option(0.0, low=0, high=10, help="alpha (0: off); with both, half of the batches each")
    erase: float = option(0.0, low=0, high=1, help="probability of random erasing")
    precision: str = option("auto", choices=PRECISIONS, help="bf16: autocast; auto: on a CPU with bf16, otherwise fp32")
    channels_last: bool = option(True, help="memory layout of the images")
    threads: int = option(0, low=0, high=4096, help="0: every core")
    device: str = option(CPU, choices=PLACES, help="that trains: cpu, cuda, or auto (cuda where torch finds a GPU)")

    @classmethod
    def from_config(cls, config: Config, preset: Recipe, where: str = "recipe") -> Recipe:
        """Return `preset` with fields of `config` in place of its own. Raises UnknownName, ConfigError, TargetError.

        If `config` gives `epochs`, the `min_steps` and `max_steps` of the preset have no effect.
        """
        if "epochs" in config:
            config = {"min_steps": 0, "max_steps": 0, **config}
        recipe = read_options(cls, config, where, base=preset)
        prefix = f"{where}." if where else ""
        if "lr_end" in config and recipe.lr_end > recipe.lr:
            raise ConfigError(f"{prefix}lr_end must not be above {prefix}lr={recipe.lr:g}, got {recipe.lr_end:g}.")
        if recipe.mixes and recipe.batch_size % 2:
            raise ConfigError(f"{prefix}batch_size must be even with mixup or cutmix, got {recipe.batch_size}.")
        device = resolved(recipe.device, f"{prefix}device")
        if device != CPU or "precision" in config:
            check_precision(recipe.precision, device, f"{prefix}precision")
        return replace(recipe, lr_end=min(recipe.lr_end, recipe.lr), device=device)

    @property
    def fingerprint(self) -> str:
        """The hash of all fields but the name and the fields that change rounding only, 12 hexadecimal digits."""
        # A precision of "auto" depends on the machine, and "fp32" is as old recipes had it: only "bf16" is named.
        later = [field.name for field in fields(self) if field.name not in (*_NAMED, *_UNNAMED, "precision")
                 and getattr(self, field.name) != field.default] + ["precision"] * (self.precision == "bf16")
        text = ";".join(f"{key}={getattr(self, key)!r}" for key in (*_NAMED, *later))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def mixes(self) -> bool:
        """True if images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    def check_boxes(self) -> None:
        """Raise ConfigError for what does not move boxes with their images."""
        if self.mixes or self.rand_augment:
            raise ConfigError("recipe: mixup, cutmix and rand_augment do not move boxes with their images. Set them to "
                              "0.")

    def deciding(self) -> dict[str, Any]:
        """Return the fields that decide a training: not the name, nor fields that change rounding only. A precision of
        "auto" is "fp32" here, whatever the machine chooses."""
        values = {key: value for key, value in asdict(self).items() if key not in _UNNAMED}
        return {**values, "precision": "bf16" if self.precision == "bf16" else "fp32"}

    def batch_for(self, n_images: int) -> int:
        """Return the images per step: `batch_size`, or fewer if an epoch would have fewer than eight steps."""
        batch = max(2, min(self.batch_size, n_images // 8))
        return batch - batch % 2 if self.mixes else batch

    def steps_for(self, n_images: int) -> int:
        """Return the number of optimiser steps on `n_images`. An epoch leaves out an incomplete last batch."""
        steps = max(self.epochs * max(1, n_images // self.batch_for(n_images)), self.min_steps)
        return min(steps, self.max_steps) if self.max_steps else steps


def all_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return every option of a recipe with its value, for `--show-config`."""
    return {key: value for key, value in asdict(recipe).items() if key != "name"}


PROXY = Recipe("proxy", epochs=1, min_steps=80, max_steps=80, shift=0.06)
# "Trained in full" means by this recipe: it trains finalists, baselines and contests.
FULL_TRAINING = Recipe("full", epochs=6, min_steps=160, max_steps=2000, lr_end=1e-5, ema_decay=0.99)
# For `hwnas train`, from scratch and from pretrained weights: the values that conf/train.yaml leaves null.
LONG_TRAINING = Recipe("train", epochs=100, lr=0.01, warmup=0.05, ema_decay=0.999)
_LONG_LR_END = 1e-5
FINE_TUNING = Recipe("fine_tuning", epochs=8, batch_size=32, lr=4e-3, layer_decay=0.85, warmup=0.3, ema_decay=0.97)


def recipe_of(config: Config, of_task: Mapping[str, Any] = MappingProxyType({})) -> Recipe:
    """Return the recipe at the top level of `conf/train.yaml`. A null is replaced by the task's value, if it has one,
    else by that of FINE_TUNING (with pretrained weights) or LONG_TRAINING. Raises UnknownName, ConfigError."""
    values = {key: config[key] for key in names_of(Recipe) if config.get(key) is not None}
    is_pretrained = read_options(PretrainedOptions, config.get("pretrained") or {}, "pretrained").asked
    preset = replace(FINE_TUNING if is_pretrained else LONG_TRAINING, lr_end=_LONG_LR_END, **of_task)
    return Recipe.from_config({key: value for key, value in values.items() if key not in _UNNAMED}, preset, "")


def other_than_full(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe for finalists that differ from FULL_TRAINING, without its length."""
    return {key: value for key, value in asdict(recipe).items()
            if key not in (*_LENGTH, *_UNNAMED) and value != getattr(FULL_TRAINING, key)}
