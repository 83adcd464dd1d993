"""A process of a search: it claims the job that is wanted most, does it, and records what came of it.

Any number of them share a search through its study. A process that is killed loses its claim, and the next one that
comes does the job; what was recorded stays.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

import optuna
from optuna.trial import FrozenTrial

from hwnas.errors import CandidateError, UserError
from hwnas.latency.measured import NotTimed
from hwnas.study.claims import (
    GIVEN_UP,
    MOST_TRIES,
    Beats,
    beating,
    claim,
    is_mine,
    leave,
    put_down,
    tries_of,
)
from hwnas.study.storage import storage_errors
from hwnas.study.study import storage_of, study_lock
from hwnas.system.processes import Interrupts

POLL_S = 0.5
PATIENCE_S = 3600.0  # for the lock of the study: what was trained is not thrown away for a busy one
Job = TypeVar("Job")
Record = Callable[[], None]  # writes what came of a job


class Worker(ABC, Generic[Job]):
    """One of any number of processes that work on a study. A job that costs `most_tries` of them fails."""

    most_tries = MOST_TRIES

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.interrupts, self.beats = Interrupts(), Beats()
        self.later: list[Callable[[], None]] = []  # what is said once the study is not locked any more

    def run(self) -> None:
        """Work until the search is over.

        A CandidateError ends its candidate, and the search goes on. Any other error, and Ctrl-C, leaves the job to the
        next process and is raised; database errors as a StudyError.
        """
        with storage_errors(self.url), self.interrupts.held():
            while (taken := self._take()) is not None:
                self._do(*taken)

    @property
    def url(self) -> str:
        """That of the study's database."""
        return storage_of(self.study).url

    @abstractmethod
    def wanted(self) -> Sequence[Job] | None:
        """Write what needs no work, and return the jobs that are to be done now, most wanted first, with those that
        others do. No job: the search is over. None: something has changed, and is to be looked at again.

        Nobody else does anything meanwhile, so it must not take long."""

    @abstractmethod
    def trial_of(self, job: Job) -> FrozenTrial:
        """Return the trial that a job is of."""

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the content of a claim on a job: all that another process needs to go on with it."""
        return {}

    @abstractmethod
    def perform(self, job: Job, claimed: Mapping[str, Any]) -> Record:
        """Do a job; the function that is returned records it, under the study's lock. CandidateError if its network is
        the reason that it cannot be done."""

    @abstractmethod
    def fail(self, job: Job, reason: str) -> None:
        """Record that a job's network failed."""

    def tell_waiting(self, timing: str = "") -> None:
        """Say that others work and nothing else is to be done, or how far the `timing` of networks is."""

    def _take(self) -> tuple[Job, Mapping[str, Any]] | None:
        """Claim the next job; None when the search is over."""
        while True:
            try:
                with study_lock(self.url, PATIENCE_S):
                    jobs = self.wanted()
                    free = next((job for job in jobs or () if not self.beats.show_work(self.trial_of(job))), None)
                    if free is not None and tries_of(self.trial_of(free)) >= self.most_tries:
                        self.fail(free, GIVEN_UP)
                        jobs = free = None
                    claimed = None if free is None else claim(self.study, self.trial_of(free), self.describe(free))
                self._speak()
                if free is not None and claimed is not None:
                    return free, claimed
            except NotTimed as untimed:  # without the lock: others may go on meanwhile
                with self.interrupts.allowed():
                    untimed.latency.time(untimed.networks, lambda share, note="": self.tell_waiting(note))
                continue
            self.interrupts.check()
            if jobs is None:
                continue
            if not jobs:
                return None
            self.tell_waiting()
            with self.interrupts.allowed():
                time.sleep(POLL_S)

    def _do(self, job: Job, claimed: Mapping[str, Any]) -> None:
        """Do what was claimed, and record it, unless another process took it over as this one was silent for long."""
        trial = self.trial_of(job)
        try:
            with ExitStack() as beats:
                beats.enter_context(beating(self.study, trial, claimed))
                record: Record
                try:
                    with self.interrupts.allowed():
                        record = self.perform(job, claimed)
                except CandidateError as error:
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]
                    record = partial(self.fail, job, reason)
                with study_lock(self.url, PATIENCE_S):  # for which it may wait for longer than a claim lasts
                    beats.close()  # a beat behind the record would claim the trial once more
                    if is_mine(self.study, trial, claimed):
                        record()
        except (KeyboardInterrupt, SystemExit, UserError):
            leave(self.study, trial, claimed)
            raise
        finally:
            put_down(claimed)
        self._speak()

    def _speak(self) -> None:
        """Say what there was to say while the study was locked: who listens may be slow."""
        said, self.later = self.later, []
        for say in said:
            say()
