"""A process of a search: it claims the job that is wanted most, does it, and records the result.

Any number of them share a search through its study. A process that is killed loses its claim, and the next one that
comes does the job. Recorded results stay.
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
PATIENCE_S = 3600.0  # for the study's lock: a trained network is not lost because it is busy
Job = TypeVar("Job")
Record = Callable[[], None]  # writes the result of a job


class Worker(ABC, Generic[Job]):
    """One of any number of processes that work on a study. A job that ended `most_tries` of them fails."""

    most_tries = MOST_TRIES

    def __init__(self, study: optuna.Study) -> None:
        self.study = study
        self.interrupts, self.beats = Interrupts(), Beats()
        self.later: list[Callable[[], None]] = []  # calls that report, once the study is not locked any more

    def run(self) -> None:
        """Work until the search is over.

        A CandidateError ends its candidate, and the search goes on. Any other error, and Ctrl-C, leaves the job to the
        next process and is raised, database errors as a StudyError.
        """
        with storage_errors(self.url), self.interrupts.held():
            while (claimed_job := self._take()) is not None:
                self._do(*claimed_job)

    @property
    def url(self) -> str:
        """The URL of the study's database."""
        return storage_of(self.study).url

    @abstractmethod
    def wanted(self) -> Sequence[Job] | None:
        """Write what needs no work, and return the jobs to do now, most wanted first, also the ones that others do. An
        empty list ends the search. None: something has changed, and must be looked at again. Others wait meanwhile."""

    @abstractmethod
    def trial_of(self, job: Job) -> FrozenTrial:
        """Return the trial of a job."""

    def describe(self, job: Job) -> dict[str, Any]:
        """Return the content of a claim on a job: all that another process needs to go on with it."""
        return {}

    @abstractmethod
    def perform(self, job: Job, claimed: Mapping[str, Any]) -> Record:
        """Do a job, and return the function that records it, which is called under the study's lock. Raises
        CandidateError if the job's network is the reason that it cannot be done."""

    @abstractmethod
    def fail(self, job: Job, reason: str) -> None:
        """Record that a job's network failed."""

    def tell_waiting(self, timing: str = "") -> None:
        """Report that others work and there is no other job, or how far the `timing` of networks is."""

    def _take(self) -> tuple[Job, Mapping[str, Any]] | None:
        """Claim the next job. Returns None when the search is over."""
        while True:
            try:
                with study_lock(self.url, PATIENCE_S):
                    # The first job that nobody works on is claimed, under the lock, or given up after too many tries.
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
        """Do what was claimed, and record it, unless another process took it over after a long silence."""
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
                with study_lock(self.url, PATIENCE_S):  # it may wait for the lock for longer than a claim lasts
                    beats.close()  # a beat after the record would claim the trial once more
                    if is_mine(self.study, trial, claimed):
                        record()
        except (KeyboardInterrupt, SystemExit, UserError):
            leave(self.study, trial, claimed)
            raise
        finally:
            put_down(claimed)
        self._speak()

    def _speak(self) -> None:
        """Make the calls that waited while the study was locked, as listeners may be slow."""
        calls, self.later = self.later, []
        for call in calls:
            call()
