"""The domain of a search: its settings as numbers, the facts of each before it is evaluated, and its history.

A setting is a row of codes with a column for each parameter. Distances in the embedding measure how different two
settings are. A domain knows costs, features, and whether a setting is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from hwnas.errors import BudgetError, SamplerError

Codes = NDArray[np.int64]
Array = NDArray[np.float64]
ReadValue = Callable[[FrozenTrial], "tuple[float, float] | None"]
Function = Callable[[Codes], ArrayLike]
SAMPLE = 512  # number of random settings that give the known objectives' ranges
LEAST_SHARE = 1e-3  # on a log scale, no cost counts as less than this share of the sample's least cost
BEYOND = 0.02  # the reference point is this share of the sample's cost range beyond its dearest setting
ENOUGH_ALLOWED, MOST_CLIMBS = 20, 60  # allowed settings of a sample, and rounds of changes that look for them
LEAST_GROUP = 3  # values are counted over a group of at least so many parameters that share them
ORDER_SHARE = 0.5  # share of the distance of two ordered values that depends on their order; the rest is constant
NEXT_CHANGE = 0.4  # probability that a mutant changes one more parameter


class Column:
    """One parameter with its `values`. A code is the index of a value."""

    def __init__(self, name: str, distribution: BaseDistribution) -> None:
        self.name = name
        self.values = _list_values(name, distribution)
        self.size = len(self.values)
        self._code_of = {_key(value): index for index, value in enumerate(self.values)}
        self.ordered = self.size > 2 and all(_key(value)[0] == "number" for value in self.values)
        self._rows = np.eye(self.size) * math.sqrt(0.5 * (1 - ORDER_SHARE if self.ordered else 1))
        if self.ordered:
            # A thermometer code: values of neighbouring ranks differ in one column, the least and the greatest in all.
            self.ranks = np.argsort(np.argsort(self.values))
            thermometer = self.ranks[:, None] > np.arange(self.size - 1)
            self._rows = np.concatenate([self._rows, thermometer * math.sqrt(ORDER_SHARE / (self.size - 1))], axis=1)

    def code(self, value: Any) -> int | None:
        """Return the code of a value; None if the parameter does not have it."""
        return self._code_of.get(_key(value))

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n] as [n, width].

        Different values have a squared distance of 1, and near values of an ordered parameter have less.
        """
        return np.asarray(self._rows[codes])

    def step(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change each code: half of the time to a neighbour if values are ordered, otherwise to any other value."""
        n = len(codes)
        new_codes = (codes + rng.integers(1, self.size, n)) % self.size
        if self.ordered:
            rank = self.ranks[codes] + rng.choice([-1, 1], n)
            rank = np.where(rank < 0, 1, np.where(rank >= self.size, self.size - 2, rank))  # an end has one neighbour
            new_codes = np.where(rng.random(n) < 0.5, np.argsort(self.ranks)[rank], new_codes)
        return new_codes


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
        """Return a code for each parameter; None if one is missing or has a value that is not of this search space."""
        row = [column.code(params[column.name]) if column.name in params else None for column in self.columns]
        codes = [code for code in row if code is not None]
        return codes if len(codes) == len(row) else None

    def decode(self, row: Codes) -> dict[str, Any]:
        """Return the parameters of one row, by name."""
        return {column.name: column.values[code] for column, code in zip(self.columns, row.tolist(), strict=True)}

    def embed(self, codes: Codes) -> NDArray[np.float64]:
        """Embed codes [n, p] as [n, len(owner)]."""
        return np.concatenate([column.embed(codes[:, index]) for index, column in enumerate(self.columns)], axis=1)

    def counts(self, codes: Codes) -> NDArray[np.float64]:
        """Count each value in each group of parameters with equal values [n, c]: kernels of all stages, say."""
        counts = [(codes[:, group] == value).sum(axis=1) for group in self._groups
                  for value in range(self.columns[group[0]].size)]
        return np.stack(counts, axis=1).astype(float) if counts else np.zeros((len(codes), 0))

    def sample(self, rng: np.random.Generator, n: int) -> Codes:
        """Draw uniform rows [n, p]."""
        return np.stack([rng.integers(0, column.size, n) for column in self.columns], axis=1)

    def mutate(self, codes: Codes, rng: np.random.Generator) -> Codes:
        """Change one parameter of each row. A further one follows each time with probability NEXT_CHANGE."""
        mutants = codes.copy()
        free = np.flatnonzero([column.size > 1 for column in self.columns])
        open_rows = np.arange(len(codes) if len(free) else 0)  # rows that change once more
        while len(open_rows):
            chosen = free[rng.integers(0, len(free), len(open_rows))]
            for index in np.unique(chosen):
                rows = open_rows[chosen == index]
                mutants[rows, index] = self.columns[index].step(mutants[rows, index], rng)
            open_rows = open_rows[rng.random(len(open_rows)) < NEXT_CHANGE]
        return mutants


def _key(value: Any) -> tuple[str, Any]:
    """Return a key that is equal only for values that are the same choice: True is not 1, but 1.0 is 1."""
    return (type(value).__name__ if isinstance(value, bool | str) or value is None else "number", value)


def _list_values(name: str, distribution: BaseDistribution) -> tuple[Any, ...]:
    """Return the values that a parameter can have; SamplerError names a parameter that cannot be modelled."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)
    if isinstance(distribution, IntDistribution):
        return tuple(range(distribution.low, distribution.high + 1, distribution.step))
    raise SamplerError(f"parameter {name}: {type(distribution).__name__} cannot be modelled. Use a categorical or an "
                       "integer distribution.")


@dataclass(frozen=True)
class KnownFunctions:
    """The caller's functions of settings.

    Each takes codes [n, p] with a column for each parameter: the index of the chosen value. It returns an array.

    Attributes:
        objectives: The known objectives [n, k], which are minimised.
        features: Further facts that may explain the learnt objective [n, f].
        over: Above 0 for a setting that is not allowed, and larger the farther it is from an allowed one [n].
        factor: For a study with one objective, which is the learnt value times this factor [n].
        canonical: Codes that are equal for settings that mean the same [n, p].
    """

    objectives: Function | None = None
    features: Function | None = None
    over: Function | None = None
    factor: Function | None = None
    canonical: Function | None = None


@dataclass(frozen=True)
class Inputs:
    """Inputs of the model: embedded settings [n, e], the parameter of each column [e], and scaled features [n, f]."""

    embedded: Array
    owner: NDArray[np.int64]
    features: Array

    def __getitem__(self, rows: Any) -> Inputs:
        return Inputs(self.embedded[rows], self.owner, self.features[rows])


class Domain:
    """A search space with its known functions.

    Args:
        search_space: Parameters by name.
        functions: The caller's functions.
        n_known: The study's number of known objectives.

    Raises:
        BudgetError: No setting is allowed.
        SamplerError: A function fails.
    """

    def __init__(self, search_space: Mapping[str, BaseDistribution], functions: KnownFunctions,
                 n_known: int) -> None:
        self.functions, self.n_known = functions, n_known
        self.coding = Coding(search_space)
        self.sample = self._find_allowed(self.canonical(self.coding.sample(np.random.default_rng(0), SAMPLE)))
        # The sample decides which costs are on a log scale, the place of the reference point, and the scale of inputs.
        objectives = self._objectives(self.sample)
        self._logarithmic = np.asarray((objectives > 0).all(axis=0))
        # The logarithm is bounded below: a rare cost of 0 must not outweigh all others.
        self._least = np.where(self._logarithmic, LEAST_SHARE * objectives.min(axis=0), 1.0)
        self.sample_costs = self._to_costs(objectives)
        low, high = self.sample_costs.min(axis=0), self.sample_costs.max(axis=0)
        self.reference_costs = high + np.where(high > low, BEYOND * (high - low), 1.0)
        features = self._features(self.sample, self.sample_costs)
        self._middle, self._width = features.mean(axis=0), features.std(axis=0)

    def canonical(self, codes: Codes) -> Codes:
        """Map codes of settings that mean the same to equal codes, if the caller has a function for it."""
        if self.functions.canonical is None or not len(codes):
            return codes
        return np.asarray(self.functions.canonical(codes), np.int64)

    def costs(self, codes: Codes) -> Array:
        """Return known objectives [n, k] as costs (smaller is better), a positive one (in all the sample) as a log."""
        return self._to_costs(self._objectives(codes))

    def over(self, codes: Codes) -> Array:
        """Return how far settings are from being allowed [n]; 0 and below mean allowed."""
        return self._call(self.functions.over, "over", codes, -1.0)[:, 0]

    def factor(self, codes: Codes) -> Array:
        """Return the factors by which the learnt values are multiplied [n]."""
        return self._call(self.functions.factor, "factor", codes, 1.0)[:, 0]

    def inputs(self, codes: Codes, costs: Array) -> Inputs:
        """Return the surrogate's inputs: costs, counts of values and features, scaled to the order of 1."""
        varied = self._width > 1e-9
        features = (self._features(codes, costs) - self._middle)[:, varied] / self._width[varied]
        return Inputs(self.coding.embed(codes), self.coding.owner, features)

    def _features(self, codes: Codes, costs: Array) -> Array:
        more = [] if self.functions.features is None else [self._call(self.functions.features, "features", codes)]
        return np.concatenate([costs, self.coding.counts(codes), *more], axis=1)

    def _objectives(self, codes: Codes) -> Array:
        if not self.n_known or not len(codes):
            return np.zeros((len(codes), self.n_known))
        values = self._call(self.functions.objectives, "known objectives", codes)
        if self.functions.objectives is None or values.shape[1] != self.n_known:
            raise SamplerError(f"known objectives: the study has {self.n_known}. Give a function that returns so many "
                               "values for each setting.")
        return values

    def _to_costs(self, objectives: Array) -> Array:
        logarithms = np.log(np.maximum(objectives, self._least))
        return np.where(self._logarithmic, logarithms, objectives)

    def _call(self, function: Function | None, name: str, codes: Codes, default: float = 0.0) -> Array:
        """Return the function's values [n, *], or the default; SamplerError if it fails or if values are not finite."""
        if function is None or not len(codes):
            return np.full((len(codes), 1), default)
        try:
            values = np.asarray(function(codes), float).reshape(len(codes), -1)
        except Exception as error:
            raise SamplerError(f"{name}: the function raised {type(error).__name__}: {error}") from error
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise SamplerError(f"{name}: {values[bad[0]].tolist()} for {self.coding.decode(codes[bad[0]])} is no "
                               "finite number.")
        return values

    def climb(self, codes: Codes, away: Callable[[Array], Array], is_enough: Callable[[Array], bool],
              rng: np.random.Generator) -> tuple[Codes, Array]:
        """Change settings until `is_enough` for how far they are over the limit, the nearest by `away` first.

        Returns the settings [n, p], by `away`, and how far each is over [n]. It gives up after MOST_CLIMBS rounds.
        """
        over = self.over(codes)
        for climbs in range(1 + MOST_CLIMBS):
            order = np.argsort(away(over), kind="stable")
            codes, over = codes[order], over[order]
            if is_enough(over) or climbs == MOST_CLIMBS:
                break
            # The 50 nearest have five mutants each. All are kept, each once: a round never loses ground.
            mutants = self.canonical(self.coding.mutate(np.repeat(codes[:50], 5, axis=0), rng))
            codes, first = np.unique(np.concatenate([codes, mutants]), axis=0, return_index=True)
            over = np.concatenate([over, self.over(mutants)])[first]
        return codes, over

    def _find_allowed(self, codes: Codes) -> Codes:
        """Return the allowed settings of a sample; while they are too few, the nearest ones are changed."""
        enough = min(ENOUGH_ALLOWED, len(codes))
        codes, over = self.climb(codes, np.asarray, lambda over: bool((over <= 0).sum() >= enough),
                                 np.random.default_rng(1))
        if over[0] > 0:
            raise BudgetError(f"no network of the space keeps the cap: the nearest is over it by {over[0]:.4g} "
                              f"({self.coding.decode(codes[0])}). Raise the cap, or search another space.")
        return np.asarray(codes[over <= 0])


@dataclass(frozen=True)
class History:
    """The settings of a study's trials.

    Attributes:
        numbers: Numbers of the trials whose settings were evaluated [n].
        codes: Their settings [n, p].
        values: Their values [n]; larger is better.
        stds: The standard deviations of the values' noise [n]; 0 if it is not known.
        pending: The settings that are being evaluated [q, p].
        taken: The settings of all finished trials, also without a value (pruned or failed), except lost ones [t, p].
    """

    numbers: NDArray[np.int64]
    codes: Codes
    values: Array
    stds: Array
    pending: Codes
    taken: Codes


def read_history(domain: Domain, trials: Sequence[FrozenTrial], read_value: ReadValue, sign: float) -> History:
    """Read the trials of a study. Trials without a full setting of the domain are ignored.

    Args:
        domain: The search space.
        trials: The trials of the study, except the one for which a setting is asked.
        read_value: Returns value and noise (standard deviation) of a complete trial; None to ignore it.
        sign: 1 if larger values are better, otherwise -1.
    """
    numbers, values, stds = list[int](), list[float](), list[float]()
    evaluated, pending, taken = list[list[int]](), list[list[int]](), list[list[int]]()
    for trial in trials:
        is_running = trial.state == TrialState.RUNNING
        # An enqueued trial has its whole setting in `fixed_params`, before it has asked for each parameter.
        params = trial.system_attrs.get("fixed_params") if is_running else None
        codes = domain.coding.encode(params or trial.params)
        # Its worker was lost, or the search was interrupted: its network may be asked for again.
        is_lost = trial.state == TrialState.FAIL and trial.user_attrs.get("outcome", "failed") != "failed"
        if codes is None or is_lost:
            continue
        if is_running:
            pending.append(codes)
        elif trial.state.is_finished():
            taken.append(codes)
            is_allowed = not any(value > 0 for value in trial.constraints.values())
            learnt = read_value(trial) if trial.state == TrialState.COMPLETE and is_allowed else None
            value, std = learnt or (np.nan, 0.0)
            if np.isfinite(value):
                numbers.append(trial.number)
                evaluated.append(codes)
                values.append(sign * value)
                stds.append(std if np.isfinite(std) else 0.0)
    p = len(domain.coding.columns)
    each = (domain.canonical(np.array(rows, np.int64).reshape(-1, p)) for rows in (evaluated, pending, taken))
    return History(np.array(numbers, np.int64), next(each), np.array(values), np.array(stds), *each)
