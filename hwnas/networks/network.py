"""Network: what can be built, exported and timed, be it an architecture of a space or a timm baseline."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.errors import DataError, StudyError
from hwnas.networks.baselines import Baseline
from hwnas.space.architecture import Architecture
from hwnas.system.documents import yaml_text
from hwnas.system.run_folder import ModelFolder

if TYPE_CHECKING:
    from torch import nn

    from hwnas.space.blocks.block import BlockSpec


EARLY = "-early"  # ends the id of a network of a first front


@dataclass(frozen=True, slots=True)
class Shape:
    """What goes in and comes out: square images of `channels`, `image_size` pixels wide, and logits of `classes`."""

    channels: int
    image_size: int
    classes: int

    @property
    def image(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        return self.channels, self.image_size, self.image_size


@dataclass(frozen=True, slots=True)
class Network(ABC):
    """One network, from the search's trial or the list of baselines to its row of the front.

    `is_baseline`: a timm network. `file` is the name of the file that `describe` fills.
    """

    is_baseline = False
    file = "architecture.yaml"

    @property
    @abstractmethod
    def id(self) -> str:
        """Its folder in `models/`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What sentences call it: timm's name of a baseline, otherwise the id."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Its images and classes."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Names the network in fingerprints of weights: never changes for the same network."""

    @property
    def blocks(self) -> Sequence[BlockSpec] | None:
        """The blocks that a runtime executes, where they are known."""
        return None

    @abstractmethod
    def build(self) -> nn.Module:
        """The torch network with random weights (seed torch first), in train mode."""

    @abstractmethod
    def describe(self) -> str:
        """Text of its `file`; `read_network` reads it back."""


@dataclass(frozen=True, slots=True)
class FoundNetwork(Network):
    """An architecture of a search space."""

    architecture: Architecture

    @property
    def id(self) -> str:
        """The architecture's id."""
        return self.architecture.id

    @property
    def name(self) -> str:
        """As `id`."""
        return self.architecture.id

    @property
    def shape(self) -> Shape:
        """Its own: architectures hold their images' size."""
        architecture = self.architecture
        return Shape(architecture.channels, architecture.image_size, architecture.classes)

    @property
    def identity(self) -> str:
        """The architecture as JSON."""
        return json.dumps(self.architecture.to_dict())

    @property
    def blocks(self) -> Sequence[BlockSpec]:
        """The architecture's blocks."""
        return self.architecture.blocks()

    def build(self) -> nn.Module:
        """By timm's EfficientNet or the macro network."""
        from hwnas.networks.build import build

        return build(self.architecture)

    def describe(self) -> str:
        """Text of `architecture.yaml`."""
        return self.architecture.to_yaml()

    def __str__(self) -> str:
        return str(self.architecture)


@dataclass(frozen=True, slots=True)
class EarlyNetwork(FoundNetwork):
    """The same, trained for the first front of a search in minutes: in a folder of its own, so that the last training
    of the same architecture does not touch what is published."""

    @property
    def id(self) -> str:
        """The architecture's id and EARLY."""
        return self.architecture.id + EARLY


@dataclass(frozen=True, slots=True)
class TimmNetwork(Network):
    """A timm network, for images and classes of `images`."""

    is_baseline = True
    file = "baseline.yaml"

    baseline: Baseline
    images: Shape

    @property
    def id(self) -> str:
        """timm's name, and the stem's stride where it was changed."""
        return self.baseline.id

    @property
    def name(self) -> str:
        """timm's name."""
        return self.baseline.name

    @property
    def shape(self) -> Shape:
        """What it was made for."""
        return self.images

    @property
    def identity(self) -> str:
        """The baseline's text."""
        return str(self.baseline)

    def build(self) -> nn.Module:
        """By timm; nothing is downloaded. ConfigError when timm cannot build it for these images."""
        from hwnas.networks.baselines import build_timm

        return build_timm(self.baseline, self.images.channels, self.images.classes, self.images.image_size)

    def describe(self) -> str:
        """Text of `baseline.yaml`."""
        return self.baseline.to_yaml()

    def __str__(self) -> str:
        return str(self.baseline)


def read_network(folder: ModelFolder, images: Shape) -> Network | None:
    """The network that a folder of `models/` describes; None where it describes none.

    `images`: of the data set, for a timm network, whose file does not say. StudyError for a file of another format.
    """
    path = next((path for path in (folder.architecture, folder.baseline) if path.exists()), None)
    if path is None:
        return None
    try:
        text = yaml_text(path)
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}).") from None
    if path == folder.architecture:
        return FoundNetwork(Architecture.from_yaml(text, str(path)))
    return TimmNetwork(Baseline.from_yaml(text, str(path)), images)


_MOST_HEADER = 8 << 20  # bytes, some 80,000 tensors: reading a header takes thirty times its size


def check_tensors(path: Path) -> Path:
    """`path`, a safetensors file whose header can be read at small cost; SafetensorError or OSError otherwise.

    The library itself holds every tensor's place against the file's size, but reads headers of up to 100 MB.
    """
    from safetensors import SafetensorError

    if not path.is_file():
        raise FileNotFoundError(2, "there is no such file", str(path))
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _MOST_HEADER:
        raise SafetensorError(f"its header would have {header} bytes, {_MOST_HEADER} are read at most")
    return path


def load_weights(model: nn.Module, path: Path, label: str, classes: int) -> None:
    """Put a safetensors file's weights into `model`; DataError when it is torn, or of another network or classes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(check_tensors(path))
    except (OSError, SafetensorError) as error:
        raise DataError(f"{label} cannot be read ({' '.join(str(error).split())[:120]}): it is torn or no safetensors "
                        "file. Give a whole one.") from None
    own = model.state_dict()
    missing = [name for name in own if name not in tensors] + [name for name in tensors if name not in own]
    if missing:
        raise DataError(f"{label} is of another network: {missing[0]!r} is in only one of them ({len(missing)} such). "
                        "Give the weights of this network.")
    other = [name for name in own if own[name].shape != tensors[name].shape]
    if other and all(_is_head(own[name].shape, tensors[name].shape, classes) for name in other):
        raise DataError(f"{label} knows {tensors[other[0]].shape[0]} classes, the data set has {classes}. Give weights "
                        "that were trained on these classes.")
    if other:
        raise DataError(f"{label} is of another network: {other[0]!r} has shape {list(tensors[other[0]].shape)} there, "
                        f"{list(own[other[0]].shape)} here ({len(other)} such). Give the weights of this network.")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:  # numbers that cannot be converted, such as packed ones
        raise DataError(f"{label} cannot be taken ({' '.join(str(error).split())[:120]}). Give weights in floating "
                        "point.") from None


def _is_head(own: tuple[int, ...], given: tuple[int, ...], classes: int) -> bool:
    """Whether two shapes differ in the number of classes only."""
    return len(own) == len(given) and own[0] == classes and tuple(own[1:]) == tuple(given[1:])
