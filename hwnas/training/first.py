"""FirstTraining: what a network with pretrained weights is trained for before its last training, as a trial of the
search was.

A trial ends with weights that know the data. A finalist goes on from them, and every other network that is made beside
it gets the same training first: so no minute of a trial is lost, and no network is trained longer than another.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.data.dataset import Subsets
from hwnas.errors import UserError
from hwnas.system.paths import write_atomic
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from hwnas.data.dataset import Dataset

_KEY, _SUFFIX = "first_training", ".safetensors"


@dataclass(frozen=True)
class FirstTraining:
    """A trial's training: `recipe`, number of images (0: all), px (0: the network's own), seed.

    `origin` names what else decides a trial: data and pretrained weights. `folder` keeps the weights that trials end
    with, by the network's id.
    """

    recipe: Recipe
    train_images: int
    image_size: int
    seed: int
    folder: Path
    origin: str = ""

    @property
    def fingerprint(self) -> str:
        """Names everything that decides the weights besides the network."""
        text = f"{self.recipe.fingerprint}|{self.train_images}|{self.image_size}|{self.seed}|{self.origin}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def steps(self, n_images: int) -> int:
        """Its optimiser steps on a data set of `n_images`."""
        return self.recipe.steps_for(min(self.train_images or n_images, n_images))

    def images(self, n_images: int) -> int:
        """Images that it sees, of a data set of `n_images`, counted as often as it sees them."""
        return self.steps(n_images) * self.recipe.batch_for(min(self.train_images or n_images, n_images))

    def path(self, name: str) -> Path:
        """Where the weights of the trial of this network are kept."""
        return self.folder / f"{name}{_SUFFIX}"

    def keep(self, name: str, model: nn.Module) -> None:
        """Write the weights that a trial ended with. A disk that takes none costs their training again, not the
        trial."""
        from safetensors.torch import save

        tensors = {key: tensor.detach().contiguous().clone() for key, tensor in model.state_dict().items()}
        try:
            self.folder.mkdir(exist_ok=True)
            write_atomic(self.path(name), save(tensors, {_KEY: self.fingerprint}))
        except (OSError, UserError):
            with contextlib.suppress(OSError):
                self.path(name).unlink(missing_ok=True)

    def keep_only(self, names: Container[str], known: Container[str]) -> None:
        """Remove the weights of trials that are `known` to have ended and are not among `names`."""
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if path.stem in known and path.stem not in names:
                path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove all weights of trials; files that are not hwnas's stay."""
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if _key_in(path):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def is_kept(self, name: str) -> bool:
        """Whether the trial's weights are there, and of this training."""
        return _key_in(self.path(name)) == self.fingerprint

    def trained(self, model: nn.Module, name: str, data: Dataset, whole: Dataset,
                progress: Callable[[int, int], None] | None = None) -> nn.Module:
        """`model`, which has its pretrained weights, after this training: read where the trial's weights are kept,
        otherwise trained now, on images of `whole` in the normalisation of `data`, whose size is the network's.
        TrainingError as of `train`."""
        from hwnas.training.loop import train

        if self.is_kept(name) and self._read(model, name):
            return model
        images, _ = Subsets(whole, self.train_images, 1).at(self.image_size or data.image_size)
        return train(model, images, recipe=self.recipe, dataset=data, seed=self.seed, progress=progress).train()

    def _read(self, model: nn.Module, name: str) -> bool:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(self.path(name))
        except (OSError, SafetensorError):
            return False
        own = model.state_dict()
        if own.keys() != tensors.keys() or any(own[key].shape != tensors[key].shape for key in own):
            return False
        model.load_state_dict(tensors)
        return True


def _key_in(path: Path) -> str | None:
    """The training that a file names in its metadata; None for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(_KEY)
    except (OSError, SafetensorError):
        return None
