"""Several processes on one study: who is alive, whose trial is taken up again, who verifies."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import optuna
from filelock import FileLock, Timeout
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from hwnas.errors import StudyError
from hwnas.processes import is_dead
from hwnas.storage import Storage

MAX_RETRIES = 3
_RETRIES = "hwnas:retry_of"


def storage_of(study: optuna.Study) -> Storage:
    """The storage under Optuna's cache."""
    backend = getattr(study._storage, "_backend", study._storage)
    if not isinstance(backend, Storage):
        raise TypeError("this study was not opened with hwnas.study.open_study")
    return backend


def requeue(study: optuna.Study, trial: FrozenTrial, *, counts: bool = True) -> None:
    """Queue the parameters of a lost trial again, at most MAX_RETRIES times where it `counts` (a network that kills
    its worker must not be tried for ever)."""
    fixed = trial.params or trial.system_attrs.get("fixed_params")
    retries = list(trial.system_attrs.get(_RETRIES, []))
    if not fixed or (counts and len(retries) >= MAX_RETRIES):
        return
    system = {"fixed_params": fixed, _RETRIES: [*retries, trial.number] if counts else retries}
    study.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs=system))


def release_lost(study: optuna.Study, *, retry: bool = True) -> int:
    """Fail and queue again the running trials whose worker is dead; how many there were but for those past their grace.

    Dead are: processes of this machine that are gone (at once), heartbeats past their grace, and trials that never
    got as far as a heartbeat.
    """
    storage = storage_of(study)
    long_ago = datetime.now() - timedelta(seconds=storage.grace_period or 0)
    released = 0
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get("worker")
        old = trial.datetime_start is not None and trial.datetime_start < long_ago
        unborn = old and not storage.has_heartbeat(trial._trial_id)
        if unborn or (worker is not None and is_dead(worker)):
            try:
                storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            except UpdateFinishedTrialError:
                continue
            released += 1
            if retry:
                requeue(study, trial)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    return released


def wait_for_others(study: optuna.Study, *, poll_s: float = 1.0, waiting: Callable[[int], None] | None = None) -> None:
    """Return when no worker is training on this study any more: their results belong in the verified front, and
    their load would spoil its timing. `waiting` hears how many still run."""
    while True:
        release_lost(study, retry=False)
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if not running:
            return
        if waiting is not None:
            waiting(len(running))
        time.sleep(poll_s)


class VerifierLock:
    """Held until `release`, the end of its `with` block, or the end of the process."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock

    def release(self) -> None:
        """Let another worker verify."""
        self._lock.release()

    def __enter__(self) -> VerifierLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def acquire_verifier(folder: Path) -> VerifierLock | None:
    """The right to verify the run in `folder`, or None when another worker has it.

    An operating-system lock on `verify.lock`: it ends with the process that holds it, however that ends.
    """
    lock = FileLock(folder / "verify.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    except OSError as error:
        raise StudyError(f"cannot write {folder / 'verify.lock'}: {error.strerror or error}. "
                         "Make the run folder writable or choose another.") from error
    return VerifierLock(lock)
