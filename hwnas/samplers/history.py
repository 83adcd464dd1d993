"""The history of a study: the settings that were evaluated, with their values, and those that are being evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from hwnas.samplers.coding import Codes
from hwnas.samplers.domain import Domain

Array = NDArray[np.float64]
ReadValue = Callable[[FrozenTrial], "tuple[float, float] | None"]


@dataclass(frozen=True)
class History:
    """The settings of a study's trials.

    Attributes:
        numbers: Numbers of the trials whose settings were evaluated [n].
        codes: Their settings [n, p].
        values: Their values [n]; larger is better.
        stds: The standard deviations of the values' noise [n]; 0 if it is not known.
        pending: The settings that are being evaluated [q, p].
        taken: All settings that were asked for before, also those without a value (pruned or failed ones) [t, p].
    """

    numbers: NDArray[np.int64]
    codes: Codes
    values: Array
    stds: Array
    pending: Codes
    taken: Codes

    def __getitem__(self, rows: NDArray[np.int64]) -> History:
        """The history with only these of the evaluated settings. The other settings stay."""
        return replace(self, numbers=self.numbers[rows], codes=self.codes[rows], values=self.values[rows],
                       stds=self.stds[rows])


def read_history(domain: Domain, trials: Sequence[FrozenTrial], read_value: ReadValue, sign: float) -> History:
    """Read the trials of a study. Trials without a full setting of the domain are ignored.

    Args:
        domain: The search space.
        trials: The trials of the study without the one that is being asked for.
        read_value: Returns value and noise (standard deviation) of a complete trial; None to ignore it.
        sign: 1 if larger values are better, otherwise -1.
    """
    numbers, values, stds = list[int](), list[float](), list[float]()
    evaluated, pending, taken = list[list[int]](), list[list[int]](), list[list[int]]()
    for trial in trials:
        is_running = trial.state == TrialState.RUNNING
        params = trial.system_attrs.get("fixed_params") if is_running else None
        codes = domain.coding.encode(params or trial.params)
        if codes is None or _is_lost(trial):
            continue
        if is_running:
            pending.append(codes)
        elif trial.state.is_finished():
            taken.append(codes)
            value, std = _value_of(trial, read_value)
            if np.isfinite(value):
                numbers.append(trial.number)
                evaluated.append(codes)
                values.append(sign * value)
                stds.append(std if np.isfinite(std) else 0.0)
    p = len(domain.coding.columns)
    each = (domain.canonical(np.array(rows, np.int64).reshape(-1, p)) for rows in (evaluated, pending, taken))
    return History(np.array(numbers, np.int64), next(each), np.array(values), np.array(stds), *each)


def _is_lost(trial: FrozenTrial) -> bool:
    """Return whether a trial failed without its network's fault: its worker was lost, or the search was interrupted."""
    return trial.state == TrialState.FAIL and trial.user_attrs.get("outcome", "failed") != "failed"


def _value_of(trial: FrozenTrial, read_value: ReadValue) -> tuple[float, float]:
    """Value and noise of a finished trial; NaN if it has no value to learn from."""
    if trial.state != TrialState.COMPLETE or any(value > 0 for value in trial.constraints.values()):
        return np.nan, 0.0
    return read_value(trial) or (np.nan, 0.0)
