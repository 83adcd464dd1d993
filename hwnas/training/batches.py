"""What a training is fed: every batch, its augmentation and its targets decided by (seed, epoch, step) alone.

A training that was interrupted after any epoch therefore sees what it would have seen without.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hwnas.data.dataset import Dataset, Images, Split
from hwnas.system.torchvision_ops import declare_missing
from hwnas.training.augment import augment
from hwnas.training.options import TrainingOptions
from hwnas.training.ranks import ALONE, Ranks
from hwnas.training.recipe import Recipe

_STRONGEST = 9.999  # at 10 timm posterises to 0 bits, which Pillow refuses


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Python's and numpy's global generators, which timm's augmentation draws from, are afterwards as they were."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def reseed(*key: int) -> None:
    """Set every global generator by `key`."""
    first, second, third = (int(word) for word in np.random.SeedSequence(key).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


class Batches:
    """The training set `split` of `dataset` in batches on `device`; of each the share of this process."""

    def __init__(self, split: Split, dataset: Dataset, options: TrainingOptions, seed: int,
                 device: str = "cpu", ranks: Ranks = ALONE) -> None:
        declare_missing()
        self.ranks = ranks
        self.split, self.dataset, self.options, self.seed, self.device = split, dataset, options, seed, device
        self._moves = Recipe("train", options.epochs, shift=options.shift, zoom=options.zoom, rotate=options.rotate)
        self._change = _rand_augment(options, dataset) if options.rand_augment else None
        self._erase = _random_erasing(options) if options.erase else None
        self._mix = _mixup(options, len(dataset.class_names)) if options.mixes else None

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self.options.steps_for(len(self.split))

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(images float32 [n, c, h, w], targets) of each step: classes int64 [n], or shares [n, classes] when mixed.

        All generators are set before a batch is made; what the network draws (dropout) follows from them too.
        """
        batch = self.options.batch_size
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.split))
        layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
        for step in range(len(self)):
            reseed(self.seed, epoch, step, *([self.ranks.rank] if self.ranks.world > 1 else []))
            rows = order[step * batch:(step + 1) * batch][self.ranks.rank::self.ranks.world]
            # Not sorted: mixing pairs the first with the last
            images, targets = self._images(rows), torch.from_numpy(self.split.labels[rows])
            if self._mix is not None:
                images, targets = self._mix(images, targets)
            yield images.contiguous(memory_format=layout).to(self.device), targets.to(self.device)

    def _images(self, rows: NDArray[np.int64]) -> Tensor:
        pixels: Images = np.asarray(self.split.images[rows])
        if self._change is not None:
            pixels = np.stack([_changed(image, self._change) for image in pixels])
        generator = torch.Generator().manual_seed(int(torch.randint(1 << 62, ())))
        images = augment(torch.from_numpy(self.dataset.normalise(pixels)), self._moves, self.dataset.flip, generator)
        return images if self._erase is None else self._erase(images)


def _changed(image: Images, change: Callable[[Any], Any]) -> Images:
    """timm's operations take PIL images: [c, h, w] of one or three channels there and back."""
    from PIL import Image

    grey = len(image) == 1
    found = np.asarray(change(Image.fromarray(image[0] if grey else np.ascontiguousarray(image.transpose(1, 2, 0)))))
    return found[None] if grey else found.transpose(2, 0, 1)


def _rand_augment(options: TrainingOptions, dataset: Dataset) -> Callable[[Any], Any]:
    from timm.data.auto_augment import rand_augment_transform

    mean = tuple(round(255 * value) for value in dataset.mean)
    found: Callable[[Any], Any] = rand_augment_transform(
        f"rand-m{options.rand_augment}-n{options.rand_layers}-mstd0.5-inc1",
        {"img_mean": mean[0] if len(mean) == 1 else mean, "magnitude_max": _STRONGEST})
    return found


def _random_erasing(options: TrainingOptions) -> Callable[[Tensor], Tensor]:
    from timm.data.random_erasing import RandomErasing

    found: Callable[[Tensor], Tensor] = RandomErasing(options.erase, mode=options.erase_mode, device="cpu")
    return found


def _mixup(options: TrainingOptions, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    from timm.data.mixup import Mixup

    found: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = Mixup(
        options.mixup, options.cutmix, prob=options.mix_prob, label_smoothing=options.label_smoothing,
        num_classes=classes)
    return found
