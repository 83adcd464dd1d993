"""Settings of an Optuna search space as numbers: codes with one column for each parameter, and an embedding.

Distances in the embedding say how different two settings are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

Codes = NDArray[np.int64]
GRID = 32  # values of a parameter that has more of them, or a continuous range
LEAST_GROUP = 3  # values are counted over a group of at least so many parameters that share them
ORDER_SHARE = 0.5  # share of the distance of two ordered values that depends on their order; the rest is constant
NEXT_CHANGE = 0.4  # probability that a mutant changes one more parameter


class Column:
    """One parameter with its `values`; a code is the index of one. A long range has GRID values from end to end."""

    def __init__(self, name: str, distribution: BaseDistribution) -> None:
        self.name, self.distribution = name, distribution
        self.values = _list_values(name, distribution)
        self.size = len(self.values)
        self._code_of = {_key(value): index for index, value in enumerate(self.values)}
        self.ordered = self.size > 2 and all(_key(value)[0] == "number" for value in self.values)
        self._rows = np.eye(self.size) * math.sqrt(0.5 * (1 - ORDER_SHARE if self.ordered else 1))
        if self.ordered:
            self.ranks = np.argsort(np.argsort(self.values))
            passed = self.ranks[:, None] > np.arange(self.size - 1)
            self._rows = np.concatenate([self._rows, passed * math.sqrt(ORDER_SHARE / (self.size - 1))], axis=1)

    def code(self, value: Any) -> int | None:
        """The code of a value, in a range that of the nearest one; None if the parameter does not have the value."""
        distribution: Any = self.distribution
        if isinstance(distribution, CategoricalDistribution) or _key(value) in self._code_of:
            return self._code_of.get(_key(value))
        if not isinstance(value, int | float) or not distribution.low <= value <= distribution.high:
            return None
        return int(np.argmin(np.abs(np.array(self.values) - value)))

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n] as [n, width].

        Unlike values have a squared distance of 1; near values of an ordered parameter have less.
        """
        return np.asarray(self._rows[codes])

    def step(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change each code. Half of the time ordered values become neighbours; otherwise any other value is drawn."""
        n = len(codes)
        moved = (codes + rng.integers(1, self.size, n)) % self.size
        if self.ordered:
            rank = self.ranks[codes] + rng.choice([-1, 1], n)
            rank = np.where(rank < 0, 1, np.where(rank >= self.size, self.size - 2, rank))  # an end has one neighbour
            moved = np.where(rng.random(n) < 0.5, np.argsort(self.ranks)[rank], moved)
        return moved


class Coding:
    """All parameters of a search space, in its order."""

    def __init__(self, search_space: Mapping[str, BaseDistribution]) -> None:
        self.columns = [Column(name, distribution) for name, distribution in search_space.items()]
        widths = [column.embed(np.zeros(1, int)).shape[1] for column in self.columns]
        self.owner = np.repeat(np.arange(len(widths)), widths)  # [embedding columns] -> parameter
        groups: dict[Any, list[int]] = {}
        for index, column in enumerate(self.columns):
            if column.size > 1:
                groups.setdefault(tuple(map(_key, column.values)), []).append(index)
        self._groups = [group for group in groups.values() if len(group) >= LEAST_GROUP]

    def encode(self, params: Mapping[str, Any]) -> list[int] | None:
        """One code for each parameter; None when one is missing or has a value that is not of this search space."""
        row = [column.code(params[column.name]) if column.name in params else None for column in self.columns]
        codes = [code for code in row if code is not None]
        return codes if len(codes) == len(row) else None

    def decode(self, row: Codes) -> dict[str, Any]:
        """Parameters of one row."""
        return {column.name: column.values[code] for column, code in zip(self.columns, row.tolist(), strict=True)}

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n, p] as [n, len(owner)]."""
        return np.concatenate([column.embed(codes[:, index]) for index, column in enumerate(self.columns)], axis=1)

    def counts(self, codes: Codes) -> NDArray[np.float64]:
        """Count each value in a group of parameters with the same values [n, c]: kernels of stages, say."""
        counts = [(codes[:, group] == value).sum(axis=1) for group in self._groups
                  for value in range(self.columns[group[0]].size)]
        return np.stack(counts, axis=1).astype(float) if counts else np.zeros((len(codes), 0))

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """Uniform rows [n, p]."""
        return np.stack([rng.integers(0, column.size, n) for column in self.columns], axis=1)

    def mutate(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change one parameter of each row. Each further one follows with probability NEXT_CHANGE."""
        mutants = codes.copy()
        free = np.flatnonzero([column.size > 1 for column in self.columns])
        open_rows = np.arange(len(codes) if len(free) else 0)
        while len(open_rows):
            chosen = free[rng.integers(0, len(free), len(open_rows))]
            for index in np.unique(chosen):
                rows = open_rows[chosen == index]
                mutants[rows, index] = self.columns[index].step(mutants[rows, index], rng)
            open_rows = open_rows[rng.random(len(open_rows)) < NEXT_CHANGE]
        return mutants


def _key(value: Any) -> tuple[str, Any]:
    """A key that is equal only for values that are the same choice: True is not 1, but 1.0 is 1."""
    return (type(value).__name__ if isinstance(value, bool | str) or value is None else "number", value)


def _list_values(name: str, distribution: BaseDistribution) -> tuple[Any, ...]:
    """The values that a parameter may be asked for; ValueError names a parameter without a model."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if not isinstance(distribution, IntDistribution | FloatDistribution):
        raise ValueError(f"parameter {name}: {type(distribution).__name__} cannot be modelled. Use a categorical, "
                         "integer or float distribution.")
    if isinstance(distribution, IntDistribution):
        whole = range(distribution.low, distribution.high + 1, distribution.step)
        if len(whole) <= GRID:
            return tuple(whole)
    # Optuna's own transform knows steps and logarithms. Several places of the grid may be one value.
    places = _SearchSpaceTransform({name: distribution}, transform_step=False, transform_0_1=True)
    return tuple(dict.fromkeys(places.untransform(np.array([share]))[name] for share in np.linspace(0, 1, GRID)))
