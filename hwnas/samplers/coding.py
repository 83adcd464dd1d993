"""Settings of an Optuna search space as numbers: codes with one column for each parameter, and an embedding.

Distances in the embedding say how different two settings are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

Codes = NDArray[np.float64]
GRID = 32  # a numerical parameter with at most so many values has a code for each
KIN = 3  # values are counted over a group of at least so many parameters that share them
_ORDER = 0.5  # share of the distance of two ordered values that depends on their order; the rest is constant


class Column:
    """One parameter. If it has `values`, codes are their indices; otherwise a code is a share of its range, 0 to 1."""

    def __init__(self, name: str, distribution: BaseDistribution) -> None:
        self.name, self.distribution = name, distribution
        self.values = _grid(name, distribution)
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values or ())
        self.ordered = self.values is not None and numbers and len(self.values) > 2
        if self.ordered and isinstance(distribution, CategoricalDistribution):
            self.ranks = np.argsort(np.argsort(np.array(self.values, float)))
        elif self.values is not None:
            self.ranks = np.arange(len(self.values))
        self._index = {_key(value): index for index, value in enumerate(self.values or ())}

    @property
    def size(self) -> int:
        """The number of values; 0 for a range."""
        return 0 if self.values is None else len(self.values)

    def code(self, value: Any) -> float | None:
        """The code of a value; None if the parameter does not have the value."""
        if self.values is not None:
            return self._index.get(_key(value))
        share = self._share(float(value)) if isinstance(value, int | float) else math.nan
        return share if -1e-9 <= share <= 1 + 1e-9 else None

    def value(self, code: float) -> Any:
        """The value of a code, of the type that Optuna gives."""
        if self.values is not None:
            return self.values[int(code)]
        distribution: Any = self.distribution
        low, high = float(distribution.low), float(distribution.high)
        if distribution.log:
            value = math.exp(math.log(low) + code * (math.log(high) - math.log(low)))
        else:
            value = low + code * (high - low)
        if distribution.step:
            value = low + round((value - low) / distribution.step) * distribution.step
        value = min(max(value, low), high)
        return round(value) if isinstance(distribution, IntDistribution) else value

    def _share(self, value: float) -> float:
        distribution: Any = self.distribution
        if distribution.log:
            whole = math.log(distribution.high / distribution.low)
            return math.log(value / distribution.low) / whole if value > 0 else math.nan
        return float((value - distribution.low) / (distribution.high - distribution.low))

    def snap(self, codes: Codes) -> Codes:
        """Replace each code by that of its value: in a range, many shares stand for the same whole number or step."""
        distribution: Any = self.distribution
        if self.values is not None or not distribution.step:
            return codes
        return np.array([code if math.isnan(code) else self._share(float(self.value(code))) for code in codes.tolist()])

    @property
    def width(self) -> int:
        """Columns of its embedding."""
        return 1 if self.values is None else self.size + (self.size - 1 if self.ordered else 0)

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n] as [n, width]; an absent parameter gives zeros.

        Unlike values have a squared distance of 1; near values of an ordered parameter have less.
        """
        if self.values is None:
            return np.nan_to_num(2.0 * codes)[:, None]
        absent = np.isnan(codes)
        index = np.where(absent, 0, codes).astype(int)
        parts = [np.eye(self.size)[index] * math.sqrt(0.5 * (1 - _ORDER if self.ordered else 1))]
        if self.ordered:
            bits = self.ranks[index][:, None] > np.arange(self.size - 1)
            parts.append(bits * math.sqrt(_ORDER / (self.size - 1)))
        rows = np.concatenate(parts, axis=1)
        rows[absent] = 0.0
        return rows

    def draw(self, rng: np.random.Generator, n: int) -> Codes:
        """Random codes."""
        return rng.random(n) if self.values is None else rng.integers(0, self.size, n).astype(float)

    def step(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change each code. Half of the time ordered values become neighbours; otherwise any other value is drawn."""
        n = len(codes)
        if self.values is None:
            near = np.clip(np.nan_to_num(codes, nan=0.5) + rng.normal(0, 0.1, n), 0, 1)
            return np.where(rng.random(n) < 0.5, near, rng.random(n))
        if self.size < 2:
            return np.zeros(n)
        index = np.nan_to_num(codes).astype(int)
        moved = (index + rng.integers(1, self.size, n)) % self.size
        if self.ordered:
            at = np.argsort(self.ranks)
            rank = self.ranks[index] + rng.choice([-1, 1], n)
            rank = np.where(rank < 0, 1, np.where(rank >= self.size, self.size - 2, rank))
            moved = np.where(rng.random(n) < 0.5, at[rank], moved)
        return moved.astype(float)


class Coding:
    """All parameters of a search space, in the order of their names."""

    def __init__(self, search_space: Mapping[str, BaseDistribution]) -> None:
        self.columns = [Column(name, search_space[name]) for name in search_space]
        widths = [column.width for column in self.columns]
        self.owner = np.repeat(np.arange(len(widths)), widths)  # [embedding columns] -> parameter
        self._kin = _kin(self.columns)

    def encode(self, params: Mapping[str, Any]) -> Codes | None:
        """Codes [p]: NaN for an absent parameter; None when a value is not of this search space."""
        row = np.full(len(self.columns), np.nan)
        for index, column in enumerate(self.columns):
            if column.name in params:
                code = column.code(params[column.name])
                if code is None:
                    return None
                row[index] = code
        return row

    def decode(self, row: Codes) -> dict[str, Any]:
        """Parameters of one row; absent ones are left out."""
        return {column.name: column.value(code) for column, code in zip(self.columns, row.tolist(), strict=True)
                if not math.isnan(code)}

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n, p] as [n, len(owner)]."""
        return np.concatenate([column.embed(codes[:, index]) for index, column in enumerate(self.columns)], axis=1)

    def counts(self, codes: Codes) -> NDArray[np.float64]:
        """How often each value occurs in a group of parameters with the same values [n, c]: kernels of stages, say."""
        counts = [(codes[:, list(kin)] == value).sum(axis=1) for kin in self._kin
                  for value in range(self.columns[kin[0]].size)]
        return np.stack(counts, axis=1).astype(float) if counts else np.zeros((len(codes), 0))

    def snap(self, codes: Codes) -> Codes:
        """Replace the codes of every column by those of their values."""
        ranges = [index for index, column in enumerate(self.columns) if column.values is None]
        if not ranges:
            return codes
        codes = codes.copy()
        for index in ranges:
            codes[:, index] = self.columns[index].snap(codes[:, index])
        return codes

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """Uniform rows [n, p]."""
        return np.stack([column.draw(rng, n) for column in self.columns], axis=1)

    def mutate(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change one parameter of each row. Each further one follows with probability 0.4."""
        mutants, n = codes.copy(), len(codes)
        free = np.flatnonzero([column.size != 1 for column in self.columns])
        if not len(free):
            return mutants
        open_rows = np.arange(n)
        while len(open_rows):
            chosen = free[rng.integers(0, len(free), len(open_rows))]
            for index in np.unique(chosen):
                rows = open_rows[chosen == index]
                mutants[rows, index] = self.columns[index].step(mutants[rows, index], rng)
            open_rows = open_rows[rng.random(len(open_rows)) < 0.4]
        return mutants


class Settings(Sequence[dict[str, Any]]):
    """Rows of codes that can be read as parameter dictionaries. Vectorised functions use `codes` [n, p].

    The code of a categorical parameter is the index of its value, and so is that of a numerical one with at most GRID
    values. Any other code is a share of the parameter's range.
    """

    def __init__(self, coding: Coding, codes: Codes) -> None:
        self.coding, self.codes = coding, codes

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Settings: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | Settings:
        if isinstance(index, slice):
            return Settings(self.coding, self.codes[index])
        return self.coding.decode(self.codes[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.coding.decode(row) for row in self.codes)


def _kin(columns: Sequence[Column]) -> list[tuple[int, ...]]:
    """Groups of at least KIN parameters with the same values."""
    groups: dict[Any, list[int]] = {}
    for index, column in enumerate(columns):
        if column.size > 1:
            groups.setdefault(tuple(map(_key, column.values or ())), []).append(index)
    return [tuple(group) for group in groups.values() if len(group) >= KIN]


def _key(value: Any) -> tuple[str, Any]:
    """A key that is equal only for values that are the same choice: True is not 1, but 1.0 is 1."""
    return (type(value).__name__ if isinstance(value, bool | str) or value is None else "number", value)


def _grid(name: str, distribution: BaseDistribution) -> tuple[Any, ...] | None:
    """The values of a parameter with few of them; None for a range. ValueError names a parameter without a model."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if isinstance(distribution, IntDistribution):
        count = (distribution.high - distribution.low) // distribution.step + 1
        few = (count <= GRID and not distribution.log) or count == 1
        return tuple(distribution.low + i * distribution.step for i in range(count)) if few else None
    if isinstance(distribution, FloatDistribution):
        if distribution.low == distribution.high:
            return (float(distribution.low),)
        return None
    raise ValueError(f"parameter {name}: {type(distribution).__name__} cannot be modelled. Use a categorical, integer "
                     "or float distribution.")
