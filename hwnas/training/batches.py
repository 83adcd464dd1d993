"""Batches of images for a training, augmented at random, with their targets. Seeds decide all of it.

A GPU receives uint8 images; it normalises and moves them itself. The random numbers that move them are drawn on the
CPU, so that both devices see the same batches. Only the noise of `erase` differs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import Dataset, Images, Split
from hwnas.lazy import PIL, timm, torch
from hwnas.tasks.task import load_task
from hwnas.training.place import CPU
from hwnas.training.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

_MOST_HELD = 1 << 30  # bytes of images that a training keeps on a GPU; a larger set is sent batch by batch
_STRONGEST = 9.999  # magnitude: at 10 timm posterises to 0 bits, which Pillow refuses


def reseed(*key: int) -> None:
    """Seed every global generator (Python, numpy, torch) by `key`."""
    first, second, third = (int(word) for word in np.random.SeedSequence(key).generate_state(3))
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)


class Batches:
    """The training images `split` of `dataset` in batches, on the device of `recipe`. Small sets get smaller batches.

    (seed, epoch, step) alone decide every batch, its augmentation and its targets. A training that is interrupted
    after any step therefore continues with the same batches as one that is not.

    Attributes:
        batch: Number of images in a batch.
        per_epoch: Number of batches in an epoch.
        steps: Number of steps of the whole training.
    """

    def __init__(self, split: Split, dataset: Dataset, recipe: Recipe, seed: int) -> None:
        self.split, self.dataset, self.recipe, self.seed = split, dataset, recipe, seed
        self.task = load_task(dataset.task)
        if split.boxes is not None:
            recipe.check_boxes()
        self.device = recipe.device
        self.layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
        self._held: Tensor | None = None
        self.batch = recipe.batch_for(len(split))
        self.per_epoch = max(1, len(split) // self.batch)
        self.steps = recipe.steps_for(len(split))
        self._change = _rand_augment(recipe, dataset) if recipe.rand_augment else None
        self._erase: Callable[[Tensor], Tensor] | None = timm.data.random_erasing.RandomErasing(
            recipe.erase, mode="pixel", device=recipe.device) if recipe.erase else None
        self._mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = timm.data.mixup.Mixup(
            recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing,
            num_classes=len(dataset.class_names)) if recipe.mixes else None

    @property
    def epochs(self) -> int:
        """The number of epochs of the whole training; the last one may be incomplete."""
        return math.ceil(self.steps / self.per_epoch)

    def steps_of(self, epoch: int) -> range:
        """Return the steps of an epoch. Epochs count from 1, steps from 0 over the whole training."""
        return range((epoch - 1) * self.per_epoch, min(epoch * self.per_epoch, self.steps))

    def from_step(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images float32 [n, c, h, w], targets) of each step from `step` on, without an end.

        Targets are as `Split.targets` has them, or shares [n, classes] if images are mixed. All generators are seeded
        before each batch, so that the random numbers of the network (dropout) follow from the seed too.
        """
        while True:
            epoch, first = divmod(step, self.per_epoch)
            order = np.random.default_rng([self.seed, epoch + 1]).permutation(len(self.split))
            for place in range(first, self.per_epoch):
                reseed(self.seed, epoch + 1, place)
                # The rows stay in random order: mixing pairs the first image with the last.
                rows = order[place * self.batch:(place + 1) * self.batch]
                yield self._make(rows, torch.Generator().manual_seed(int(torch.randint(1 << 62, ()))))
                step += 1

    def _make(self, rows: NDArray[np.int64], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images, moved = augment(self._fed(rows), self.recipe, self.dataset.flip, generator)
        targets = torch.from_numpy(self.split.targets[rows])
        if moved is not None:  # boxes move with their images; classes stay
            targets = self.task.move(targets, moved)
        targets = targets.to(self.device)
        if self._erase is not None:
            images = self._erase(images)
        if self._mix is not None:
            images, targets = self._mix(images, targets)
        return images.contiguous(memory_format=self.layout), targets

    def _fed(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the normalised images float32 [n, c, h, w] in these rows, on the device."""
        # A small set is copied to the GPU once. RandAugment takes images on the CPU, so that it rules this out.
        if self._change is None and self.device != CPU and self.split.images.nbytes <= _MOST_HELD:
            if self._held is None:
                self._held = sent(np.asarray(self.split.images), self.device)
            return normalised(self._held[torch.from_numpy(rows).to(self.device)], self.dataset)
        pixels: Images = np.asarray(self.split.images[rows])
        if self._change is not None:
            pixels = np.stack([_change_image(image, self._change) for image in pixels])
        return fed(pixels, self.dataset, self.device)


def fed(pixels: Images, dataset: Dataset, device: str) -> Tensor:
    """Return images uint8 [n, c, h, w] as input of a network on `device`: normalised, float32, on that device."""
    if device == CPU:
        return torch.from_numpy(dataset.normalise(pixels))
    return normalised(sent(pixels, device), dataset)


def sent(pixels: Images, device: str) -> Tensor:
    """Copy images to `device` as uint8, which has a quarter of the bytes of float32."""
    tensor = torch.from_numpy(np.ascontiguousarray(pixels))
    return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor.to(device)


def normalised(pixels: Tensor, dataset: Dataset) -> Tensor:
    """Normalise images uint8 [n, c, h, w] on any device; equal to `Dataset.normalise` to the last bit."""
    scale = torch.tensor([1 / (255 * each) for each in dataset.std], device=pixels.device)
    shift = torch.tensor([each / spread for each, spread in zip(dataset.mean, dataset.std, strict=True)],
                         device=pixels.device)
    return pixels.float().mul_(scale[:, None, None]).sub_(shift[:, None, None])


def augment(images: Tensor, recipe: Recipe, flip: bool, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Shift, mirror, zoom and rotate float images [n, c, h, w] at random on their device, as far as `recipe` says.

    Return the images, and for each the matrix from new to old places [n, 2, 3] as in torch's `affine_grid` (None:
    nothing was moved). Shift and mirror alone move whole pixels (edges repeated); zoom and rotation sample bilinearly.
    """
    n, _, height, width = images.shape
    moved = None
    if recipe.zoom or recipe.rotate:
        moved = _affine(n, recipe, flip, generator)
        grid = torch.nn.functional.affine_grid(moved.to(images.device), list(images.shape), align_corners=False)
        images = torch.nn.functional.grid_sample(images, grid, mode="bilinear", padding_mode="border",
                                                 align_corners=False)
    elif recipe.shift or flip:
        # For each new row and column, the row and column of the old image that it is copied from.
        down = _offsets(n, recipe.shift * height, generator)
        rows, columns = down + torch.arange(height), torch.arange(width).expand(n, width)
        mirrored = torch.rand(n, 1, generator=generator) < 0.5 if flip else torch.zeros(n, 1, dtype=torch.bool)
        columns = torch.where(mirrored, columns.flip(1), columns)
        across = _offsets(n, recipe.shift * width, generator)
        columns = columns + across
        # The same as a matrix, in the coordinates of `affine_grid`: from -1 to 1 over the image.
        moved = torch.eye(2, 3).repeat(n, 1, 1)
        moved[:, 0, 0] = 1 - 2 * mirrored[:, 0].float()
        moved[:, 0, 2], moved[:, 1, 2] = 2 * across[:, 0] / width, 2 * down[:, 0] / height
        rows, columns = rows.clamp_(0, height - 1).to(images.device), columns.clamp_(0, width - 1).to(images.device)
        image = torch.arange(n, device=images.device)[:, None, None]
        pixels = images.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
        images = pixels.permute(0, 3, 1, 2)
    return images, moved


def _offsets(n: int, most: float, generator: torch.Generator) -> Tensor:
    bound = round(most)
    return torch.randint(-bound, bound + 1, (n, 1), generator=generator)


def _affine(n: int, recipe: Recipe, flip: bool, generator: torch.Generator) -> Tensor:
    """Draw the matrices [n, 2, 3] of `augment` for `n` images: rotation and scale, mirror, shift."""
    def uniform() -> Tensor:
        return torch.rand(n, generator=generator) * 2 - 1

    angle = uniform() * math.radians(recipe.rotate)
    scale = 1 + uniform() * recipe.zoom
    mirror = torch.where(uniform() < 0, -1.0, 1.0) if flip else torch.ones(n)
    cosine, sine = scale * angle.cos(), scale * angle.sin()
    return torch.stack([torch.stack([cosine * mirror, -sine, 2 * recipe.shift * uniform()], 1),
                        torch.stack([sine * mirror, cosine, 2 * recipe.shift * uniform()], 1)], 1)


def _change_image(image: Images, change: Callable[[Any], Any]) -> Images:
    """Apply an operation of timm, which takes PIL images, to an image [c, h, w] of one or three channels."""
    grey = len(image) == 1
    array = image[0] if grey else np.ascontiguousarray(image.transpose(1, 2, 0))
    pixels = np.asarray(change(PIL.Image.fromarray(array)))
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _rand_augment(recipe: Recipe, dataset: Dataset) -> Callable[[Any], Any]:
    mean = tuple(round(255 * value) for value in dataset.mean)
    augment: Callable[[Any], Any] = timm.data.auto_augment.rand_augment_transform(
        f"rand-m{recipe.rand_augment}-n2-mstd0.5-inc1",
        {"img_mean": mean[0] if len(mean) == 1 else mean, "magnitude_max": _STRONGEST})
    return augment
