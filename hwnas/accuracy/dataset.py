"""What a data set is once it is known: images of three sets in memory, or listed and not yet decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.splits import Selection, count

Images = NDArray[np.uint8]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """One of the three sets: images uint8 [n, c, h, w] (in memory or mapped from a file), labels int64 [n]."""

    images: Images
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[np.int64]) -> Split:
        """These rows, copied into memory."""
        return Split(np.ascontiguousarray(self.images[rows]), self.labels[rows])


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """What is known before a single image is decoded; `native_size` is the usual shorter side in pixels."""

    name: str
    channels: int
    classes: int
    native_size: int


class Read(Protocol):
    """Decode rows of a listing's parts: `[(part, rows)] -> [(images uint8 [k, c, size, size], kept bool [rows])]`.

    `kept` is False where an image could not be read (and the options allow that): such rows are not in `images`.
    """

    def __call__(self, selection: Selection, image_size: int, progress: Progress | None
                 ) -> list[tuple[Images, NDArray[np.bool_]]]: ...


@dataclass(frozen=True, slots=True)
class Listing:
    """A data set listed but not decoded. `parts`: labels of `train` and, if held out by its makers, `val`, `test`.

    `identity` names the content (files and sizes, or a hash of it), `where` the place for error messages.
    """

    info: DatasetInfo
    class_names: tuple[str, ...]
    parts: Mapping[str, NDArray[np.int64]]
    identity: str
    where: str
    read: Read


@dataclass(frozen=True, eq=False, slots=True)
class Dataset:
    """Train, validation and test set of one size. `mean` and `std` are the training images', per channel, on 0..1.

    `skipped` counts unreadable images left out. The search sees train and validation only; test is the report's.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    flip: bool = False
    skipped: int = 0

    def counts(self) -> dict[str, dict[str, int]]:
        """Images of each class in each set."""
        sets = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: count(part.labels, self.class_names) for name, part in sets.items()}

    def normalise(self, images: Images) -> NDArray[np.float32]:
        """What a network is fed: float32 [n, c, h, w], (images / 255 - mean) / std."""
        scale = np.asarray([1 / (255 * std) for std in self.std], np.float32)
        shift = np.asarray([mean / std for mean, std in zip(self.mean, self.std, strict=True)], np.float32)
        result = np.asarray(images, np.float32) * scale[:, None, None]
        result -= shift[:, None, None]
        return result

    def at_size(self, image_size: int) -> Dataset:
        """The same images resized (anti-aliased), `mean` and `std` kept, so that figures stay comparable."""
        if image_size == self.image_size:
            return self
        train, validation, test = (
            Split(resize(part.images, image_size), part.labels) for part in (self.train, self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test, image_size=image_size,
                       fingerprint=digest(self.fingerprint, image_size))


def resize(images: Images, image_size: int) -> Images:
    """Images [n, c, h, w] at `image_size`: padded with 0 where that adds an eighth at most on each side (28 to 32),
    otherwise bilinear with anti-aliasing."""
    height, width = images.shape[2:]
    if (height, width) == (image_size, image_size):
        return images
    spare = image_size - height
    if height == width and 0 < spare <= height // 4 and spare % 2 == 0:
        return np.pad(images, ((0, 0), (0, 0), (spare // 2, spare // 2), (spare // 2, spare // 2)))
    import torch
    from torch.nn.functional import interpolate

    result = np.empty((*images.shape[:2], image_size, image_size), np.uint8)
    for start in range(0, len(images), 1024):
        batch = torch.from_numpy(np.asarray(images[start:start + 1024], np.float32))
        batch = interpolate(batch, (image_size, image_size), mode="bilinear", antialias=True)
        result[start:start + 1024] = batch.round_().clamp_(0, 255).numpy()
    return result


def digest_files(entries: Sequence[tuple[str, int]]) -> str:
    """Identity of files from their names and sizes in bytes."""
    return digest(*(f"{name}:{size}" for name, size in entries))


def digest(*values: object) -> str:
    """Twelve hexadecimal digits that name `values`."""
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:12]
