"""Claims on trials. A claim says which process works on a trial.

A process claims a trial under the study's lock, and sends heartbeats while it works on it. If a process is gone, or
has sent no heartbeat for long, the next free process takes over its claim. Clocks of machines need not agree.
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

CLAIM = "claim"  # user attribute of a trial: worker, heartbeat, and its work; null between two legs
BEAT_S, GRACE_S = 30.0, 120.0  # time between two heartbeats; time without one after which a claim may be taken over
MOST_TRIES = 4  # a job that has cost so many processes is not tried again
GIVEN_UP = "processes ended again and again, or were stopped for too long, while they worked on it"
_at_work: set[int] = set()  # the claims that threads of this process work on


class Beats:
    """The heartbeats of other processes, timed by the clock of this process."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, float]] = {}

    def show_work(self, trial: FrozenTrial) -> bool:
        """Return whether another process or thread works on a trial. One without heartbeat for GRACE_S is given up."""
        current = claim_of(trial)
        if current is None or current.get("left") or is_dead(str(current["worker"])):
            return False
        if current["worker"] == worker_name():
            return current.get("claimed") in _at_work  # by another thread
        # The heartbeat is a counter. Only the time since it last changed counts, by the clock of this process.
        beat = current["worker"], current.get("claimed"), current["beat"]
        seen, since_s = self._seen.get(trial.number, (None, 0.0))
        if seen != beat:
            self._seen[trial.number] = beat, time.monotonic()
            return True
        return time.monotonic() - since_s <= GRACE_S


def claim_of(trial: FrozenTrial) -> Mapping[str, Any] | None:
    """Return the claim on a trial; None if nobody works on it."""
    return trial.user_attrs.get(CLAIM) or None


def tries_of(trial: FrozenTrial) -> int:
    """Return the number of processes that have tried the job of a claim, with the present one; 0 without a claim."""
    return int((claim_of(trial) or {}).get("tries", 0))


def claim(study: optuna.Study, trial: FrozenTrial, work: Mapping[str, Any]) -> dict[str, Any]:
    """Claim a trial for `work` and return the claim. Call it under the study's lock."""
    claimed = {**work, "worker": worker_name(), "claimed": time.time_ns(), "tries": tries_of(trial) + 1, "beat": 0}
    write_claim(study, trial, claimed)
    _at_work.add(claimed["claimed"])
    return claimed


def put_down(claimed: Mapping[str, Any]) -> None:
    """Note that this process no longer works on a claim. The database is not changed."""
    _at_work.discard(claimed["claimed"])


def is_mine(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any]) -> bool:
    """Return whether a claim of this process is still valid: not taken over. Call it under the study's lock."""
    fresh = storage_of(study).fresh(trial)
    current = claim_of(fresh)
    return not fresh.state.is_finished() and current is not None and current.get("claimed") == claimed["claimed"]


def leave(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any]) -> None:
    """Leave a job to the next free process, because this one ends for another reason. The try does not count."""
    with suppress(UserError, UpdateFinishedTrialError, StorageInternalError, SQLAlchemyError), \
            study_lock(storage_of(study).url):
        if is_mine(study, trial, claimed):
            write_claim(study, trial, {**claimed, "tries": claimed["tries"] - 1, "left": True})


@contextmanager
def beating(study: optuna.Study, trial: FrozenTrial, claimed: Mapping[str, Any]) -> Iterator[None]:
    """Send heartbeats from a thread inside the block. A heartbeat that the database refuses is left out."""
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
    """Write a claim; None removes it without a result."""
    storage_of(study).write_attrs(trial, {CLAIM: claimed})


def end_trial(study: optuna.Study, trial: FrozenTrial, state: TrialState, attrs: Mapping[str, Any],
              values: Sequence[float] | None = None) -> None:
    """End a trial and the claim on it: write `attrs`, then let the study's sampler know. If a kill comes between the
    two, the attribute `outcome` says that the trial has ended."""
    storage_of(study).write_attrs(trial, {CLAIM: None, **attrs})
    study.tell(trial.number, values, state=state)
