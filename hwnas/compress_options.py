"""CompressOptions: what `python -m hwnas.compress` was asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hwnas.command import number
from hwnas.training_options import flag

LEAST_CALIBRATION = 8


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """`max_drop` is in points of validation top-1; `conf/compress.yaml` explains each of the others."""

    max_drop: float
    every_step: bool
    seed: int
    train_images: int | None
    calibration_images: int
    validation_images: int | None
    threads: int
    seconds: float
    sensitivity_images: int
    sensitivity_nodes: int
    epochs: int
    batch_size: int
    lr: float
    distil: float
    shift: float
    zoom: float
    rotate: float

    @classmethod
    def from_config(cls, config: Any) -> CompressOptions:
        """Read `conf/compress.yaml`; ConfigError names key, rule and value."""
        return cls(
            max_drop=float(number(config, "max_drop", 0, 100)), every_step=flag(config, "all"),
            seed=number(config, "seed", 0, whole=True),
            train_images=number(config, "train_images", 2, whole=True, optional=True),
            calibration_images=number(config, "calibration_images", LEAST_CALIBRATION, 100_000, whole=True),
            validation_images=number(config, "validation_images", 2, whole=True, optional=True),
            threads=number(config, "threads", 0, 4096, whole=True),
            seconds=float(number(config, "seconds", 1, 86_400)),
            sensitivity_images=number(config, "sensitivity.images", 1, 100_000, whole=True),
            sensitivity_nodes=number(config, "sensitivity.nodes", 1, 1000, whole=True),
            epochs=number(config, "qat.epochs", 1, 1000, whole=True),
            batch_size=number(config, "qat.batch_size", 2, 65_536, whole=True),
            lr=float(number(config, "qat.lr", 1e-8, 100)), distil=float(number(config, "qat.distil", 0, 1)),
            shift=float(number(config, "qat.shift", 0, 0.5)), zoom=float(number(config, "qat.zoom", 0, 0.5)),
            rotate=float(number(config, "qat.rotate", 0, 180)))

    def deciding(self) -> dict[str, Any]:
        """What decides every step, by key: neither the limit nor what only costs time."""
        return {key: getattr(self, key) for key in ("seed", "train_images", "calibration_images",
                                                     "validation_images")}

    def tuning(self) -> dict[str, Any]:
        """What decides the fine-tuning besides, by key."""
        keys = ("epochs", "batch_size", "lr", "distil", "shift", "zoom", "rotate")
        return {f"qat.{key}": getattr(self, key) for key in keys}
