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

    def show_work(self, trial: FrozenTrial) -> bool:
        """Return whether another process works on a trial. One that has not beaten for GRACE_S is given up."""
        held = claim_of(trial)
        if held is None or held.get("left") or is_dead(str(held["worker"])):
            return False
        if held["worker"] == worker_name():
            return held.get("claimed") in _at_work  # by another thread
        beat = held["worker"], held.get("claimed"), held["beat"]
        seen, since_s = self._seen.get(trial.number, (None, 0.0))
        if seen != beat:
            self._seen[trial.number] = beat, time.monotonic()
            return True
        return time.monotonic() - since_s <= GRACE_S


def claim_of(trial: FrozenTrial) -> Mapping[str, Any] | None:
    """Return the claim on a trial; None if nobody works on it."""
    return trial.user_attrs.get(CLAIM) or None


def tries_of(trial: FrozenTrial) -> int:
    """Return how many processes the job that a claim names has cost, with the one that is at work on it."""
    return int((claim_of(trial) or {}).get("tries", 0))


def claim(study: optuna.Study, trial: FrozenTrial, work: Mapping[str, Any]) -> dict[str, Any]:
    """Claim a trial for `work` and return the claim. Ask for it under the study's lock."""
    claimed = {**work, "worker": worker_name(), "claimed": time.time_ns(), "tries": tries_of(trial) + 1, "beat": 0}
    write_claim(study, trial, claimed)
    _at_work.add(claimed["claimed"])
    return claimed


def put_down(claimed: Mapping[str, Any]) -> None:
    """Say that this process does not work on a claim any more."""
    _at_work.discard(claimed["claimed"])


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
            write_claim(study, trial, {**claimed, "tries": claimed["tries"] - 1, "left": True})


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
                    write_claim(study, trial, {**claimed, "beat": count})

    thread = Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def write_claim(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any] | None) -> None:
    """Write a claim; None ends it without a result."""
    storage_of(study).write_attrs(trial, {CLAIM: claimed})


def end_trial(study: optuna.Study, trial: FrozenTrial, state: TrialState, attrs: Mapping[str, Any],
              values: Sequence[float] | None = None) -> None:
    """Write the end of a trial and of the claim on it, and tell the study's sampler. After a kill between both,
    `outcome` says that it has ended."""
    storage_of(study).write_attrs(trial, {CLAIM: None, **attrs})
    study.tell(trial.number, values, state=state)
