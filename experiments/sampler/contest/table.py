"""A contest's table: every architecture of a finite space with its accuracy and latency, equal ones collapsed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution

from experiments.common import hypervolume_2d
from experiments.sampler.contest.options import Options
from experiments.sampler.contest.reading import Value, digits, numbers, read_columns, settings
from hwnas.errors import DataError

LEAST_MS = 0.05  # a latency below is none
REFERENCE = (0.25, 0.90)  # quantiles of accuracy and latency that hypervolume is counted from


@dataclass(frozen=True)
class Table:
    """Parameter rows `codes` [n, p] (indices into `choices`), the network `entry` [n] that each is; and of networks
    accuracy [m] and latency [m]. `features` [n, f] of parameter rows. `notes`: what was left out and collapsed.
    """

    choices: Mapping[str, tuple[Value, ...]]
    codes: np.ndarray
    entry: np.ndarray
    accuracy: np.ndarray
    latency_ms: np.ndarray
    features: np.ndarray
    fingerprint: str
    notes: tuple[str, ...]

    @classmethod
    def load(cls, options: Options) -> Table:
        """DataError, UnknownName when no contest can be held on it."""
        path = options.table
        columns = read_columns(path, options.columns)
        parameters = (digits(path, options.arch_digits, columns[options.arch_digits]) if options.arch_digits else
                      {name: settings(path, name, columns[name]) for name in options.parameters})
        figures = {name: numbers(path, name, columns[name])
                   for name in (options.accuracy, options.latency, *options.features)}
        groups = [str(value) for value in columns[options.duplicates_by]] if options.duplicates_by else None
        usable, notes = _usable(figures, options.latency, columns.get(options.duplicates_by))
        if not usable.any():
            raise DataError(f"{path}: no row is left ({'; '.join(notes)}).")
        choices = {name: _ordered(values, usable) for name, values in parameters.items()}
        codes = np.column_stack([_indices(parameters[name], choices[name], usable) for name in parameters])
        figures = {name: values[usable] for name, values in figures.items()}
        if groups is not None:
            groups = [group for group, kept in zip(groups, usable, strict=True) if kept]
        rows, row_of = _distinct(codes)
        entry_of = row_of if groups is None else np.unique(groups, return_inverse=True)[1]
        accuracy, latency = figures[options.accuracy], figures[options.latency]
        notes += _contradictions(path, row_of, entry_of, accuracy, latency, groups is not None)
        entry = np.zeros(len(rows), int)
        entry[row_of] = entry_of
        features = [_by_group(figures[name], row_of, np.mean) for name in options.features]
        found = cls(choices, rows, entry, _by_group(accuracy, entry_of, np.mean),
                    _by_group(latency, entry_of, np.median), np.array(features).T.reshape(len(rows), -1),
                    hashlib.sha256(path.read_bytes()).hexdigest()[:16], tuple(notes))
        found._check(path)
        return found

    def _check(self, path: Path) -> None:
        if len(self.accuracy) < 2:
            raise DataError(f"{path}: a single distinct row; a contest needs a space to search.")
        if not self.hypervolume > 0:
            raise DataError(f"{path}: no row is better than the reference point (accuracy {self.reference[0]:.4g}, "
                            f"{2 ** self.reference[1]:.4g} ms): accuracies or latencies are all alike.")

    @property
    def combinations(self) -> int:
        """Of all parameters' values, in the table or not."""
        return math.prod(len(values) for values in self.choices.values())

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The search space as Optuna knows it."""
        return {name: CategoricalDistribution(values) for name, values in self.choices.items()}

    def row_of(self, params: Mapping[str, Any]) -> int | None:
        """The parameter row with these values; None when the table has none."""
        return self._rows.get(tuple(params[name] for name in self.choices))

    def params(self, row: int) -> dict[str, Value]:
        """Values of a parameter row."""
        return {name: values[code] for (name, values), code in zip(self.choices.items(), self.codes[row], strict=True)}

    def known_latency(self, codes: np.ndarray) -> np.ndarray:
        """Latencies [n, 1], ms: of settings that the table lacks, the table's median."""
        rows = self._rows_at(codes)
        return np.where(rows < 0, float(np.median(self.latency_ms)), self.latency_ms[self.entry[rows]])[:, None]

    def known_features(self, codes: np.ndarray) -> np.ndarray:
        """Features [n, f]: of settings that the table lacks, the table's medians."""
        rows = self._rows_at(codes)
        return np.where(rows[:, None] < 0, np.median(self.features, axis=0), self.features[rows])

    def canonical(self, codes: np.ndarray) -> np.ndarray:
        """Each setting's codes [n, p], of those that are one network the first one's."""
        rows = self._rows_at(codes)
        return np.where(rows[:, None] < 0, codes, self.codes[self._first[self.entry[rows]]])

    @cached_property
    def _first(self) -> np.ndarray:
        """The first parameter row of each network."""
        return np.unique(self.entry, return_index=True)[1]

    def _rows_at(self, codes: np.ndarray) -> np.ndarray:
        """Parameter rows [n], -1 for settings that the table lacks: a setting's codes are the table's."""
        keys = np.ascontiguousarray(codes.astype(self.codes.dtype)).view(f"V{self.codes[0].nbytes}").ravel()
        return np.array([self._by_bytes.get(key, -1) for key in keys.tolist()], int)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {row.tobytes(): index for index, row in enumerate(np.ascontiguousarray(self.codes))}

    @cached_property
    def reference(self) -> tuple[float, float]:
        """Accuracy and log2 of latency that hypervolume is counted from."""
        low, far = REFERENCE
        return float(np.quantile(self.accuracy, low)), float(np.log2(np.quantile(self.latency_ms, far)))

    @cached_property
    def wide_reference(self) -> tuple[float, float]:
        """One behind which no network lies: the worst accuracy, log2 of the largest latency."""
        return float(self.accuracy.min()), float(np.log2(self.latency_ms.max()))

    @cached_property
    def hypervolume(self) -> float:
        """Of all networks, on accuracy and log2 of latency."""
        return self.hypervolume_of(self.reference)

    def hypervolume_of(self, reference: tuple[float, float]) -> float:
        """Of all networks, counted from another reference point."""
        return hypervolume_2d(self.accuracy, np.log2(self.latency_ms), reference)

    @cached_property
    def _rows(self) -> dict[tuple[Value, ...], int]:
        return {tuple(self.params(row).values()): row for row in range(len(self.codes))}


def _usable(figures: Mapping[str, np.ndarray], latency: str, groups: Sequence[Any] | None
            ) -> tuple[np.ndarray, list[str]]:
    """Mask of the rows that a contest can be held on, and what is wrong with the others."""
    known = np.all([np.isfinite(values) for values in figures.values()], axis=0)
    if groups is not None:
        known &= np.array([value not in (None, "") and value == value for value in groups])
    quick = known & (figures[latency] < LEAST_MS)
    notes = [f"{count} rows left out: {reason}" for count, reason in
             ((int((~known).sum()), "NaN"), (int(quick.sum()), f"latency below {LEAST_MS} ms")) if count]
    return known & ~quick, notes


def _ordered(values: Sequence[Value], usable: np.ndarray) -> tuple[Value, ...]:
    """The different values in their order; numbers before text, None last."""
    return tuple(sorted({value for value, kept in zip(values, usable, strict=True) if kept}, key=lambda value: (
        value is None, isinstance(value, str), value if not isinstance(value, str | None) else 0, str(value))))


def _indices(values: Sequence[Value], choices: Sequence[Value], usable: np.ndarray) -> np.ndarray:
    index = {value: at for at, value in enumerate(choices)}
    return np.array([index[value] for value, kept in zip(values, usable, strict=True) if kept])


def _distinct(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, row_of = np.unique(codes, axis=0, return_inverse=True)
    return rows, row_of.reshape(-1)


def _by_group(values: np.ndarray, group: np.ndarray, of: Any) -> np.ndarray:
    """`of` the values of each group [groups]."""
    order = np.argsort(group, kind="stable")
    parts = np.split(values[order], np.flatnonzero(np.diff(group[order])) + 1)
    return np.array([of(part) for part in parts])


def _contradictions(path: Path, row_of: np.ndarray, entry_of: np.ndarray, accuracy: np.ndarray, latency: np.ndarray,
                    named: bool) -> list[str]:
    """Notes on what was collapsed; DataError for parameters that stand for two networks."""
    pairs = np.unique(np.column_stack([row_of, entry_of]), axis=0)
    if len(pairs) > len(np.unique(row_of)):
        raise DataError(f"{path}: {len(pairs) - len(np.unique(row_of))} parameter rows belong to several values of "
                        "duplicates_by. Name all parameters, or another column.")
    notes = []
    networks = len(np.unique(entry_of))
    if networks < len(row_of):
        notes.append(f"{len(row_of)} rows collapsed to {networks} networks: mean accuracy, median latency")
    differs = (_by_group(accuracy, row_of, np.ptp) > 0) | (_by_group(latency, row_of, np.ptp) > 0)
    if differs.any() and not named:
        notes.append(f"{int(differs.sum())} of {len(differs)} parameter rows are there more than once with different "
                     "values")
    return notes
