"""What the contest is asked for, checked, and the one recipe that every network of it is trained with (but for the
precision of baselines that `bf16` names)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.common import number_of
from hwnas.cli.command import names_in
from hwnas.errors import ConfigError, UnknownName
from hwnas.training.recipe import FULL_TRAINING

STEPS = ("train", "score", "time", "report")
SETS: Mapping[str, tuple[str, int]] = {"fashion_mnist": ("fashion_mnist", 32), "eurosat": ("imagefolder", 64)}
# The same for all: batch, optimizer and schedule are not tuned to any network. What is not named is conf/train.yaml's.
RECIPE: Mapping[str, Any] = {**{key: getattr(FULL_TRAINING, key) for key in (
    "batch_size", "optimizer", "warmup", "schedule", "ema_decay")}, "split_seed": 0}
# By timm's name: cost of a training step relative to each other, roughly (depthwise networks cost more than their MACs
# say); it decides the order alone. semnasnet_100 is MnasNet-A1.
BASELINES: Mapping[str, float] = {
    "mobilenetv3_small_100": 0.5, "mobilenetv2_050": 0.8, "mobilenetv3_large_100": 1.4, "semnasnet_100": 1.9,
    "mobilenetv2_100": 1.8, "resnet18": 1.8, "efficientnet_b0": 2.6, "resnet50": 4.5}


@dataclass(frozen=True)
class Options:
    """`dataset` are overrides of that group, its name first; `image_size` is the baselines' (None: as the images are).

    `bf16`: baselines that train in bf16 autocast, where that is cheaper (dense convolutions); all others in fp32.
    `ours`: run folder of the search, None to train the baselines alone. `seconds` caps the timing.
    """

    data: str
    out: Path
    dataset: tuple[str, ...]
    root: str | None = None
    image_size: int | None = None
    target: str = "epyc_int8"
    ours: Path | None = None
    networks: tuple[str, ...] = tuple(BASELINES)
    seeds: int = 2
    epochs: int = FULL_TRAINING.epochs
    train_images: int = 10_000
    validation_images: int = 2_000
    lr: float = FULL_TRAINING.lr
    bf16: tuple[str, ...] = ()
    jobs: int = 2
    batch: int = 1
    seconds: float = 200.0
    setup_seconds: float | None = None
    steps: tuple[str, ...] = STEPS
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def recipe(self) -> dict[str, Any]:
        """Options of hwnas.train that all trainings share."""
        return {**RECIPE, "lr": self.lr, "epochs": self.epochs, "train_images": self.train_images,
                "validation_images": self.validation_images}

    @property
    def identity(self) -> dict[str, Any]:
        """What everything in the folder `out` depends on; a folder holds one contest."""
        return {"data": self.data, "image_size": self.image_size, **dict(self.more), **self.recipe,
                "bf16": ",".join(self.bf16)}

    @property
    def size_override(self) -> tuple[str, ...]:
        """For baselines; an architecture says its own size."""
        return () if self.image_size is None else (f"dataset.image_size={self.image_size}",)


NAMES = tuple(name for name in Options.__dataclass_fields__ if name not in ("dataset", "more"))


def parse(arguments: Sequence[str]) -> Options:
    """ConfigError or UnknownName, in one line, for what cannot be meant; `dataset.KEY=VALUE` is handed on."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    own, more = [], {}
    for argument in arguments:
        name, equals, value = argument.lstrip("+").partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no name=value.")
        if name in ("dataset.root", "dataset.image_size"):
            raise ConfigError(f"write {name.removeprefix('dataset.')}={value}.")
        if name.startswith("dataset."):
            more[name] = value
        elif name in NAMES:
            own.append(f"{name}={value}")
        else:
            raise UnknownName("option", name, NAMES)
    try:
        given = OmegaConf.from_dotlist(own)
        defaults = {name: default for name in NAMES if (default := getattr(Options, name, None)) is not None}
        return _checked(OmegaConf.merge({**defaults, "networks": list(BASELINES), "steps": list(STEPS)}, given), more)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"options cannot be read: {' '.join(str(error).split())}") from error


def _checked(given: Any, more: Mapping[str, str]) -> Options:
    for name in ("data", "out"):
        if not isinstance(given.get(name), str) or not given[name]:
            raise ConfigError(f"{name}=… must be given.")
    name, size = SETS.get(given.data, (given.data, None))
    if name not in names_in("dataset"):
        raise UnknownName("data set", given.data, {*SETS, *names_in("dataset")})
    if given.target not in names_in("target"):
        raise UnknownName("target", given.target, names_in("target"))
    root = None if given.get("root") is None else str(Path(str(given.root)).expanduser().absolute())
    dataset = (f"dataset={name}", *([f"dataset.root={root}"] if root else []),
               *(f"{key}={value}" for key, value in more.items()))
    ours = given.get("ours")
    return Options(
        str(given.data), Path(given.out), dataset, root,
        number_of(given, "image_size", 8, 4096, whole=True, optional=True) if "image_size" in given else size,
        str(given.target), None if ours is None else Path(str(ours)), _names(given, "networks", tuple(BASELINES)),
        number_of(given, "seeds", 1, 100, whole=True), number_of(given, "epochs", 1, 100_000, whole=True),
        number_of(given, "train_images", 2, whole=True), number_of(given, "validation_images", 2, whole=True),
        float(number_of(given, "lr", 1e-8, 100)), _names(given, "bf16", tuple(BASELINES), least=0),
        number_of(given, "jobs", 1, 64, whole=True),
        number_of(given, "batch", 1, 4096, whole=True), float(number_of(given, "seconds", 0.1, 86_400)),
        number_of(given, "setup_seconds", 0, optional=True), _names(given, "steps", STEPS), more)


def _names(given: Any, key: str, known: Sequence[str], least: int = 1) -> tuple[str, ...]:
    """One name, `a,b` or `[a,b]`; in the order of `known`."""
    value = given.get(key)
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or ())
    for one in found:
        if one not in known:
            raise UnknownName("network" if key == "bf16" else key.removesuffix("s"), one, known)
    if len(found) < least:
        raise ConfigError(f"{key} must name at least one of {', '.join(known)}.")
    return tuple(one for one in known if one in found)
