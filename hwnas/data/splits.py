"""The options of a data set, and which image trains, validates and tests: three disjoint sets, stratified, seeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.options import Config, option, read_options
from hwnas.errors import ConfigError, DataError

Labels = NDArray[np.int64]
Selection = list[tuple[str, NDArray[np.int64]]]
LEAST = {"train": 2, "validation": 1, "test": 1}


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """How a data set is found and split; data sets registered from outside get `options`.

    `validation_fraction` is a share of the training images, or of all images where nothing is held out yet; so is
    `test_fraction`. `image_size` overrides the search space's; `channels` 1 or 3 overrides what the files hold.
    """

    name: str = option(help="of conf/dataset, or of a package that offers one")
    root: Path | None = option(None, what="a folder", help="the folder (null: the data folder of hwnas)")
    image_size: int | None = option(None, low=8, high=1024, help="px (null: the search space's)")
    channels: int | None = option(None, choices=(1, 3), help="null: as the files are")
    skip_unreadable: bool = option(False, help="leave unreadable and too large images out and count them")
    validation_fraction: float = option(0.15, above=0, below=0.8, help="of the training part, or of all images")
    test_fraction: float = option(0.2, above=0, below=0.8, help="of all images, where no test part is given")
    flip: bool = option(False, help="whether a mirrored image is still one of its class")
    download: bool = option(False, help="fetch it where it is missing")
    max_pixels: int = option(50_000_000, low=64, high=178_956_970,
                             help="width times height of an image at most; known before it is decoded")
    options: Mapping[str, Any] = option({}, help="handed on to a data set of another package")

    @classmethod
    def from_config(cls, config: Config) -> DatasetOptions:
        """Read and check `conf/dataset/*.yaml`; ConfigError names key, rule and value."""
        options = read_options(cls, config, "dataset")
        if options.validation_fraction + options.test_fraction > 0.8:
            raise ConfigError("dataset.validation_fraction and dataset.test_fraction must leave at least 0.2 of the "
                              f"images to train on, got {options.validation_fraction} and {options.test_fraction}.")
        return options


def split(parts: Mapping[str, Labels], class_names: Sequence[str], options: DatasetOptions, seed: int,
          where: str) -> dict[str, tuple[str, NDArray[np.int64]]]:
    """Choose rows for `train`, `validation` and `test`: {set: (part, rows of that part, ascending)}.

    `parts` holds the labels of `train` and, where the data set has them, of `val` and `test`. Without `test`, `val`
    is the test set; whatever is missing then is a seeded stratified part of `train`. DataError when a class has too
    few images.
    """
    taken = {name: (name, np.arange(len(labels))) for name, labels in parts.items()}
    if "test" not in taken and "val" in taken:
        taken["test"] = taken.pop("val")
    if "val" in taken:
        taken["validation"] = taken.pop("val")
    wanted = {}
    if "test" not in taken:
        wanted["test"] = options.test_fraction
    if "validation" not in taken:
        wanted["validation"] = options.validation_fraction
    if wanted:
        check_counts(parts["train"], class_names, 2 + len(wanted), f"{where}: to be split, a class needs")
        taken |= {name: ("train", rows) for name, rows in _carve(parts["train"], wanted, seed).items()}
    for name, (part, rows) in taken.items():
        check_counts(parts[part][rows], class_names, LEAST[name], f"{where}: in the {name} set a class needs")
    return taken


def _carve(labels: Labels, fractions: Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Rows of `labels` for each of `fractions` (at least one per class) and the rest for `train`."""
    rng = np.random.default_rng([seed, 0x5EED])
    parts: dict[str, list[NDArray[np.int64]]] = {name: [] for name in ("train", *fractions)}
    for label in range(int(labels.max()) + 1):
        rows = rng.permutation(np.flatnonzero(labels == label))
        start = 0
        for name, fraction in fractions.items():
            end = start + max(1, round(fraction * len(rows)))
            parts[name].append(rows[start:end])
            start = end
        parts["train"].append(rows[start:])
    return {name: np.sort(np.concatenate(rows)) for name, rows in parts.items()}


def subset(labels: Labels, size: int, seed: int) -> NDArray[np.int64]:
    """Rows of a stratified subset of about `size` (ascending, at least one a class); all rows when there are fewer."""
    if size >= len(labels):
        return np.arange(len(labels))
    return _carve(labels, {"chosen": size / len(labels)}, seed)["chosen"]


def check_counts(labels: Labels, class_names: Sequence[str], least: int, rule: str) -> None:
    """DataError unless every class has `least` images; names the class that has fewest."""
    counts = np.bincount(labels, minlength=len(class_names))
    worst = int(counts.argmin())
    if counts[worst] < least:
        raise DataError(f"{rule} at least {least} image{'s' if least > 1 else ''}; {class_names[worst]!r} has "
                        f"{counts[worst]}. Add images of that class or remove it.")


def count(labels: Labels, class_names: Sequence[str]) -> dict[str, Any]:
    """Images of each class, for reports."""
    counts = np.bincount(labels, minlength=len(class_names))
    return {name: int(n) for name, n in zip(class_names, counts, strict=True)}
