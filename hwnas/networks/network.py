"""A network that can be built, exported and timed: an architecture of a search space, or a timm baseline."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from hwnas import __version__
from hwnas.data.dataset import CLASSIFICATION
from hwnas.errors import StudyError
from hwnas.lazy import LazyModule, nn, yaml
from hwnas.networks.baselines import Baseline, original
from hwnas.networks.cutting import build_cut
from hwnas.networks.weights import Pretrained
from hwnas.networks.weights import load_weights as load_weights
from hwnas.space.architecture import Architecture, Cut, origin_name
from hwnas.system.documents import load_yaml, yaml_text
from hwnas.system.run_folder import ModelFolder

if TYPE_CHECKING:
    import hwnas.networks.modules as modules
    from hwnas.data.dataset import Dataset
    from hwnas.space.blocks.block import BlockSpec
else:
    modules = LazyModule("hwnas.networks.modules")


PRETRAINED = "pretrained"  # key of a description and of an ONNX file's metadata
OBVIOUS = "obvious"  # key of a description
DEPLOYMENT = "deployment"  # key of a description


def build(architecture: Architecture, pretrained: Pretrained | None = None) -> nn.Module:
    """Build the network in train mode, float32 [n, c, h, w] in, logits [n, classes] out: with timm's initial weights
    (seed torch first), or what a cut keeps of `pretrained` ones. Raises DataError if these do not fit."""
    if isinstance(architecture, Cut):
        return build_cut(architecture, pretrained)
    return modules.BlockNet(architecture).train()


@dataclass(frozen=True, slots=True)
class Shape:
    """The input and the output: square images of `channels`, `image_size` pixels wide, and logits of `classes`."""

    channels: int
    image_size: int
    classes: int

    @property
    def image(self) -> tuple[int, int, int]:
        """The shape of one image: (channels, height, width)."""
        return self.channels, self.image_size, self.image_size


@dataclass(frozen=True, slots=True)
class Network(ABC):
    """One network, from the search's trial or the list of baselines to its row of the front.

    `is_baseline`: it is compared with the networks that a search finds. `obvious`: its name among the obvious cuts of a
    network; empty for none. `deployment`: the target of its files if a search has several targets; otherwise empty.
    `file`: the name of the file whose text `describe` returns.
    """

    is_baseline = False
    obvious = ""
    deployment = ""
    file = "architecture.yaml"

    @property
    def id(self) -> str:
        """The name of its folder in `models/`: the trained network, and its deployment if there may be several."""
        return f"{self.trained_id}-{self.deployment}" if self.deployment else self.trained_id

    @property
    @abstractmethod
    def trained_id(self) -> str:
        """The name of its weights, the same for all deployments."""

    def deployed_as(self, deployment: str) -> Self:
        """Return the same network for another deployment; empty for the run's only one."""
        return replace(self, deployment=deployment)  # type: ignore[call-arg]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in sentences: timm's name of a baseline, otherwise the id."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The shape of its images, and its number of classes."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """The text that identifies it in fingerprints of weights; it never changes for the same network."""

    @property
    def blocks(self) -> Sequence[BlockSpec] | None:
        """The blocks that a runtime executes, or None if they are not known."""
        return None

    @abstractmethod
    def build(self, pretrained: Pretrained | None = None) -> nn.Module:
        """Build the torch network in train mode, with random weights (seed torch first) or with what it keeps of
        pretrained ones. Raises DataError if these do not fit."""

    @property
    @abstractmethod
    def pretrained(self) -> Pretrained | None:
        """The weights from which its training starts or started; None for random ones."""

    @property
    def provenance(self) -> Mapping[str, str]:
        """The `metadata_props` of an ONNX file that say from which pretrained weights it started; empty for none."""
        return {} if self.pretrained is None else {PRETRAINED: json.dumps(self.pretrained.facts(), ensure_ascii=False)}

    def start(self) -> nn.Module:
        """Build it with the pretrained weights from which its training starts, if any."""
        return self.build(self.pretrained)

    def whole(self) -> nn.Module:
        """Build the network that its pretrained weights belong to, with random weights."""
        return self.build()

    def check_start(self) -> str:
        """Return a sentence that the user should read about the pretrained weights that it starts from, or nothing.

        Raises:
            DataError: They do not fit the network that they should belong to.
        """
        return "" if self.pretrained is None else self.pretrained.load(self.whole(), self.shape.classes)

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The mean and std, on pixels / 255, that its pretrained weights need; None: the data set's."""
        return None if self.pretrained is None else (self.pretrained.mean, self.pretrained.std)

    def fed(self, dataset: Dataset, later: bool = False) -> Dataset:
        """Return the data set as the network reads it: at its image size (`later`: see `Dataset.at_size`), and with its
        normalisation."""
        sized = dataset.at_size(self.shape.image_size, later)
        if self.normalisation is None:
            return sized
        mean, std = self.normalisation
        return replace(sized, mean=mean, std=std)

    def metadata(self, data: Dataset, recipe: str) -> dict[str, str]:
        """Return the `metadata_props` of its ONNX files: its identity, its input, the names of its classes.

        Args:
            data: The data set as the network reads it, see `fed`.
            recipe: The fingerprint of its training.
        """
        return {
            "hwnas_version": __version__, "hwnas_id": self.id, "architecture": str(self),
            "dataset": data.name, "dataset_fingerprint": data.fingerprint, "recipe": recipe,
            **({} if data.task == CLASSIFICATION else {"task": data.task}),
            "input": f"float32 [n, {data.channels}, {data.image_size}, {data.image_size}], (pixels / 255 - mean) / std",
            **({"preparation": json.dumps(data.preparation.facts())} if data.preparation else {}),
            "mean": json.dumps(list(data.mean)), "std": json.dumps(list(data.std)),
            "class_names": json.dumps(list(data.class_names), ensure_ascii=False), **self.provenance,
            **({} if self.pretrained is None else {"licence": self.pretrained.licence}),
        }

    @abstractmethod
    def describe(self) -> str:
        """Return the text of its `file`; `read_network` reads it back."""


@dataclass(frozen=True, slots=True)
class FoundNetwork(Network):
    """An architecture of a search space.

    `pretrained`: the weights from which its training starts or started, of the network that it is cut from. `obvious`:
    its name among the obvious cuts, if it is a baseline of a search; empty for a network that was searched.
    """

    architecture: Architecture
    pretrained: Pretrained | None = None
    obvious: str = ""
    deployment: str = ""

    @property
    def is_baseline(self) -> bool:  # type: ignore[override]
        """Return whether it is an obvious cut, as a baseline of a search."""
        return bool(self.obvious)

    @property
    def trained_id(self) -> str:
        """The architecture's id; for an obvious cut e.g. `resnet18-cut_short-64px-pretrained`."""
        if not self.obvious:
            return self.architecture.id
        return f"{self.name}-{self.architecture.image_size}px" + "-pretrained" * (self.pretrained is not None)

    @property
    def name(self) -> str:
        """The architecture's id; for an obvious cut e.g. `resnet18-cut_short`."""
        return f"{self.cut_from}-{self.obvious}" if self.obvious else self.architecture.id

    @property
    def shape(self) -> Shape:
        architecture = self.architecture
        return Shape(architecture.channels, architecture.image_size, architecture.classes)

    @property
    def identity(self) -> str:
        """The architecture as JSON, and the key of its pretrained weights."""
        start = {"pretrained": self.pretrained.key} if self.pretrained is not None else {}
        return json.dumps({**self.architecture.to_dict(), **start})

    @property
    def blocks(self) -> Sequence[BlockSpec]:
        return self.architecture.blocks()

    def build(self, pretrained: Pretrained | None = None) -> nn.Module:
        """Build it block by block, or cut it out of another network, which the pretrained weights belong to."""
        return build(self.architecture, pretrained)

    def whole(self) -> nn.Module:
        cut = self.architecture
        return original(cut.around, cut.channels, cut.classes, cut.image_size) if cut.around else self.build()

    def describe(self) -> str:
        more = {OBVIOUS: self.obvious, DEPLOYMENT: self.deployment,
                PRETRAINED: self.pretrained and self.pretrained.facts()}
        further = {key: value for key, value in more.items() if value}
        return self.architecture.to_yaml() + (yaml.safe_dump(further, sort_keys=False) if further else "")

    @property
    def cut_from(self) -> str:
        """timm's name of the network that it is cut from; empty for none."""
        return origin_name(self.architecture.around)

    def __str__(self) -> str:
        return str(self.architecture)


@dataclass(frozen=True, slots=True)
class TimmNetwork(Network):
    """A timm network for the images and classes of `images`, the data set's."""

    is_baseline = True
    file = "baseline.yaml"

    baseline: Baseline
    images: Shape
    deployment: str = ""

    @property
    def trained_id(self) -> str:
        """timm's name, changes of stem and image size, and `-pretrained` if it started from pretrained weights."""
        return self.baseline.id

    @property
    def name(self) -> str:
        return self.baseline.name

    @property
    def shape(self) -> Shape:
        """The images and classes that it was made for."""
        return replace(self.images, image_size=self.baseline.image_size or self.images.image_size)

    @property
    def identity(self) -> str:
        return str(self.baseline)

    def build(self, pretrained: Pretrained | None = None) -> nn.Module:
        """Build it with timm; nothing is downloaded. Raises ConfigError if timm cannot build it for these images."""
        shape = self.shape
        model = self.baseline.build(shape.channels, shape.classes, shape.image_size)
        if pretrained is not None:
            pretrained.load(model, shape.classes)
        return model

    @property
    def pretrained(self) -> Pretrained | None:
        return self.baseline.pretrained

    def describe(self) -> str:
        return self.baseline.to_yaml() + (f"{DEPLOYMENT}: {self.deployment}\n" if self.deployment else "")

    def __str__(self) -> str:
        return str(self.baseline)


def read_network(folder: ModelFolder, images: Shape) -> Network | None:
    """Read the network that a folder of `models/` describes; None if it describes none. `images`: the data set's, for a
    timm network, whose file does not have them. Raises StudyError for a file of another format."""
    path = next((path for path in (folder.architecture, folder.baseline) if path.exists()), None)
    if path is None:
        return None
    try:
        text = yaml_text(path)
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}).") from None
    if path == folder.architecture:
        return read_architecture(text, str(path))
    return TimmNetwork(Baseline.from_yaml(text, str(path)), images, str(load_yaml(text).get(DEPLOYMENT) or ""))


def read_architecture(text: str, where: str) -> FoundNetwork:
    """Read the network that an `architecture.yaml` describes; raises SpaceError or StudyError for any other text."""
    architecture = Architecture.from_yaml(text, where)
    try:
        content = load_yaml(text)
        facts = content.get(PRETRAINED)
        return FoundNetwork(architecture, None if facts is None else Pretrained.of_facts(facts),
                            str(content.get(OBVIOUS, "")), str(content.get(DEPLOYMENT) or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StudyError(f"{where}: {PRETRAINED} needs file, sha256, licence, origin, and mean and std for each "
                         "channel.") from None
