"""The network of a training, from a run, a file or timm, and the weights that it starts from."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import option
from hwnas.data.dataset import CLASSIFICATION
from hwnas.errors import ConfigError, DataError, did_you_mean
from hwnas.networks.around import find_start
from hwnas.networks.baselines import TIMM, Baseline, check_timm
from hwnas.networks.network import FoundNetwork, Network, Shape, TimmNetwork, read_architecture, read_network
from hwnas.networks.weights import PretrainedOptions, find_pretrained
from hwnas.space.architecture import CUT, Architecture
from hwnas.system.documents import yaml_text
from hwnas.system.run_folder import RunFolder
from hwnas.tasks.task import load_task, trunk_of
from hwnas.training.place import PLACES

if TYPE_CHECKING:
    from hwnas.data.dataset import DatasetInfo

_LARGEST_PX = 224  # largest image size for timm networks, unless dataset.image_size says otherwise
_FORMS = "an architecture.yaml, the text of a network as in trials.csv, or an id of trials.csv with run=FOLDER"


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of `conf/train.yaml` beside the recipe's, which are at its top level too."""

    architecture: str | None = option()
    run: str | None = option()
    model: str | None = option()
    dataset: dict[str, Any] = option()
    pretrained: PretrainedOptions = option()
    out: str | None = option()
    overwrite: bool = option()
    seed: int = option(low=0)
    split_seed: int = option(low=0)
    train_images: int | None = option(low=2)
    validation_images: int | None = option(low=2)
    device: str = option(choices=PLACES)
    threads: int = option(low=0, high=4096)


def find_network(options: TrainOptions, info: DatasetInfo) -> Network:
    """Return the network that options name, for the images of a data set, with the pretrained weights that it starts
    from.

    Raises:
        ConfigError: The options name no network, or several.
        DataError: The network was made for other images.
    """
    return _for_images(_choose_start(_source(options, info), options, info.channels),
                       options.dataset.get("image_size"), info)


def _choose_start(source: FoundNetwork | Baseline, options: TrainOptions, channels: int) -> FoundNetwork | Baseline:
    """Return the network with the pretrained weights to start from, or with none if they are not asked for."""
    if not options.pretrained.asked:
        return replace(source, pretrained=None)
    name = source.name if isinstance(source, Baseline) else source.cut_from
    if not name:
        raise ConfigError("pretrained goes with model=timm:NAME or a network that is cut from one. Leave it out.")
    if not isinstance(source, Baseline):
        return replace(source, pretrained=find_start(source.architecture.around, options.pretrained, channels))
    weights, pad_type = find_pretrained(name, options.pretrained, channels)
    return replace(source, pad_type=pad_type, pretrained=weights)


def _source(options: TrainOptions, info: DatasetInfo) -> FoundNetwork | Baseline:
    name, text = options.model, options.architecture
    if name is not None and text is None:  # timm's
        if not name.startswith(TIMM):
            raise ConfigError(f"model must be timm:NAME, got {name!r}; a network of a search is run=FOLDER "
                              "architecture=ID.")
        check_timm(name.removeprefix(TIMM))
        return Baseline(name.removeprefix(TIMM))
    if text is None or name is not None:
        raise ConfigError(f"which network? Give architecture=PATH of {_FORMS}, or model=timm:NAME.")
    if options.run is not None:
        return _of_run(RunFolder.open(os.path.expanduser(options.run), write=False), text, info)
    # A text as in trials.csv, or the path of a file, which may have a name that starts like a text.
    path = Path(os.path.expanduser(text))
    if text.startswith(CUT) or (text.startswith(("stem", TIMM)) and not path.exists()):
        return FoundNetwork(Architecture.parse(text, info.channels, info.classes))
    if not path.is_file():
        raise ConfigError(f"architecture: there is no file {text[:200]}. Give the path of {_FORMS}.")
    try:
        return read_architecture(yaml_text(path), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"architecture: {path} cannot be read ({error}).") from None


def _of_run(run: RunFolder, id: str, info: DatasetInfo) -> FoundNetwork | Baseline:
    """Return the network that a search calls `id`: one in models/ (a control or baseline, too), or a trial."""
    texts = {row["id"]: row["architecture"] for row in run.read_trials() if row.get("id") and row.get("architecture")}
    models = [path.name for path in sorted((run.path / "models").glob("*")) if path.is_dir()]
    network = None
    if id in models:
        network = read_network(run.model(id), Shape(info.channels, info.native_size, info.classes))
    if network is None and id in texts:
        return FoundNetwork(Architecture.parse(texts[id], info.channels, info.classes))
    if network is None:
        raise ConfigError(f"architecture: {run.path} has no network {id[:100]!r}."
                          f"{did_you_mean(id, [*texts, *models], 0.4)} {run.trials_csv} lists the {len(texts)} that it "
                          "tried.")
    return network.baseline if isinstance(network, TimmNetwork) else network  # type: ignore[return-value]


def _for_images(source: FoundNetwork | Baseline, asked: int | None, info: DatasetInfo) -> Network:
    """Return the network for a data set's images. Raises DataError if an architecture was made for others."""
    if isinstance(source, Baseline):
        size = asked or source.image_size or min(info.native_size, _LARGEST_PX)
        name = load_task(info.task).network_name(trunk_of(source.name)[1])
        return TimmNetwork(replace(source, name=name, image_size=0), Shape(info.channels, size, info.classes))
    # An architecture fits one task, number of channels and classes, and image size. A timm network fits any.
    shape, head = source.shape, trunk_of(source.cut_from)[0]
    if head != (info.task if load_task(info.task).needs_trunk else ""):
        raise DataError(f"the architecture is for {head or CLASSIFICATION}, the data set {info.name} for {info.task}. "
                        "Give the data set that it was searched on.")
    for what, its, needed in (("channels", info.channels, shape.channels), ("classes", info.classes, shape.classes)):
        if its != needed:
            raise DataError(f"the architecture was made for {needed} {what}, the data set {info.name} has {its}. "
                            "Give the data set that it was searched on.")
    if asked not in (None, shape.image_size):
        raise DataError(f"the architecture was made for {shape.image_size} px, dataset.image_size is {asked}. "
                        "Leave dataset.image_size out.")
    return source
