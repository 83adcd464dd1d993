"""NAS-Bench-Macro: its rows, and the network of the shipped space that each of them is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.common import read_cells
from hwnas.errors import DataError
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace

SPACE, CHANNELS, CLASSES = "nas_bench_macro", 3, 10  # trained on CIFAR-10
ARCH, ACCURACY, SPREAD = "arch", "accuracy_cifar10", "accuracy_std"
COLUMNS = (ARCH, ACCURACY, SPREAD, "params", "flops")


@dataclass(frozen=True)
class Benchmark:
    """Rows of the file as text; their codes [n, 8], one a digit; `network_of` [n] is each row's place in `networks`.

    Identities that change nothing may stand anywhere in a stage: several rows are one network. `accuracy` [m] and
    `codes_of` [m, 8] are of networks; accuracy in per cent, the mean where rows of one network differ.
    """

    path: Path
    sha256: str
    rows: Sequence[Mapping[str, str]]
    codes_of: np.ndarray
    network_of: np.ndarray
    networks: Sequence[Architecture]
    accuracy: np.ndarray

    @classmethod
    def load(cls, path: Path, space: SearchSpace) -> Benchmark:
        """DataError, UnknownName when the file is no table of this space's networks."""
        rows = _read(path)
        codes, network_of = np.unique(space.canonical_codes(_codes(path, rows, space)), axis=0, return_inverse=True)
        network_of = network_of.reshape(-1)
        networks = [space.decode(space.to_params(row)) for row in codes]
        _check(path, rows, [networks[index] for index in network_of])
        accuracy = np.bincount(network_of, _accuracies(path, rows)) / np.bincount(network_of)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        return cls(path, sha256, rows, codes, network_of, networks, accuracy)


def _read(path: Path) -> list[dict[str, str]]:
    cells = read_cells(path, COLUMNS, "Give benchmark=FILE.csv of NAS-Bench-Macro.")
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    if not rows:
        raise DataError(f"{path}: no rows. Give benchmark=FILE.csv of NAS-Bench-Macro.")
    return rows


def _codes(path: Path, rows: Sequence[Mapping[str, str]], space: SearchSpace) -> np.ndarray:
    """The digit of a layer is the index of its operation [n, 8]."""
    sizes = [len(parameter.choices) for parameter in space.parameters]
    for number, row in enumerate(rows, 2):
        text = row[ARCH]
        if len(text) != len(sizes) or not all(digit in "012"[:size] for digit, size in zip(text, sizes, strict=True)):
            raise DataError(f"{path}, row {number}: {ARCH} is {text!r}, not {len(sizes)} digits from 0 to 2. Store it "
                            "as text, with its leading zeros.")
    return np.array([[int(digit) for digit in row[ARCH]] for row in rows])


def _accuracies(path: Path, rows: Sequence[Mapping[str, str]]) -> np.ndarray:
    for number, row in enumerate(rows, 2):
        try:
            if not 0 <= float(row[ACCURACY]) <= 100:
                raise ValueError
        except ValueError:
            raise DataError(f"{path}, row {number}: {ACCURACY} is {row[ACCURACY]!r}, no per cent. Mend the row."
                            ) from None
    return np.array([float(row[ACCURACY]) for row in rows])


def _check(path: Path, rows: Sequence[Mapping[str, str]], networks: Sequence[Architecture]) -> None:
    """Parameters and multiply-adds as published tell that digits stand for the operations that they are taken for."""
    known: dict[str, tuple[str, str]] = {}
    for number, (row, one) in enumerate(zip(rows, networks, strict=True), 2):
        counted = known.setdefault(one.id, (str(one.params), str(one.macs)))
        if counted != (row["params"], row["flops"]):
            raise DataError(f"{path}, row {number}: {row[ARCH]} has {row['params']} parameters and {row['flops']} "
                            f"FLOPs there, {counted[0]} and {counted[1]} as a network of space {SPACE}. Give the "
                            "benchmark's own file.")
