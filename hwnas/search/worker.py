"""A process of a search: it claims the job that is wanted most, does it, and records what came of it.

Any number of them share a search through its study. A process that is killed loses its claim, and the next one that
comes does the job; what was recorded stays.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import optuna
from optuna.trial import FrozenTrial

from hwnas.errors import CandidateError
from hwnas.latency.measured import NotTimed
from hwnas.study.claims import GIVEN_UP, Beats, beating, claim, excuse, is_given_up, is_held, is_mine
from hwnas.study.storage import storage_errors
from hwnas.study.study import storage_of, study_lock
from hwnas.system.processes import Interrupts

POLL_S = 0.5
Job = TypeVar("Job")
Record = Callable[[], None]  # writes what came of a job


class Worker(ABC, Generic[Job]):
    """One of any number of processes that work on a study."""

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.interrupts, self.beats = Interrupts(), Beats()

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
    def wanted(self) -> Sequence[Job]:
        """Write all that needs no work, and return the jobs that are to be done now, most wanted first, with those that
        others do. Nothing: the search is over."""

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

    def tell_waiting(self) -> None:
        """Say that others work and nothing else is to be done."""

    def tell_timing(self, note: str) -> None:
        """Say that networks are timed."""

    def _take(self) -> tuple[Job, Mapping[str, Any]] | None:
        """Claim the next job; None when the search is over."""
        while True:
            try:
                with study_lock(self.url):
                    jobs = self.wanted()
                    free = next((job for job in jobs if not is_held(self.trial_of(job), self.beats)), None)
                    if free is not None and is_given_up(self.trial_of(free)):
                        self.fail(free, GIVEN_UP)
                        continue
                    if free is not None:
                        return free, claim(self.study, self.trial_of(free), self.describe(free))
            except NotTimed as untimed:  # without the lock: others may go on meanwhile
                with self.interrupts.allowed():
                    untimed.latency.time(untimed.networks, lambda share, note="": self.tell_timing(note))
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
            with beating(self.study, trial, claimed), self.interrupts.allowed():
                record = self.perform(job, claimed)
        except CandidateError as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:1000]

            def record() -> None:
                self.fail(job, reason)
        except BaseException:
            excuse(self.study, trial, claimed)
            raise
        with study_lock(self.url):
            if is_mine(self.study, trial, claimed):
                record()
