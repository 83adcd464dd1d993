"""The history of a study: the settings that were evaluated, with their values, and those that are being evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from hwnas.samplers.coding import Codes
from hwnas.samplers.domain import Domain

Array = NDArray[np.float64]
PROPOSAL = "hwnas:proposal"  # system attribute: all codes of a running trial
ReadValue = Callable[[FrozenTrial], "tuple[float, float] | None"]


@dataclass(frozen=True)
class History:
    """The settings of a study's trials.

    Attributes:
        numbers: Numbers of the trials whose settings were evaluated [n].
        codes: Their settings [n, p].
        values: Their values [n]; larger is better.
        stds: The standard deviations of the values' noise [n]; 0 if it is not known.
        failed: Which of them failed [n]; their values are NaN.
        pending: The settings that are being evaluated [q, p].
        taken: All settings that were asked for before, also those without a value (pruned ones) [t, p].
    """

    numbers: NDArray[np.int64]
    codes: Codes
    values: Array
    stds: Array
    failed: NDArray[np.bool_]
    pending: Codes
    taken: Codes

    def __getitem__(self, rows: NDArray[np.int64]) -> History:
        """The history with only these of the evaluated settings. The other settings stay."""
        return History(self.numbers[rows], self.codes[rows], self.values[rows], self.stds[rows], self.failed[rows],
                       self.pending, self.taken)


def read_history(domain: Domain, trials: Sequence[FrozenTrial], read_value: ReadValue, sign: float, without: int,
                 encoded: dict[int, Codes | None]) -> History:
    """Read the trials of a study.

    Args:
        domain: The search space.
        trials: All trials of the study.
        read_value: Returns value and noise (standard deviation) of a complete trial; None to ignore it.
        sign: 1 if larger values are better, otherwise -1.
        without: Number of the trial that is being asked for.
        encoded: Codes of finished trials by number. Trials that it lacks are added, so each is encoded once.
    """
    rows: list[tuple[int, Codes, float, float, bool]] = []
    pending, taken = [], []
    for trial in trials:
        if trial.number == without:
            continue
        published = _published_codes(trial, domain)
        if trial.state == TrialState.RUNNING:
            params: dict[str, Any] = trial.system_attrs.get("fixed_params") or trial.params
            codes = domain.coding.encode(params) if published is None else published
            if codes is not None and not np.isnan(codes).any():
                pending.append(codes)
        elif trial.state.is_finished():
            if trial.number not in encoded:
                encoded[trial.number] = _finished_codes(trial, domain)
            codes = encoded[trial.number]
            if codes is None:
                continue
            taken.append(codes)
            if published is not None and np.isnan(codes).any():
                taken.append(published)  # the proposal contains parameters that the trial did not need
            value, std = _value_of(trial, read_value)
            if trial.state == TrialState.FAIL or np.isfinite(value):
                rows.append((trial.number, codes, sign * value, std if np.isfinite(std) else 0.0,
                             trial.state == TrialState.FAIL))
    p = len(domain.coding.columns)
    codes, pending_codes, taken_codes = (domain.canonical(np.array(each).reshape(-1, p))
                                         for each in ([row[1] for row in rows], pending, taken))
    return History(np.array([row[0] for row in rows], np.int64), codes, np.array([row[2] for row in rows], float),
                   np.array([row[3] for row in rows], float), np.array([row[4] for row in rows], bool), pending_codes,
                   taken_codes)


def _finished_codes(trial: FrozenTrial, domain: Domain) -> Codes | None:
    """Codes of a finished trial, as encoded; None if it says nothing about a setting of the domain."""
    failed = trial.state == TrialState.FAIL
    # A trial says nothing about its setting if its worker was lost, or if it ended while it was suggested.
    without_outcome = "lost" if "worker" in trial.user_attrs else "failed"
    if failed and trial.user_attrs.get("outcome", without_outcome) != "failed":
        return None
    codes = domain.coding.encode(trial.params)
    if codes is None or np.isnan(codes).all() or (failed and np.isnan(codes).any()):
        return None
    return codes


def _value_of(trial: FrozenTrial, read_value: ReadValue) -> tuple[float, float]:
    """Value and noise of a finished trial; NaN if it has no value to learn from."""
    if trial.state != TrialState.COMPLETE or any(value > 0 for value in trial.constraints.values()):
        return np.nan, 0.0
    return read_value(trial) or (np.nan, 0.0)


def _published_codes(trial: FrozenTrial, domain: Domain) -> Codes | None:
    codes = trial.system_attrs.get(PROPOSAL)
    fits = isinstance(codes, list) and len(codes) == len(domain.coding.columns)
    return np.array(codes, float) if fits else None


def list_proposals(trials: Sequence[FrozenTrial], number: int) -> list[list[float]]:
    """The published proposals of all trials except `number` and those that failed."""
    return [trial.system_attrs[PROPOSAL] for trial in trials
            if trial.state != TrialState.FAIL and trial.number != number and PROPOSAL in trial.system_attrs]
