"""SupernetOptions: how a supernet is trained and scored, read from the `supernet` section and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hwnas.errors import ConfigError, UnknownName
from hwnas.training_options import TrainingOptions

_RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1, 100_000), "min_steps": (0, 10**8), "train_images": (0, 10**9), "validation_images": (0, 10**9),
    "recalibration_images": (16, 10**6), "image_size": (0, 1024), "batch_size": (2, 8192), "lr": (1e-6, 10),
    "weight_decay": (0, 1), "warmup": (0, 0.9), "warmup_largest": (0, 0.5), "opening": (0, 0.5),
    "sandwich": (0, 1), "n_random": (1, 16),
    "ema_decay": (0, 0.99999), "label_smoothing": (0, 0.9), "clip_norm": (0, 1000), "shift": (0, 0.5),
    "seed": (0, 2**31), "threads": (0, 4096), "training_threads": (0, 4096),
}
_SCORING = ("validation_images", "recalibration_images", "threads", "training_threads", "path")


@dataclass(frozen=True, slots=True)
class SupernetOptions:
    """Each step trains `n_random` random sub-networks; a share `sandwich` of the steps the largest and smallest too,
    all but the largest on the largest's answers (1: the sandwich rule as published). For the first `warmup_largest` of
    all steps the largest's operations are trained alone; for the next `opening` random networks take operations of
    their own in more and more stages (hwnas.supernet.curriculum).

    `epochs` are raised until `min_steps` are done. `train_images`, `validation_images`: stratified subsets (0: all).
    `image_size` 0 is the space's; a smaller one is cheaper and ranks the same networks. `path`: a trained supernet's
    folder to use (null: the user's data folder, by fingerprint). `threads` score a network,
    `training_threads` train the supernet (0: every core).
    """

    epochs: int = 20
    min_steps: int = 2000
    train_images: int = 10_000
    validation_images: int = 2000
    recalibration_images: int = 512
    image_size: int = 0
    batch_size: int = 64
    lr: float = 5e-3
    weight_decay: float = 0.05
    warmup: float = 0.05
    warmup_largest: float = 0.1
    opening: float = 0.4
    sandwich: float = 0.25
    n_random: int = 2
    ema_decay: float = 0.995
    label_smoothing: float = 0.0
    clip_norm: float = 1.0
    shift: float = 0.06
    seed: int = 0
    threads: int = 0
    training_threads: int = 0
    path: Path | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SupernetOptions:
        """Read and check; ConfigError names key, rule and value."""
        known = {f.name: f.default for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in config.items():
            if key not in known:
                raise UnknownName("key of supernet", key, known)
            values[key] = _path(value) if key == "path" else _number(key, value, isinstance(known[key], int))
        return cls(**values)

    @property
    def training(self) -> str:
        """Everything that decides the shared weights, besides space and data."""
        return ";".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in _SCORING)

    def recipe(self, n_images: int) -> TrainingOptions:
        """The same as a recipe for `n_images` training images."""
        steps = max(1, n_images // self.batch_size)
        epochs = max(self.epochs, -(-self.min_steps // steps))
        return TrainingOptions(
            epochs=epochs, batch_size=min(self.batch_size, max(2, n_images)), optimizer="adamw", lr=self.lr,
            weight_decay=self.weight_decay, clip_norm=self.clip_norm, schedule="cosine", warmup=self.warmup,
            lr_end=min(1e-5, self.lr), decay_rate=0.1, decay_every=0.3, ema_decay=self.ema_decay,
            label_smoothing=self.label_smoothing, shift=self.shift, zoom=0.0, rotate=0.0, rand_augment=0,
            rand_layers=2, mixup=0.0, cutmix=0.0, mix_prob=1.0, erase=0.0, erase_mode="pixel", precision="fp32",
            channels_last=True)


def _number(key: str, value: Any, whole: bool) -> int | float:
    low, high = _RANGES[key]
    kind: Any = int if whole else int | float
    if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
        rule = f"{'a whole number' if whole else 'a number'} from {low:g} to {high:g}"
        raise ConfigError(f"supernet.{key} must be {rule}, got {value!r}.")
    return int(value) if whole else float(value)


def _path(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"supernet.path must be the folder of a trained supernet, got {value!r}.")
    return Path(str(value)).expanduser().absolute()
