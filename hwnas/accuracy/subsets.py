"""Subsets: the fixed stratified images that short trainings learn from and are scored on."""

from __future__ import annotations

from hwnas.accuracy.dataset import Dataset, Split, resize
from hwnas.accuracy.splits import subset
from hwnas.architecture import Architecture


class Subsets:
    """`train_images` and `validation_images` (0: all) of `dataset`, the same for every network."""

    def __init__(self, dataset: Dataset, train_images: int, validation_images: int) -> None:
        self.dataset = dataset
        self.train, self.validation = _part(dataset.train, train_images), _part(dataset.validation, validation_images)
        self._sized: dict[int, tuple[Split, Split]] = {}

    def at(self, image_size: int) -> tuple[Split, Split]:
        """Training and validation images at `image_size`, resized once."""
        if image_size not in self._sized:
            self._sized[image_size] = (Split(resize(self.train.images, image_size), self.train.labels),
                                       Split(resize(self.validation.images, image_size), self.validation.labels))
        return self._sized[image_size]

    def check(self, architecture: Architecture) -> None:
        """ValueError, a mistake of the program, unless channels and classes are those of the data."""
        classes = len(self.dataset.class_names)
        if (architecture.channels, architecture.classes) != (self.dataset.channels, classes):
            raise ValueError(f"architecture of {architecture.channels} channels, {architecture.classes} classes, data "
                             f"of {self.dataset.channels} channels, {classes} classes")


def _part(split: Split, size: int) -> Split:
    """A fixed stratified subset in memory; the whole split as it is when there is no more."""
    return split if not size or size >= len(split) else split.take(subset(split.labels, size, 0))
