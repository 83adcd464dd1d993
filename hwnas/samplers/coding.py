"""Settings of an Optuna search space as numbers: codes with one column for each parameter, and an embedding.

Distances in the embedding say how different two settings are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

Codes = NDArray[np.float64]
GRID = 32  # an integer parameter with at most so many values has a code for each
LEAST_GROUP = 3  # values are counted over a group of at least so many parameters that share them
ORDER_SHARE = 0.5  # share of the distance of two ordered values that depends on their order; the rest is constant
RANGE_STEP = 0.1  # standard deviation of a small step, as a share of the range
NEXT_CHANGE = 0.4  # probability that a mutant changes one more parameter


class Column:
    """One parameter. If it has `values`, codes are their indices; otherwise a code is a share of its range, 0 to 1."""

    def __init__(self, name: str, distribution: BaseDistribution) -> None:
        self.name, self.distribution = name, distribution
        self.values = _list_values(name, distribution)
        self.size = len(self.values or ())  # 0 for a range
        if self.values is None:
            self._range = _SearchSpaceTransform({name: distribution}, transform_step=False, transform_0_1=True)
            return
        self._code_of = {_key(value): index for index, value in enumerate(self.values)}
        self.ordered = self.size > 2 and all(_key(value)[0] == "number" for value in self.values)
        rows = np.eye(self.size) * math.sqrt(0.5 * (1 - ORDER_SHARE if self.ordered else 1))
        if self.ordered:
            self.ranks = np.argsort(np.argsort(self.values))
            passed = self.ranks[:, None] > np.arange(self.size - 1)
            rows = np.concatenate([rows, passed * math.sqrt(ORDER_SHARE / (self.size - 1))], axis=1)
        self._rows = np.concatenate([rows, np.zeros_like(rows[:1])])  # the last row is an absent parameter's

    def code(self, value: Any) -> float | None:
        """The code of a value; None if the parameter does not have the value."""
        if self.values is not None:
            return self._code_of.get(_key(value))
        distribution: Any = self.distribution
        if not isinstance(value, int | float) or not distribution.low <= value <= distribution.high:
            return None
        return float(self._range.transform({self.name: value})[0])

    def value(self, code: float) -> Any:
        """The value of a code, of the type that Optuna gives."""
        return self._range.untransform(np.array([code]))[self.name] if self.values is None else self.values[int(code)]

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n] as [n, width]; an absent parameter gives zeros.

        Unlike values have a squared distance of 1; near values of an ordered parameter have less.
        """
        if self.values is None:
            return np.nan_to_num(2.0 * codes)[:, None]
        return np.asarray(self._rows[np.where(np.isnan(codes), self.size, codes).astype(int)])

    def draw(self, rng: np.random.Generator, n: int) -> Codes:
        """Random codes."""
        return self._snap(rng.random(n)) if self.values is None else rng.integers(0, self.size, n).astype(float)

    def step(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change each code. Half of the time ordered values become neighbours; otherwise any other value is drawn."""
        n = len(codes)
        if self.values is None:
            near = np.clip(np.nan_to_num(codes, nan=0.5) + rng.normal(0, RANGE_STEP, n), 0, 1)
            return self._snap(np.where(rng.random(n) < 0.5, near, rng.random(n)))
        if self.size < 2:
            return np.zeros(n)
        index = np.nan_to_num(codes).astype(int)
        moved = (index + rng.integers(1, self.size, n)) % self.size
        if self.ordered:
            rank = self.ranks[index] + rng.choice([-1, 1], n)
            rank = np.where(rank < 0, 1, np.where(rank >= self.size, self.size - 2, rank))  # an end has one neighbour
            moved = np.where(rng.random(n) < 0.5, np.argsort(self.ranks)[rank], moved)
        return moved.astype(float)

    def _snap(self, codes: Codes) -> Codes:
        """Replace each code by that of its value: many shares of a range stand for the same whole number or step."""
        distribution: Any = self.distribution
        if distribution.step is None:
            return codes
        return np.array([self.code(self.value(code)) for code in codes], float)


class Coding:
    """All parameters of a search space, in its order."""

    def __init__(self, search_space: Mapping[str, BaseDistribution]) -> None:
        self.columns = [Column(name, distribution) for name, distribution in search_space.items()]
        widths = [column.embed(np.zeros(1)).shape[1] for column in self.columns]
        self.owner = np.repeat(np.arange(len(widths)), widths)  # [embedding columns] -> parameter
        groups: dict[Any, list[int]] = {}
        for index, column in enumerate(self.columns):
            if column.size > 1:
                groups.setdefault(tuple(map(_key, column.values or ())), []).append(index)
        self._groups = [group for group in groups.values() if len(group) >= LEAST_GROUP]

    def encode(self, params: Mapping[str, Any]) -> Codes | None:
        """Codes [p]: NaN for an absent parameter; None when a value is not of this search space."""
        row = [column.code(params[column.name]) if column.name in params else math.nan for column in self.columns]
        return None if None in row else np.array(row, float)

    def decode(self, row: Codes) -> dict[str, Any]:
        """Parameters of one row; absent ones are left out."""
        return {column.name: column.value(code) for column, code in zip(self.columns, row.tolist(), strict=True)
                if not math.isnan(code)}

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n, p] as [n, len(owner)]."""
        return np.concatenate([column.embed(codes[:, index]) for index, column in enumerate(self.columns)], axis=1)

    def counts(self, codes: Codes) -> NDArray[np.float64]:
        """How often each value occurs in a group of parameters with the same values [n, c]: kernels of stages, say."""
        counts = [(codes[:, group] == value).sum(axis=1) for group in self._groups
                  for value in range(self.columns[group[0]].size)]
        return np.stack(counts, axis=1).astype(float) if counts else np.zeros((len(codes), 0))

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """Uniform rows [n, p]."""
        return np.stack([column.draw(rng, n) for column in self.columns], axis=1)

    def mutate(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change one parameter of each row. Each further one follows with probability NEXT_CHANGE."""
        mutants = codes.copy()
        free = np.flatnonzero([column.size != 1 for column in self.columns])
        open_rows = np.arange(len(codes) if len(free) else 0)
        while len(open_rows):
            chosen = free[rng.integers(0, len(free), len(open_rows))]
            for index in np.unique(chosen):
                rows = open_rows[chosen == index]
                mutants[rows, index] = self.columns[index].step(mutants[rows, index], rng)
            open_rows = open_rows[rng.random(len(open_rows)) < NEXT_CHANGE]
        return mutants


class Settings(Sequence[dict[str, Any]]):
    """Rows of codes that can be read as parameter dictionaries. Vectorised functions use `codes` [n, p].

    The code of a categorical parameter is the index of its value, and so is that of an integer one with at most GRID
    values. Any other code is a share of the parameter's range.
    """

    def __init__(self, coding: Coding, codes: Codes) -> None:
        self.coding, self.codes = coding, codes

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Settings(self.coding, self.codes[index])
        return self.coding.decode(self.codes[index])


def _key(value: Any) -> tuple[str, Any]:
    """A key that is equal only for values that are the same choice: True is not 1, but 1.0 is 1."""
    return (type(value).__name__ if isinstance(value, bool | str) or value is None else "number", value)


def _list_values(name: str, distribution: BaseDistribution) -> tuple[Any, ...] | None:
    """The values of a parameter with few of them; None for a range. ValueError names a parameter without a model."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if isinstance(distribution, IntDistribution):
        values = range(distribution.low, distribution.high + 1, distribution.step)
        return tuple(values) if len(values) == 1 or (len(values) <= GRID and not distribution.log) else None
    if isinstance(distribution, FloatDistribution):
        return (float(distribution.low),) if distribution.low == distribution.high else None
    raise ValueError(f"parameter {name}: {type(distribution).__name__} cannot be modelled. Use a categorical, integer "
                     "or float distribution.")
