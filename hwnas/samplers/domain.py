"""The domain of a search: what is known of every setting before it is evaluated.

A domain knows costs, features, and whether a setting is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution

from hwnas.errors import BudgetError, SamplerError
from hwnas.samplers.coding import Codes, Coding

Array = NDArray[np.float64]
Function = Callable[[Codes], ArrayLike]
SAMPLE = 512  # number of random settings that give the known objectives' ranges
LEAST_SHARE = 1e-3  # on a log scale, no cost counts as less than this share of the sample's least cost
BEYOND = 0.02  # the reference point lies this share of the sample's cost range beyond its dearest setting
ENOUGH_ALLOWED, MOST_CLIMBS = 20, 60  # allowed settings of a sample, and rounds of changes that look for them


@dataclass(frozen=True)
class KnownFunctions:
    """The caller's functions of settings.

    Each gets codes [n, p], a column for each parameter: the index of the chosen value. It returns an array.

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
    """Embedded settings [n, e], the parameter that owns each column [e], and scaled features [n, f]."""

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
        n_known: How many known objectives the study has.

    Raises:
        BudgetError: No setting is allowed.
        SamplerError: A function fails.
    """

    def __init__(self, search_space: Mapping[str, BaseDistribution], functions: KnownFunctions,
                 n_known: int) -> None:
        self.search_space, self.functions, self.n_known = dict(search_space), functions, n_known
        self.coding = Coding(search_space)
        self.sample = self._find_allowed(self.canonical(self.coding.sample(np.random.default_rng(0), SAMPLE)))
        # The sample decides which costs are on a log scale, where the reference point lies, and how inputs are scaled.
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
        """Map codes to codes that are equal for settings that mean the same, if the caller has a function for it."""
        if self.functions.canonical is None or not len(codes):
            return codes
        return np.asarray(self.functions.canonical(codes), np.int64)

    def costs(self, codes: Codes) -> Array:
        """Known objectives [n, k] as costs: smaller is better. The scale is a log if the whole sample is positive."""
        return self._to_costs(self._objectives(codes))

    def over(self, codes: Codes) -> Array:
        """Return how far settings are from being allowed [n]; 0 and below mean allowed."""
        return self._call(self.functions.over, "over", codes, -1.0)[:, 0]

    def factor(self, codes: Codes) -> Array:
        """The factors by which the learnt values are multiplied [n]."""
        return self._call(self.functions.factor, "factor", codes, 1.0)[:, 0]

    def inputs(self, codes: Codes, costs: Array) -> Inputs:
        """The surrogate's inputs: costs, counts of values and features, scaled to the order of 1."""
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
        """The function's values [n, *], or the default; SamplerError when it fails, or returns no finite numbers."""
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
            mutants = self.canonical(self.coding.mutate(np.repeat(codes[:50], 5, axis=0), rng))
            codes, first = np.unique(np.concatenate([codes, mutants]), axis=0, return_index=True)
            over = np.concatenate([over, self.over(mutants)])[first]
        return codes, over

    def _find_allowed(self, codes: Codes) -> Codes:
        """The allowed settings of a sample. If none is allowed, the nearest ones are changed until one is."""
        enough = min(ENOUGH_ALLOWED, len(codes))
        codes, over = self.climb(codes, np.asarray, lambda over: bool((over <= 0).sum() >= enough),
                                 np.random.default_rng(1))
        if over[0] > 0:
            raise BudgetError(f"no setting was found that is allowed: the nearest is over by {over[0]:.4g} "
                              f"({self.coding.decode(codes[0])}). Raise the cap, or search another space.")
        return np.asarray(codes[over <= 0])
