"""Data sets in memory: three disjoint sets of uint8 images, whatever they come from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy import splits
from hwnas.accuracy.options import DatasetOptions
from hwnas.errors import DataError, UnknownName

Images = NDArray[np.uint8]
Progress = Callable[[int, int], None]
BUILT_IN = ("digits", "fashion_mnist", "cifar10", "imagefolder")


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

    def __call__(self, selection: splits.Selection, image_size: int, progress: Progress | None
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
        return {name: splits.counts(part.labels, self.class_names) for name, part in sets.items()}

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
                       fingerprint=_digest(self.fingerprint, image_size))


def inspect_dataset(config: Mapping[str, Any]) -> DatasetInfo:
    """Channels, classes and native size, without decoding the images; DataError as `load_dataset`."""
    return _listing(DatasetOptions.from_config(config)).info


def load_dataset(config: Mapping[str, Any], image_size: int, seed: int, progress: Progress | None = None) -> Dataset:
    """List, check, split and decode the data set of `config` (the `dataset` group; `config.image_size` wins).

    DataError when it is missing, empty, of one class, has an unreadable image or too few images of a class.
    `progress(done, total)` counts decoded images.
    """
    options = DatasetOptions.from_config(config)
    listing = _listing(options)
    if len(listing.class_names) < 2:
        raise DataError(f"{listing.where}: one class only ({', '.join(listing.class_names)}); nothing to tell apart. "
                        "Give a data set with at least two classes.")
    size = options.image_size or image_size
    chosen = splits.split(listing.parts, listing.class_names, options, seed, listing.where)
    names = ("train", "validation", "test")
    found = listing.read([chosen[name] for name in names], size, progress)
    sets = {}
    for name, (images, kept) in zip(names, found, strict=True):
        part, rows = chosen[name]
        labels = listing.parts[part][rows][kept]
        splits.check_counts(labels, listing.class_names, splits.LEAST[name],
                            f"{listing.where}: in the {name} set a class needs")
        sets[name] = Split(images, labels)
    mean, std = _statistics(sets["train"].images)
    return Dataset(
        **sets, name=options.name, class_names=listing.class_names, channels=listing.info.channels, image_size=size,
        mean=mean, std=std, flip=options.flip, skipped=sum(int((~kept).sum()) for _, kept in found),
        fingerprint=_digest(listing.identity, size, seed, options.validation_fraction, options.test_fraction,
                            options.skip_unreadable, listing.info.channels))


def _listing(options: DatasetOptions) -> Listing:
    from hwnas.accuracy import arrays, image_folder

    built_in: dict[str, Callable[[DatasetOptions], Listing]] = {
        "digits": arrays.digits, "fashion_mnist": arrays.fashion_mnist, "cifar10": arrays.cifar10,
        "imagefolder": image_folder.image_folder}
    if options.name in built_in:
        return built_in[options.name](options)
    others = {entry.name: entry for entry in entry_points(group="hwnas.datasets")}
    if options.name not in others:
        raise UnknownName("data set", options.name, [*built_in, *others])
    listing = others[options.name].load()(options)
    assert isinstance(listing, Listing)
    return listing


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


def _statistics(images: Images, at_most: int = 4096) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel on 0..1, over `at_most` images evenly spread."""
    rows = np.linspace(0, len(images) - 1, min(len(images), at_most)).round().astype(int)
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        histogram = np.zeros(256)
        for start in range(0, len(rows), 256):
            histogram += np.bincount(images[rows[start:start + 256], channel].ravel(), minlength=256)
        histogram /= histogram.sum()
        mean = float(histogram @ values)
        means.append(round(mean, 6))
        stds.append(round(max(float(histogram @ (values - mean) ** 2) ** 0.5, 1 / 255), 6))
    return tuple(means), tuple(stds)


def digest_files(entries: Sequence[tuple[str, int]]) -> str:
    """Identity of files from their names and sizes in bytes."""
    return _digest(*(f"{name}:{size}" for name, size in entries))


def _digest(*values: object) -> str:
    return hashlib.sha256("\n".join(map(str, values)).encode()).hexdigest()[:12]
