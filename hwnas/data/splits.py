"""Which image trains, which validates, which tests: three disjoint sets, stratified and seeded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.options import DatasetOptions
from hwnas.errors import DataError

Labels = NDArray[np.int64]
Selection = list[tuple[str, NDArray[np.int64]]]
LEAST = {"train": 2, "validation": 1, "test": 1}


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
