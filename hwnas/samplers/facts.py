"""The facts that a model is made of. Domain: of every setting before it is evaluated. History: of those that were.

A domain knows costs, features, and whether a setting is allowed. A history is read from a study's trials, with the
settings that its workers are evaluating.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from hwnas.errors import BudgetError, SamplerError
from hwnas.samplers.coding import Codes, Coding, Settings

Array = NDArray[np.float64]
PROPOSAL = "hwnas:proposal"  # system attribute: all codes of a running trial
Learnt = Callable[[FrozenTrial], "tuple[float, float] | None"]


@dataclass(frozen=True)
class History:
    """The settings of a study's trials.

    Evaluated settings are `codes` [n, p], with values [n] (larger is better) and the standard deviations of their
    noise [n] (0: unknown). `failed` [n] marks those that failed; their values are NaN. `pending` [q, p] are being
    evaluated. `taken` [t, p] are all settings that were asked for before, also those without a value (pruned ones).
    """

    codes: Codes
    values: Array
    stds: Array
    failed: NDArray[np.bool_]
    pending: Codes
    taken: Codes

    def __getitem__(self, rows: NDArray[np.int64]) -> History:
        """The history with only these of the evaluated settings. The other settings stay."""
        return History(self.codes[rows], self.values[rows], self.stds[rows], self.failed[rows], self.pending,
                       self.taken)


@dataclass(frozen=True)
class _Row:
    """A finished trial: the settings that it takes and, if it counts, its codes, value, noise and failure."""

    taken: list[Codes] = field(default_factory=list)
    taught: tuple[Codes, float, float, bool] | None = None


class Reader:
    """Reads trials, each finished one once. `learnt` gives value and noise of a complete trial, None to ignore it."""

    def __init__(self, coding: Coding, learnt: Learnt, sign: float, canonical: Callable[[Codes], Codes]) -> None:
        self.coding, self.learnt, self.sign, self.canonical = coding, learnt, sign, canonical
        self._rows: dict[tuple[str, int], _Row] = {}

    def read(self, trials: Sequence[FrozenTrial], number: int, study: str) -> History:
        """The history of all trials except trial `number`. `study` is the study's name."""
        taught, pending, taken = [], [], []
        for trial in trials:
            if trial.number == number:
                continue
            if trial.state == TrialState.RUNNING:
                at_work = self._at_work(trial)
                if at_work is not None:
                    pending.append(at_work)
            elif trial.state.is_finished():
                key = (study, trial.number)
                if key not in self._rows:
                    self._rows[key] = self._read_finished(trial)
                row = self._rows[key]
                taken += row.taken
                if row.taught is not None:
                    taught.append(row.taught)
        p = len(self.coding.columns)
        codes, at_work_codes, taken_codes = (
            np.array(rows).reshape(-1, p) for rows in ([row[0] for row in taught], pending, taken))
        values, stds = (np.array([float(row[i]) for row in taught]) for i in (1, 2))
        return History(codes, values, stds, np.array([row[3] for row in taught], bool), at_work_codes, taken_codes)

    def codes_of(self, trial: FrozenTrial, study: str) -> Codes | None:
        """Codes [p] of a trial that `read` took a value from; None for any other."""
        taught = self._rows.get((study, trial.number), _Row()).taught
        return None if taught is None or taught[3] else taught[0]

    def _read_finished(self, trial: FrozenTrial) -> _Row:
        codes = self.coding.encode(trial.params)
        failed = trial.state == TrialState.FAIL
        # A trial says nothing about its setting if its worker was lost, or if it ended while it was suggested.
        unsaid = "lost" if "worker" in trial.user_attrs else "failed"
        lost = failed and trial.user_attrs.get("outcome", unsaid) != "failed"
        if codes is None or lost or np.isnan(codes).all() or (failed and np.isnan(codes).any()):
            return _Row()
        codes = self.canonical(codes[None])[0]
        taken = [codes]
        if (published := self._read_published(trial)) is not None and not np.array_equal(published, codes):
            taken.append(published)  # the proposal contains parameters that the trial did not need
        if failed:
            return _Row(taken, (codes, np.nan, 0.0, True))
        if trial.state != TrialState.COMPLETE or any(value > 0 for value in trial.constraints.values()):
            return _Row(taken)
        reading = self.learnt(trial)
        if reading is None or not np.isfinite(reading[0]):
            return _Row(taken)
        std = reading[1] if np.isfinite(reading[1]) else 0.0
        return _Row(taken, (codes, self.sign * reading[0], std, False))

    def _read_published(self, trial: FrozenTrial) -> Codes | None:
        published = trial.system_attrs.get(PROPOSAL)
        fits = isinstance(published, list) and len(published) == len(self.coding.columns)
        return np.array(published, float) if fits else None

    def _at_work(self, trial: FrozenTrial) -> Codes | None:
        if (published := self._read_published(trial)) is not None:
            return published
        params: dict[str, Any] = trial.system_attrs.get("fixed_params") or trial.params
        codes = self.coding.encode(params)
        return None if codes is None or np.isnan(codes).any() else self.canonical(codes[None])[0]


def proposals(trials: Sequence[FrozenTrial], number: int) -> list[list[float]]:
    """The published proposals of all trials except `number` and those that failed."""
    return [trial.system_attrs[PROPOSAL] for trial in trials
            if trial.state != TrialState.FAIL and trial.number != number and PROPOSAL in trial.system_attrs]


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


@dataclass(frozen=True)
class Inputs:
    """Embedded settings [n, e], the parameter that owns each column [e], and scaled features [n, f]."""

    embedded: Array
    owner: NDArray[np.int64]
    features: Array

    def __len__(self) -> int:
        return len(self.embedded)

    def __getitem__(self, rows: Any) -> Inputs:
        return Inputs(self.embedded[rows], self.owner, self.features[rows])


class Domain:
    """A search space with its known functions. `signs` [k]: 1 for a known objective to minimise, -1 to maximise.

    `rivals`: settings, as parameters by name, that anybody would try; as codes [r, p].
    """

    def __init__(self, search_space: Mapping[str, BaseDistribution], known: Known, signs: Sequence[float],
                 rivals: Sequence[Mapping[str, Any]] = ()) -> None:
        self.search_space, self.known, self.signs = dict(search_space), known, np.array(signs, float)
        self.coding = Coding(search_space)
        codes = [row for rival in rivals if (row := self.coding.encode(rival)) is not None]
        self.rivals = self.canonical(np.array(codes).reshape(-1, len(self.coding.columns)))
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
