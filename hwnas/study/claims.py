"""Claims: which process works on a trial.

A process claims a trial under the study's lock, and beats while it works on it. The claim of a process that is gone, or
that has not beaten for long, is taken over by the next one that comes. Clocks of machines need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from hwnas.errors import UserError
from hwnas.study.study import storage_of, study_lock
from hwnas.system.processes import is_dead, worker_name

CLAIM = "claim"  # user attribute of a trial: worker, beat, and what it does; null between two legs
BEAT_S, GRACE_S = 30.0, 120.0  # between two beats; without one until a claim may be taken over
MOST_TRIES = 4  # processes that a job may cost, for it to be tried once more
GIVEN_UP = "processes ended again and again, or were stopped for too long, while they worked on it"
_at_work: set[int] = set()  # claims of this process, whichever thread made them


class Beats:
    """The signs of life of other processes, as this process sees them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, float]] = {}

    def have_stopped(self, number: int, beat: Any, grace_s: float) -> bool:
        """Return whether the beat that belongs to `number` has not changed since this process saw it, for so long."""
        seen, since_s = self._seen.get(number, (None, 0.0))
        if seen != beat:
            self._seen[number] = beat, time.monotonic()
            return False
        return time.monotonic() - since_s > grace_s


def claim_of(trial: FrozenTrial) -> Mapping[str, Any] | None:
    """Return the claim on a trial; None if nobody works on it."""
    return trial.user_attrs.get(CLAIM) or None


def claim(study: optuna.Study, trial: FrozenTrial, work: Mapping[str, Any]) -> dict[str, Any]:
    """Claim a trial for `work` and return the claim. Ask for it under the study's lock."""
    tries = 0 if (left := claim_of(trial)) is None else int(left.get("tries", 0))
    claimed = {**work, "worker": worker_name(), "claimed": time.time_ns(), "tries": tries + 1, "beat": 0}
    _write(study, trial, claimed)
    _at_work.add(claimed["claimed"])
    return claimed


def put_down(claimed: Mapping[str, Any]) -> None:
    """Say that this process does not work on a claim any more."""
    _at_work.discard(claimed["claimed"])


def is_held(trial: FrozenTrial, beats: Beats) -> bool:
    """Return whether another process works on a trial. One that has not beaten for GRACE_S is given up."""
    held = claim_of(trial)
    if held is None or held.get("left") or is_dead(str(held["worker"])):
        return False
    if held["worker"] == worker_name():
        return held.get("claimed") in _at_work  # by another thread
    return not beats.have_stopped(trial.number, (held["worker"], held.get("claimed"), held["beat"]), GRACE_S)


def is_given_up(trial: FrozenTrial, most_tries: int) -> bool:
    """Return whether the job that a claim names has cost so many processes that nobody tries it again."""
    held = claim_of(trial)
    return held is not None and int(held.get("tries", 0)) >= most_tries


def is_mine(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any]) -> bool:
    """Return whether nobody has taken over a claim of this process. Ask under the study's lock."""
    fresh = storage_of(study).fresh(trial)
    held = claim_of(fresh)
    return not fresh.state.is_finished() and held is not None and held.get("claimed") == claimed["claimed"]


def leave(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any]) -> None:
    """Leave a job to the next process that comes, as this one ends for another reason: the try does not count."""
    with suppress(UserError, UpdateFinishedTrialError, StorageInternalError, SQLAlchemyError), \
            study_lock(storage_of(study).url):
        if is_mine(study, trial, claimed):
            _write(study, trial, {**claimed, "tries": claimed["tries"] - 1, "left": True})


@contextmanager
def beating(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any]) -> Iterator[None]:
    """Beat inside, in a thread. A beat that the database does not take is left out."""
    ended = Event()

    def beat() -> None:
        count = 0
        while not ended.wait(BEAT_S):
            count += 1
            with suppress(UpdateFinishedTrialError, StorageInternalError, SQLAlchemyError):
                if is_mine(study, trial, claimed):
                    _write(study, trial, {**claimed, "beat": count})

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def release(study: optuna.Study, trial: FrozenTrial) -> None:
    """End a claim without a result."""
    _write(study, trial, None)


def end_trial(study: optuna.Study, trial: FrozenTrial, state: TrialState, attrs: Mapping[str, Any],
              values: Sequence[float] | None = None) -> None:
    """Write the end of a trial, and tell the study's sampler of it. After a kill between both, `outcome` says that it
    has ended."""
    storage_of(study).write_attrs(trial, attrs)
    study.tell(trial.number, values, state=state)


def _write(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any] | None) -> None:
    storage_of(study).write_attrs(trial, {CLAIM: claimed})
