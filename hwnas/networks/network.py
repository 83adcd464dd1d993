"""Network: what can be built, exported and timed, be it an architecture of a space or a timm baseline."""

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
    """The network in train mode, float32 [n, c, h, w] in, logits [n, classes] out: with timm's initial weights (seed
    torch first), or what a cut keeps of `pretrained` ones. DataError where these do not fit."""
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
        """(channels, height, width) of one image."""
        return self.channels, self.image_size, self.image_size


@dataclass(frozen=True, slots=True)
class Network(ABC):
    """One network, from the search's trial or the list of baselines to its row of the front.

    `is_baseline`: it stands beside what is searched. `obvious`: its name among the obvious cuts of a network, empty for
    none. `deployment`: the target that its files are for, where a search chooses among several; otherwise empty. `file`
    is the name of the file that `describe` fills.
    """

    is_baseline = False
    obvious = ""
    deployment = ""
    file = "architecture.yaml"

    @property
    def id(self) -> str:
        """Its folder in `models/`: what was trained, and the deployment where there may be several."""
        return f"{self.trained_id}-{self.deployment}" if self.deployment else self.trained_id

    @property
    @abstractmethod
    def trained_id(self) -> str:
        """Names its weights: the same for all deployments."""

    def deployed_as(self, deployment: str) -> Self:
        """The same network for another deployment; empty for the run's only one."""
        return replace(self, deployment=deployment)  # type: ignore[call-arg]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in sentences: timm's name of a baseline, otherwise the id."""

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
    def build(self, pretrained: Pretrained | None = None) -> nn.Module:
        """The torch network in train mode, with random weights (seed torch first) or with what it keeps of pretrained
        ones; DataError where these do not fit."""

    @property
    @abstractmethod
    def pretrained(self) -> Pretrained | None:
        """The weights that its training begins, or began, with; None for random ones."""

    @property
    def provenance(self) -> Mapping[str, str]:
        """`metadata_props` of an ONNX file that say which pretrained weights it began with; empty for none."""
        return {} if self.pretrained is None else {PRETRAINED: json.dumps(self.pretrained.facts(), ensure_ascii=False)}

    def start(self) -> nn.Module:
        """As `build`, with the pretrained weights that its training begins with, if any."""
        return self.build(self.pretrained)

    def whole(self) -> nn.Module:
        """The network that its pretrained weights are of, with random ones."""
        return self.build()

    def check_start(self) -> str:
        """Return what is worth saying of the pretrained weights that its training begins with, or nothing.

        Raises:
            DataError: They do not fit the network that they are of.
        """
        return "" if self.pretrained is None else self.pretrained.load(self.whole(), self.shape.classes)

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and std, on pixels / 255, that its pretrained weights ask for; None: the data set's."""
        return None if self.pretrained is None else (self.pretrained.mean, self.pretrained.std)

    def fed(self, dataset: Dataset, later: bool = False) -> Dataset:
        """The data set as the network is fed it: at its size (`later`: see `Dataset.at_size`), and in its
        normalisation."""
        sized = dataset.at_size(self.shape.image_size, later)
        if self.normalisation is None:
            return sized
        mean, std = self.normalisation
        return replace(sized, mean=mean, std=std)

    def metadata(self, data: Dataset, recipe: str) -> dict[str, str]:
        """`metadata_props` of its ONNX files: its identity, its input, the names of its classes.

        Args:
            data: As it is fed it.
            recipe: Fingerprint of its training.
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
        """Text of its `file`; `read_network` reads it back."""


@dataclass(frozen=True, slots=True)
class FoundNetwork(Network):
    """An architecture of a search space.

    `pretrained`: the weights of the network that it is cut from, with which its training begins, or began. `obvious`:
    its name among the obvious cuts, where it stands as a baseline beside a search; empty for what is searched.
    """

    architecture: Architecture
    pretrained: Pretrained | None = None
    obvious: str = ""
    deployment: str = ""

    @property
    def is_baseline(self) -> bool:  # type: ignore[override]
        """Return whether it is an obvious cut beside a search."""
        return bool(self.obvious)

    @property
    def trained_id(self) -> str:
        """The architecture's; of an obvious cut e.g. `resnet18-cut_short-64px-pretrained`."""
        if not self.obvious:
            return self.architecture.id
        return f"{self.name}-{self.architecture.image_size}px" + "-pretrained" * (self.pretrained is not None)

    @property
    def name(self) -> str:
        """The architecture's id; of an obvious cut e.g. `resnet18-cut_short`."""
        return f"{self.cut_from}-{self.obvious}" if self.obvious else self.architecture.id

    @property
    def shape(self) -> Shape:
        architecture = self.architecture
        return Shape(architecture.channels, architecture.image_size, architecture.classes)

    @property
    def identity(self) -> str:
        """The architecture as JSON, and the key of its pretrained weights."""
        begun = {"pretrained": self.pretrained.key} if self.pretrained is not None else {}
        return json.dumps({**self.architecture.to_dict(), **begun})

    @property
    def blocks(self) -> Sequence[BlockSpec]:
        return self.architecture.blocks()

    def build(self, pretrained: Pretrained | None = None) -> nn.Module:
        """Block by block, or cut out of another one, whose weights the pretrained ones are."""
        return build(self.architecture, pretrained)

    def whole(self) -> nn.Module:
        cut = self.architecture
        return original(cut.around, cut.channels, cut.classes, cut.image_size) if cut.around else self.build()

    def describe(self) -> str:
        more = {OBVIOUS: self.obvious, DEPLOYMENT: self.deployment,
                PRETRAINED: self.pretrained and self.pretrained.facts()}
        said = {key: value for key, value in more.items() if value}
        return self.architecture.to_yaml() + (yaml.safe_dump(said, sort_keys=False) if said else "")

    @property
    def cut_from(self) -> str:
        """timm's name of the network that it is cut from; empty for none."""
        return origin_name(self.architecture.around)

    def __str__(self) -> str:
        return str(self.architecture)


@dataclass(frozen=True, slots=True)
class TimmNetwork(Network):
    """A timm network, for images and classes of `images`."""

    is_baseline = True
    file = "baseline.yaml"

    baseline: Baseline
    images: Shape
    deployment: str = ""

    @property
    def trained_id(self) -> str:
        """timm's name, what was changed of stem, depth and image size, and whether it began with pretrained weights."""
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
        """By timm; nothing is downloaded. ConfigError when timm cannot build it for these images."""
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
        return read_architecture(text, str(path))
    return TimmNetwork(Baseline.from_yaml(text, str(path)), images, str(load_yaml(text).get(DEPLOYMENT) or ""))


def read_architecture(text: str, where: str) -> FoundNetwork:
    """The network that an `architecture.yaml` describes; SpaceError or StudyError for anything else."""
    architecture = Architecture.from_yaml(text, where)
    try:
        said = load_yaml(text)
        facts = said.get(PRETRAINED)
        return FoundNetwork(architecture, None if facts is None else Pretrained.of_facts(facts),
                            str(said.get(OBVIOUS, "")), str(said.get(DEPLOYMENT) or ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StudyError(f"{where}: {PRETRAINED} needs file, sha256, licence, origin, and mean and std for each "
                         "channel.") from None
