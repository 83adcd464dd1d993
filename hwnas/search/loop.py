"""The loop of a search: it asks until enough networks are evaluated, and draws an unseen one when asks repeat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.exceptions import StorageInternalError, TrialPruned, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from hwnas.accuracy.estimator import AccuracyEstimator
from hwnas.errors import CandidateError
from hwnas.search.trial import (
    LEAST_EVALUATED,
    AtWork,
    SearchOptions,
    Setting,
    keep_result,
    record_failure,
    run_trial,
    settle,
)
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import Predict, upper_ms
from hwnas.study.record import Counts, count, find_settled, outcome
from hwnas.study.storage import storage_errors
from hwnas.study.study import release_lost, storage_of, study_lock
from hwnas.system.processes import Interrupts

_DRAW = 256
ENUMERABLE = 100_000
LATE_S, LATE_TRIALS = 10.0, 3  # beyond its time, a search waits for LEAST_EVALUATED networks: the larger of the two


def unseen_params(space: SearchSpace, seen: Container[str], over_ms: Callable[[NDArray[np.int64]], NDArray[np.float64]],
                  rng: np.random.Generator) -> dict[str, Any] | None:
    """Parameters of a random network whose id is not in `seen`, within the cap if possible.

    `over_ms(codes)` says how far networks are over the cap. The result is the first of 4096 random draws that is
    unseen and within the cap; otherwise it is the unseen draw nearest to the cap. If there is none, a small space is
    searched completely: None means that all its networks were seen. In a large space, None means that the draws
    found none.
    """
    codes = np.asarray(space.sample(rng, 16 * _DRAW), dtype=np.int64)
    params = _first_unseen(space, codes, seen, over_ms)
    if params is None and space.size <= ENUMERABLE:
        everything = np.array(list(product(*(range(len(parameter.choices)) for parameter in space.parameters))))
        params = _first_unseen(space, rng.permutation(everything), seen, over_ms)
    return params


def _first_unseen(space: SearchSpace, codes: NDArray[np.int64], seen: Container[str],
                  over_ms: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> dict[str, Any] | None:
    order = np.argsort(np.maximum(over_ms(codes), 0.0), kind="stable")
    for row in codes[order]:
        params = space.to_params(row)
        if space.decode(params).id not in seen:
            return dict(params)
    return None


UNPRODUCTIVE = 5  # after so many asks in a row without a training, a random unseen network is queued
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class SearchEvent:
    """An event of the loop. `kind` is training (it begins), waiting (for other workers), or the trial's outcome."""

    kind: str
    counts: Counts
    n_trials: int
    number: int | None = None
    id: str | None = None
    latency_ms: float | None = None
    top1: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The end of the search, over all workers and restarts: `ended` as a word, `reason` as a line to print."""

    ended: Literal["done", "time", "max_asks", "exhausted"]
    reason: str
    n_complete: int
    n_pruned: int
    n_failed: int
    n_duplicates: int
    n_asks: int



def run_search(study: optuna.Study, space: SearchSpace, predict: Predict, estimator: AccuracyEstimator,
               options: SearchOptions, progress: Callable[[SearchEvent], None] = lambda event: None) -> SearchOutcome:
    """Work on `study` until it is done, as one of any number of workers; see `SearchOptions`.

    A CandidateError fails its trial, and the search goes on. Every other error ends the search. Programming errors
    are raised as they are, and database errors as a StudyError. Ctrl-C marks its trial and queues it again, and is
    raised as KeyboardInterrupt.
    """
    url = storage_of(study).url
    search = _Search(Setting(study, space, predict, estimator, options), progress)
    with storage_errors(url), search.interrupts.held():
        try:
            with study_lock(url):
                release_lost(study)
                for params in options.enqueue:
                    space.decode(params)
                    study.enqueue_trial(dict(params), skip_if_exists=True)
            return search.run()
        except BaseException:
            # The error that ended the search matters more than a database that cannot record it.
            with contextlib.suppress(StorageInternalError, UpdateFinishedTrialError):
                settle(study, search.at_work)
            raise


class _Search:
    def __init__(self, setting: Setting, progress: Callable[[SearchEvent], None]) -> None:
        self.setting, self.study, self.options, self.progress = setting, setting.study, setting.options, progress
        self.max_asks = setting.options.max_asks or 20 * setting.options.n_trials + 100
        self.interrupts = Interrupts()
        self.at_work: AtWork | None = None
        self.ended: SearchOutcome | None = None
        self.unproductive = 0
        self.began, self.longest_s = 0.0, 0.0
        self.counts = Counts(0, 0, 0, 0, 0, 0, 0)

    def run(self) -> SearchOutcome:
        self._look()
        while self.ended is None:
            try:
                self.study.optimize(self._evaluate, catch=(CandidateError,), callbacks=[self._after_trial])
            except (AssertionError, ValueError, UpdateFinishedTrialError) as error:
                # Optuna raises this when others failed the trial while this worker was stopped.
                self._check_given_up(error)
                keep_result(self.study, self.at_work)
                self._look()
        return self.ended

    def _evaluate(self, trial: optuna.Trial) -> tuple[float, ...]:
        """Run one trial and write its result; Optuna gets its values, or that it was skipped."""
        self.began = time.monotonic()
        self.at_work = at_work = AtWork(trial)
        try:
            at_work.result = result = run_trial(trial, self.setting, self._on_train, self.interrupts)
            storage_of(self.study).write_attrs(trial, result.attrs)
            if result.values is None:
                raise TrialPruned(result.reason)
            return result.values
        except BaseException as error:
            at_work.error = error
            record_failure(self.study, trial, error)
            raise

    def _check_given_up(self, error: BaseException) -> None:
        """Return if another process gave up the trial at work; otherwise raise the real error."""
        if isinstance(error.__context__, StorageInternalError):  # Optuna's assertion hides that nothing was written
            raise error.__context__
        at_work = self.at_work
        raised = None if at_work is None else at_work.error
        if raised is not None and not isinstance(raised, (TrialPruned, CandidateError, UpdateFinishedTrialError)):
            raise raised
        if at_work is None or storage_of(self.study).fresh(at_work.trial).state != TrialState.FAIL:
            raise error

    def _on_train(self, number: int, name: str, latency_ms: float) -> None:
        self.progress(SearchEvent("training", self.counts, self.options.n_trials, number, name, latency_ms))

    def _after_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        trained = self.at_work is not None and self.at_work.evaluated is not None
        self.at_work = None
        if trained:
            self.longest_s = max(self.longest_s, time.monotonic() - self.began)
        self.interrupts.check()
        self.unproductive = 0 if trained else self.unproductive + 1
        self._look(trial)
        if self.ended is None and self.unproductive and self.unproductive % UNPRODUCTIVE == 0:
            self._queue_unseen()
        if self.ended is not None:
            study.stop()

    def _look(self, trial: FrozenTrial | None = None) -> None:
        """Count the trials, report progress, and see whether the search is over; waits for the other workers' last."""
        self.counts = count(self.study.get_trials(deepcopy=False))
        if trial is not None:
            attrs = trial.user_attrs
            self.progress(SearchEvent(
                str(outcome(trial)), self.counts, self.options.n_trials, trial.number, attrs.get("architecture_id"),
                attrs.get("latency_ms_predicted"), attrs.get("top1_proxy"), attrs.get("reason")))
        while not self._over() and self.counts.evaluated + self.counts.running >= self.options.n_trials:
            self.progress(SearchEvent("waiting", self.counts, self.options.n_trials))
            with self.interrupts.allowed():
                time.sleep(POLL_S)
            release_lost(self.study)
            self.counts = count(self.study.get_trials(deepcopy=False))

    def _over(self) -> bool:
        counts = self.counts
        if counts.evaluated >= self.options.n_trials:
            self._end("done", f"{counts.evaluated} architectures evaluated")
        elif self.options.until is not None and counts.evaluated and self.options.until.left_s <= self._spare_s():
            self._end("time", f"its minutes are over, {counts.evaluated} architectures evaluated")
        elif counts.asks >= self.max_asks:
            self._end("max_asks", f"max_asks={self.max_asks} reached")
        return self.ended is not None

    def _spare_s(self) -> float:
        """The seconds that must be left for another trial; below 0 where a front lacks networks."""
        if self.counts.evaluated >= LEAST_EVALUATED:
            return self.longest_s / 2
        return -max(LATE_S, LATE_TRIALS * self.longest_s)

    def _end(self, ended: Literal["done", "time", "max_asks", "exhausted"], reason: str) -> None:
        counts, wanted = self.counts, self.options.n_trials
        if ended not in ("done", "time"):
            reason += (f": {counts.evaluated} of {wanted} architectures evaluated in {counts.asks} asks "
                       f"({counts.infeasible} over the cap, {counts.duplicates} duplicates, {counts.failed} failed)")
        self.ended = SearchOutcome(ended, reason, counts.evaluated, counts.infeasible, counts.failed,
                                   counts.duplicates, counts.asks)

    def _queue_unseen(self) -> None:
        """Queue a network that no trial has had yet, or end the search when there is none."""
        trials = self.study.get_trials(deepcopy=False)
        if any(trial.state == TrialState.WAITING for trial in trials):
            return
        seen = {*find_settled(trials), *(str(trial.user_attrs.get("architecture_id")) for trial in trials
                                  if trial.state == TrialState.RUNNING)}
        rng = np.random.default_rng([self.options.seed, len(trials)])
        params = unseen_params(self.setting.space, seen, self._over_ms, rng)
        if params is not None:
            self.study.enqueue_trial(params)
        elif self.setting.space.size <= ENUMERABLE:
            self._end("exhausted", "every network of the space was seen")

    def _over_ms(self, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        if self.options.cap_ms is None:
            return np.zeros(len(codes))
        return upper_ms(self.setting.predict(codes), self.options.cap_quantile) - self.options.cap_ms
