"""History: the evaluated settings of a study, read from its trials, and the settings its workers are evaluating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from hwnas.samplers.coding import Codes, Coding

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
