"""Domain: the facts about every setting before it is evaluated: costs, features, whether it is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution

from hwnas.errors import BudgetError, SamplerError
from hwnas.samplers.coding import Codes, Coding, Settings
from hwnas.samplers.surrogate import Inputs

Array = NDArray[np.float64]
Function = Callable[[Settings], ArrayLike]
SAMPLE = 512  # number of random settings that give the known objectives' ranges
LEAST_SHARE = 1e-3  # on a log scale, no cost counts as less than this share of the sample's least cost
BEYOND = 0.02  # the reference point lies this share of the sample's cost range beyond its dearest setting


@dataclass(frozen=True)
class Known:
    """The caller's functions of settings.

    Each gets `Settings` (a sequence of parameter dictionaries with `codes`) of length n, and returns an array. A
    parameter that a trial did not have appears with its first value.

    objectives: the known objectives [n, k].
    features: further facts that may explain the learnt objective [n, f].
    over: above 0 for a setting that is not allowed, and larger the farther it is from an allowed one [n].
    factor: for a study with one objective, which is the learnt value times this factor [n].
    canonical: maps codes [n, p] to codes that are equal for settings that mean the same.
    """

    objectives: Function | None = None
    features: Function | None = None
    over: Function | None = None
    factor: Function | None = None
    canonical: Callable[[Codes], Codes] | None = None


class Domain:
    """A search space with its known functions. `signs` [k]: 1 for a known objective to minimise, -1 to maximise."""

    def __init__(self, search_space: Mapping[str, BaseDistribution], known: Known, signs: Sequence[float]) -> None:
        self.search_space, self.known, self.signs = dict(search_space), known, np.array(signs, float)
        self.coding = Coding(search_space)
        self.sample = self._find_allowed(self.canonical(self.coding.sample(np.random.default_rng(0), SAMPLE)))
        raw = self._objectives(self.sample)
        self.logarithmic: NDArray[np.bool_] = (raw > 0).all(axis=0) & (self.signs > 0)
        self._least = np.where(self.logarithmic, LEAST_SHARE * raw.min(axis=0, initial=np.inf), -np.inf)
        self.sample_costs = self._cost(raw)
        low, high = (of(self.sample_costs, axis=0) for of in (np.min, np.max))
        self.far = high + np.where(high > low, BEYOND * (high - low), 1.0)
        described = self._described(self.sample, self.sample_costs)
        self._middle, self._width = described.mean(axis=0), described.std(axis=0)

    def canonical(self, codes: Codes) -> Codes:
        """Map codes to codes that are equal for settings that mean the same.

        Codes of a range become those of its values. The caller's function, if there is one, does the rest; it sees
        absent parameters with their first value.
        """
        codes = self.coding.snap(codes)
        if self.known.canonical is None or not len(codes):
            return codes
        return np.asarray(self.known.canonical(np.nan_to_num(codes, nan=0.0)), float)

    def costs(self, codes: Codes) -> Array:
        """Known objectives [n, k] as costs: smaller is better. The scale is a log if the whole sample is positive."""
        return self._cost(self._objectives(codes))

    def over(self, codes: Codes) -> Array:
        """How far settings are from being allowed [n]; 0 and below mean allowed."""
        if self.known.over is None:
            return np.full(len(codes), -1.0)
        return self._call(self.known.over, "over", codes)[:, 0]

    def factor(self, codes: Codes) -> Array:
        """The factors by which the learnt values are multiplied [n]."""
        if self.known.factor is None:
            return np.ones(len(codes))
        return self._call(self.known.factor, "factor", codes)[:, 0]

    def inputs(self, codes: Codes, costs: Array) -> Inputs:
        """The surrogate's inputs: costs, counts of values and features, scaled to the order of 1."""
        described = (self._described(codes, costs) - self._middle)[:, self._width > 1e-9]
        return Inputs(self.coding.embed(codes), self.coding.owner, described / self._width[self._width > 1e-9])

    def _described(self, codes: Codes, costs: Array) -> Array:
        parts = [costs, self.coding.counts(codes)]
        if self.known.features is not None:
            parts.append(self._call(self.known.features, "features", codes))
        return np.concatenate(parts, axis=1)

    def _objectives(self, codes: Codes) -> Array:
        k = len(self.signs)
        if not k:
            return np.zeros((len(codes), 0))
        if self.known.objectives is None:
            raise SamplerError(f"{k} known objectives, but no function that tells them. Give known=FUNCTION.")
        values = self._call(self.known.objectives, "known objectives", codes)
        if values.shape[1] != k:
            raise SamplerError(f"known objectives: {values.shape[1]} values a setting, {k} wanted.")
        return values

    def _cost(self, raw: Array) -> Array:
        # The logarithm is bounded below: a rare cost of 0 must not outweigh all others.
        return np.where(self.logarithmic, np.log(np.maximum(raw, np.maximum(self._least, 1e-300))), raw * self.signs)

    def _call(self, function: Function, name: str, codes: Codes) -> Array:
        """The function's values [n, *]; SamplerError when it fails, or returns too few values or no finite numbers."""
        if not len(codes):  # the width is unknown, and no caller needs it
            return np.zeros((0, len(self.signs) if name == "known objectives" else 1))
        try:
            values = np.asarray(function(Settings(self.coding, np.nan_to_num(codes, nan=0.0))), float)
        except Exception as error:
            raise SamplerError(f"{name}: the function raised {type(error).__name__}: {error}") from error
        if values.shape[:1] != (len(codes),) or values.ndim > 2:
            raise SamplerError(f"{name}: {len(codes)} settings were given, values of shape {values.shape} came back.")
        values = values.reshape(len(codes), -1)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise SamplerError(f"{name}: {values[bad[0]].tolist()} for {self.coding.decode(codes[bad[0]])} is no "
                               "finite number.")
        return values

    def _find_allowed(self, codes: Codes) -> Codes:
        """The allowed settings of a sample. If none is allowed, the nearest ones are changed until one is."""
        rng = np.random.default_rng(1)
        over = self.over(codes)
        for _ in range(60):
            if (over <= 0).sum() >= min(20, len(codes)):
                break
            best = codes[np.argsort(over, kind="stable")[:50]]
            moved = self.canonical(self.coding.mutate(np.repeat(best, 5, axis=0), rng))
            codes, first = np.unique(np.concatenate([codes, moved]), axis=0, return_index=True)
            over = np.concatenate([over, self.over(moved)])[first]
        if not (over <= 0).any():
            nearest = int(over.argmin())
            raise BudgetError(f"no setting was found that is allowed: the nearest is over by {over[nearest]:.4g} "
                              f"({self.coding.decode(codes[nearest])}). Raise the cap, or search another space.")
        return np.asarray(codes[over <= 0])
