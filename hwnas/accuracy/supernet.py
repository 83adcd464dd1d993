"""Accuracy with inherited weights: the `supernet` estimator."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.accuracy.estimator import Estimate
from hwnas.cli.options import Config, plain
from hwnas.data.dataset import Dataset, Split, resize, subset, top1
from hwnas.errors import ConfigError, StudyError
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import Z90, binomial_std
from hwnas.system.libraries import release_memory
from hwnas.system.paths import home
from hwnas.system.run_folder import WorkFolder
from hwnas.training.recipe import SUPERNET, Recipe, SupernetOptions, all_recipe

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.training.supernet import Bank, SupernetJob

CHECKPOINT = "supernet.safetensors"


@dataclass(eq=False)
class Supernet:
    """An AccuracyEstimator: it validates an architecture with weights from one supernet of the whole space.

    A few hundred training images measure the batch norms first. `prepare` trains the supernet.
    `std` and the interval contain the error of the validation images alone. `python -m hwnas.certify` measures how
    well inherited weights rank the networks of a space.
    """

    dataset: Dataset
    space: SearchSpace
    options: SupernetOptions = field(default_factory=SupernetOptions)
    recipe: Recipe = SUPERNET
    setup_seconds: float = 0.0
    setup_here: bool = False
    _bank: Bank | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        options, sizes = self.options, self.space.image_sizes
        size = options.image_size or max(sizes)
        if len(sizes) > 1 and not options.image_size:
            raise ConfigError(f"supernet: the space {self.space.name} searches image sizes {', '.join(map(str, sizes))}"
                              ", which one supernet cannot share. Set supernet.image_size to train it at one of them, "
                              "which ranks the networks at that size, or give accuracy=proxy.")
        self._train = _part(self.dataset.train, options.train_images, size)
        self._validation = _part(self.dataset.validation, options.validation_images, size)
        self._data = replace(self.dataset, train=self._train, validation=self._validation, image_size=size)
        if len(self._train) < self.recipe.batch_size:
            raise ConfigError(f"supernet.batch_size is {self.recipe.batch_size}, but there are {len(self._train)} "
                              f"images to train on. Set supernet.batch_size={len(self._train)} or less.")
        self._recalibration = self._train.images[subset(self._train.labels, options.recalibration_images, 1)]

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the values, except the architecture."""
        content = f"{self.identity}|{self.options.validation_images}|{self.options.recalibration_images}|shuffled"
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the shared weights."""
        return {"space": f"{self.space.name} ({self.space.fingerprint})", "channels": self.space.channels,
                "classes": list(self.dataset.class_names), "dataset": self.dataset.name,
                "dataset.fingerprint": self.dataset.fingerprint, "dataset.flip": self.dataset.flip,
                "image_size": self._data.image_size, "train_images": len(self._train),
                "training": self.options.training(self.recipe)}

    @property
    def folder(self) -> Path:
        """Folder of the supernet: `supernet.path`, or a folder named by its identity in the user's data folder."""
        name = f"{self.space.name}-{self.dataset.name}-{self._data.image_size}px"
        digest = hashlib.sha256(str(self.identity).encode()).hexdigest()[:12]
        return self.options.path or home() / "supernets" / f"{name}-{digest}"

    def prepare(self, console: Console) -> None:
        """Train the supernet, from its last whole epoch, unless it is trained. Other processes wait."""
        from hwnas.training.supernet import bank_in, train

        path = self.folder / CHECKPOINT
        if self.options.path is not None and not path.is_file():
            raise StudyError(f"supernet.path: no {CHECKPOINT} in {self.folder}. Leave supernet.path out to train one.")
        with WorkFolder(self.folder, "supernet").take_up(within=self.folder.parent).hold("training", console.say):
            self.setup_here = not path.is_file()
            checkpoint = train(self._job(path), console)
        self.setup_seconds = sum(row["seconds"] for row in checkpoint.rows)
        self._bank = bank_in(checkpoint)
        console.note(f"supernet: {path}, {checkpoint.epoch} epochs in {self.setup_seconds:.0f} s")

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]] = (), seed: int = 0) -> Estimate:
        """Validation top-1 with inherited weights and its 90 % interval (the images' only)."""
        from hwnas.training.loop import predict, seeded

        if self._bank is None:
            raise RuntimeError("Supernet.prepare comes first")
        start = time.perf_counter()
        with seeded(seed, self.options.threads):
            network = self.network(architecture)
            value = top1(predict(network, self._validation.images, self._data), self._validation.labels)
        del network
        release_memory()
        std = binomial_std(value, len(self._validation))
        return Estimate(value, max(0.0, value - Z90 * std), min(1.0, value + Z90 * std), std, "supernet",
                        time.perf_counter() - start)

    def network(self, architecture: Architecture) -> Any:
        """The architecture's network with inherited weights, in eval mode. A training may start from it too."""
        from hwnas.training.supernet import inherit

        assert self._bank is not None
        return inherit(self._bank, architecture, self._recalibration, self._data, self.recipe.device)

    def _job(self, path: Path) -> SupernetJob:
        from hwnas.training.supernet import SupernetJob

        return SupernetJob(self.space, self._data, self._train, self.options, self.recipe, self.identity, path)


def _part(split: Split, n: int, size: int) -> Split:
    chosen = split if not n or n >= len(split) else split.take(subset(split.labels, n, 0))
    return Split(resize(chosen.images, size), chosen.labels)


def all_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option with its value, for `--show-config`."""
    options, recipe = SupernetOptions.from_config(given)
    return {**all_recipe(recipe), **plain(options)}


def load(config: Config, dataset: Dataset, space: SearchSpace | None) -> Supernet:
    """The door of `hwnas.accuracy.load_estimator`."""
    if space is None:
        raise ConfigError("accuracy=supernet needs a search space. Give space=NAME.")
    if space.definition.depths:
        raise ConfigError(f"accuracy=supernet: space {space.name} lets whole stages go (depth), which no supernet can. "
                          "Choose another accuracy, such as inherited or proxy.")
    return Supernet(dataset, space, *SupernetOptions.from_config(config))
