"""TrainingOptions: the recipe of `python -m hwnas.train`, read from its configuration and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hwnas.cli.options import file_option, flag, number
from hwnas.errors import ConfigError, UnknownName
from hwnas.system.documents import content_of

CHOICES: dict[str, tuple[str, ...]] = {
    # Those of timm's whose whole state is in `state_dict()`, so that they can be resumed bit for bit.
    "optimizer": ("adabelief", "adam", "adamw", "lamb", "lars", "lion", "nadamw", "radam", "rmsproptf", "sgd"),
    "schedule": ("cosine", "poly", "step", "tanh"),
    "precision": ("fp32", "bf16"),
    "erase_mode": ("const", "pixel", "rand"),
}
_WHOLE: dict[str, tuple[int, int]] = {
    "epochs": (1, 100_000), "batch_size": (2, 65_536), "rand_augment": (0, 10), "rand_layers": (1, 10)}
_RANGES: dict[str, tuple[float, float]] = {
    "lr": (1e-8, 100), "weight_decay": (0, 1), "clip_norm": (0, 1000), "warmup": (0, 0.9), "lr_end": (0, 100),
    "decay_rate": (0, 10), "decay_every": (0.001, 1), "ema_decay": (0, 0.999999), "label_smoothing": (0, 0.9),
    "shift": (0, 0.5), "zoom": (0, 0.5), "rotate": (0, 180), "mixup": (0, 10), "cutmix": (0, 10), "mix_prob": (0, 1),
    "erase": (0, 1),
}


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Everything that decides a training besides network, data, seed and teacher; `conf/train.yaml` explains each."""

    epochs: int
    batch_size: int
    optimizer: str
    lr: float
    weight_decay: float
    clip_norm: float
    schedule: str
    warmup: float
    lr_end: float
    decay_rate: float
    decay_every: float
    ema_decay: float
    label_smoothing: float
    shift: float
    zoom: float
    rotate: float
    rand_augment: int
    rand_layers: int
    mixup: float
    cutmix: float
    mix_prob: float
    erase: float
    erase_mode: str
    precision: str
    channels_last: bool

    @classmethod
    def from_config(cls, config: Any) -> TrainingOptions:
        """Read the top level of `conf/train.yaml`; ConfigError names key, rule and value."""
        values: dict[str, Any] = {"channels_last": flag(config, "channels_last")}
        for key, known in CHOICES.items():
            if config[key] not in known:
                raise UnknownName(key, config[key], known)
            values[key] = str(config[key])
        for key, (least, most) in _WHOLE.items():
            values[key] = number(config, key, least, most, whole=True)
        for key, (low, high) in _RANGES.items():
            values[key] = float(number(config, key, low, high))
        found = cls(**values)
        if found.lr_end > found.lr:
            raise ConfigError(f"lr_end must not be above lr={found.lr:g}, got {found.lr_end:g}.")
        if found.mixes and found.batch_size % 2:
            raise ConfigError(f"batch_size must be even with mixup or cutmix, got {found.batch_size}.")
        return found

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return (self.mixup > 0 or self.cutmix > 0) and self.mix_prob > 0

    def steps_for(self, n_images: int) -> int:
        """Steps of an epoch over `n_images`: whole batches only. ConfigError when there is none."""
        if n_images < self.batch_size:
            raise ConfigError(f"batch_size is {self.batch_size}, but there are {n_images} images to train on. "
                              f"Set batch_size={n_images - n_images % 2} or less.")
        return n_images // self.batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values by key."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TeacherOptions:
    """A network to learn from: `timm:NAME` with `weights`, or an ONNX file; `alpha` is its share in the loss."""

    model: str
    weights: Path | None
    alpha: float
    temperature: float
    image_size: int | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    memory_mb: int
    timeout_s: float

    @classmethod
    def from_config(cls, config: Any, channels: int) -> TeacherOptions | None:
        """Read the `teacher` section, for images of `channels`; None without a model. ConfigError."""
        section = config["teacher"]
        if not isinstance(section, Mapping):
            raise ConfigError(f"teacher must be a section of keys and values, got {section!r}.")
        weights = file_option(config, "teacher.weights")
        if not section["model"]:
            if weights:
                raise ConfigError("teacher.weights goes with teacher.model=timm:NAME. Give it, or leave both out.")
            return None
        model = str(section["model"])
        if model.startswith("timm:") != (weights is not None):
            raise ConfigError("a timm teacher needs teacher.weights=FILE.safetensors, an ONNX teacher must have none; "
                              f"got teacher.model={model}, teacher.weights={weights}.")
        return cls(model, weights, float(number(config, "teacher.alpha", 0, 1)),
                   float(number(config, "teacher.temperature", 0.1, 100)),
                   number(config, "teacher.image_size", 8, 1024, whole=True, optional=True),
                   _per_channel("teacher.mean", section["mean"], channels, -10),
                   _per_channel("teacher.std", section["std"], channels, 1e-6),
                   number(config, "teacher.memory_mb", 1, whole=True), float(number(config, "teacher.timeout", 1)))

    @property
    def file(self) -> Path:
        """Where its weights lie."""
        return self.weights or Path(self.model)

    def to_dict(self) -> dict[str, Any]:
        """Plain values of what decides its answers and their weight, by key; `model` is named by its content."""
        return {"model": self.model if self.weights else "ONNX", "file": content_of(self.file), "alpha": self.alpha,
                "temperature": self.temperature, "image_size": self.image_size,
                "mean": self.mean and list(self.mean), "std": self.std and list(self.std)}


def _per_channel(key: str, value: Any, channels: int, low: float) -> tuple[float, ...] | None:
    if value is None:
        return None
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    right = all(isinstance(one, int | float) and not isinstance(one, bool) and low <= one <= 10 for one in numbers)
    if len(numbers) != channels or not right:
        raise ConfigError(f"{key} must be {channels} number{'s' if channels > 1 else ''} from {low:g} to 10 in "
                          f"brackets, got {value!r}.")
    return tuple(map(float, numbers))
