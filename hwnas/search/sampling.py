"""A process of a search by estimates: it asks the sampler for networks until enough are evaluated.

A network that is known or over the cap costs nothing, and does not count. If the sampler repeats networks, an unseen
one is queued. Nothing here prints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState

from hwnas.accuracy.estimator import AccuracyEstimator, Estimate
from hwnas.errors import TrainingError
from hwnas.search.trial_weights import keep_weights, remove_worst
from hwnas.search.worker import Record, Worker
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.candidate import Candidate, SearchOptions
from hwnas.study.claims import CLAIM, end_trial
from hwnas.study.objective import Predict, upper_ms
from hwnas.study.record import (
    CAP,
    DUPLICATE,
    EVALUATED,
    FAILED,
    INFEASIBLE,
    LOST,
    Counts,
    count,
    find_settled,
    outcome,
)
from hwnas.study.storage import storage_errors
from hwnas.study.study import storage_of, study_lock
from hwnas.system.clock import Deadline

LEAST_EVALUATED = 3  # a front cannot be made of fewer networks
LATE_S, LATE_TRIALS = 10.0, 3  # beyond its time, a search waits for LEAST_EVALUATED networks: the larger of the two
UNPRODUCTIVE = 5  # after so many asks in a row without a training, a random unseen network is queued
ENUMERABLE = 100_000
_DRAW = 4096


@dataclass(frozen=True, slots=True)
class SearchEvent:
    """An event of a search. `kind` is training (it starts), waiting (for other workers), or the trial's outcome."""

    kind: str
    counts: Counts
    n_trials: int
    number: int | None = None
    id: str | None = None
    latency_ms: float | None = None
    top1: float | None = None


Ended = Literal["done", "time", "max_asks", "exhausted"]


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The end of a search: the reason, as a word and as a line to print, and the trials of all workers and restarts."""

    ended: Ended
    reason: str
    counts: Counts


class SamplingWorker(Worker[FrozenTrial]):
    """A worker that evaluates the networks that the study's sampler proposes.

    Once LEAST_EVALUATED networks are evaluated, no trial starts of which more than half would be after `until`. Before
    that, trials start for as long after it as so many take. `folder` keeps the weights that estimates come with.
    """

    def __init__(self, study: optuna.Study, space: SearchSpace, predict: Predict, estimator: AccuracyEstimator,
                 options: SearchOptions, until: Deadline | None = None,
                 progress: Callable[[SearchEvent], None] = lambda event: None, folder: Path | None = None) -> None:
        super().__init__(study)
        self.space, self.predict, self.estimator = space, predict, estimator
        self.options, self.until, self.progress, self.folder = options, until, progress, folder
        self.max_asks = options.max_asks or 20 * options.n_trials + 100
        self.end: tuple[Ended, str] | None = None
        self.counts = Counts(0, 0, 0, 0, 0, 0)
        self._unproductive, self._longest_s = 0, 0.0

    def search(self, first: Sequence[Mapping[str, Any]] = ()) -> SearchOutcome:
        """Work until the search is over; `first` are parameters of networks that are tried first, once in a study."""
        for params in first:
            self.space.decode(params)
        with storage_errors(self.url), study_lock(self.url):
            for params in first:
                self.study.enqueue_trial(dict(params), skip_if_exists=True)
        self.run()
        assert self.end is not None
        return SearchOutcome(*self.end, self.counts)

    def wanted(self) -> list[FrozenTrial] | None:
        """Return the trials that are at work or were when their process ended; otherwise a new one."""
        trials = self.study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        if ended := [trial for trial in running if "outcome" in trial.user_attrs or CLAIM not in trial.user_attrs]:
            for trial in ended:  # of a process that was killed at the end of it, or while it asked for it
                self._tidy(trial, trials)
            return None
        self.counts = counts = count(trials)
        # No process works on the free trials: they are done again, or lost if the search is over.
        free = [trial for trial in running if not self.beats.show_work(trial)]
        if self._is_over():
            for trial in free:
                self._end(trial, TrialState.FAIL, {"outcome": LOST})
            return [trial for trial in running if trial not in free]
        if free or counts.evaluated + counts.running >= self.options.n_trials:
            return [*free, *running]
        if self._unproductive and self._unproductive % UNPRODUCTIVE == 0:
            self._queue_unseen(trials)
        new_trial = self._ask(trials) if self.end is None else None
        return None if new_trial is None else [new_trial, *running]

    def trial_of(self, job: FrozenTrial) -> FrozenTrial:
        """Return the job itself, which is a trial."""
        return job

    def perform(self, job: FrozenTrial, claimed: Mapping[str, Any]) -> Record:
        """Estimate the top-1 of the trial's network."""
        network, latency_ms = self.space.decode(job.params), job.user_attrs["latency_ms_predicted"]
        self.progress(self._event("training", job))
        began = time.monotonic()
        estimate = self.estimator.evaluate(network, self.options.seed)
        if not math.isfinite(estimate.value):
            raise TrainingError(f"top-1 is {estimate.value}")
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        attrs = {} if self.folder is None else keep_weights(self.folder, job, estimate, self.estimator.fingerprint)
        return partial(self._finish, job, network, latency_ms, estimate, attrs)

    def fail(self, job: FrozenTrial, reason: str) -> None:
        """Record that the trial's network failed; it is not tried again."""
        self._unproductive += 1
        self._end(job, TrialState.FAIL, {"outcome": FAILED, "reason": reason})

    def tell_waiting(self, timing: str = "") -> None:
        """Say that other workers end their trials."""
        self.progress(SearchEvent("waiting", self.counts, self.options.n_trials))

    def _finish(self, trial: FrozenTrial, network: Architecture, latency_ms: float, estimate: Estimate,
                kept: Mapping[str, Any]) -> None:
        objective, top1 = self.options.objective, float(estimate.value)
        self._unproductive = 0
        self._end(trial, TrialState.COMPLETE, {
            "outcome": EVALUATED, "top1_proxy": top1, "top1_std": float(estimate.std),
            "seconds": float(estimate.seconds), "reward": objective.reward(top1, latency_ms), **kept},
            objective.values(top1, latency_ms, network))
        if self.folder is not None:
            with suppress(OSError):
                remove_worst(self.folder, self.study.get_trials(deepcopy=False))

    def _ask(self, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
        """Ask for a network; None if it needs no training."""
        storage = storage_of(self.study)
        trial = self.study.ask()
        with storage.params_together(trial):
            params = {parameter.name: trial.suggest_categorical(parameter.name, parameter.choices)
                      for parameter in self.space.parameters}
        codes = self.space.to_codes(params)
        candidate = Candidate(self.space.decode(params), self.predict(codes.reshape(1, -1)))
        constraints = candidate.constraints(self.options)
        storage.write_attrs(trial, {**candidate.facts(self.options), "codes": codes.tolist()}, constraints)
        new_trial = storage.fresh(trial)
        # A network that is known, or over the cap, ends its trial at once.
        if (earlier := find_settled(trials, running=True).get(candidate.architecture.id)) is not None:
            results: dict[str, Any] = {key: earlier.user_attrs[key] for key in ("top1_proxy", "top1_std", "reward")
                                       if key in earlier.user_attrs}
            self._end(new_trial, TrialState.PRUNED, {"outcome": DUPLICATE, "duplicate_of": earlier.number, **results})
        elif constraints.get(CAP, 0.0) > 0:
            self._end(new_trial, TrialState.PRUNED, {"outcome": INFEASIBLE})
        else:
            return new_trial
        self._unproductive += 1
        return None

    def _end(self, trial: FrozenTrial, state: TrialState, attrs: Mapping[str, Any],
             values: Sequence[float] | None = None) -> None:
        """Write the end of a trial, and say so."""
        end_trial(self.study, trial, state, attrs, values)
        ended = storage_of(self.study).fresh(trial)
        self.counts = count(self.study.get_trials(deepcopy=False))
        self.later.append(partial(self.progress, self._event(str(outcome(ended)), ended)))

    def _tidy(self, trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> None:
        """End a trial whose process was killed: as its outcome says, or as lost. A queued network is queued again."""
        attrs, objective = trial.user_attrs, self.options.objective
        if attrs.get("outcome") == EVALUATED:
            network = self.space.decode(trial.params)
            self._end(trial, TrialState.COMPLETE, {}, objective.values(
                attrs["top1_proxy"], attrs["latency_ms_predicted"], network))
            return
        fixed = trial.system_attrs.get("fixed_params")
        if "outcome" not in attrs and fixed and not any(
                other.system_attrs.get("fixed_params") == fixed and other.state == TrialState.WAITING
                for other in trials):
            self.study.enqueue_trial(fixed)
        ending = attrs.get("outcome", LOST)
        state = TrialState.PRUNED if ending in (DUPLICATE, INFEASIBLE) else TrialState.FAIL
        self._end(trial, state, {"outcome": ending})

    def _event(self, kind: str, trial: FrozenTrial) -> SearchEvent:
        attrs = trial.user_attrs
        return SearchEvent(kind, self.counts, self.options.n_trials, trial.number, attrs.get("architecture_id"),
                           attrs.get("latency_ms_predicted"), attrs.get("top1_proxy"))

    def _is_over(self) -> bool:
        counts, left_s = self.counts, math.inf if self.until is None else self.until.left_s
        # So many seconds must be left for another trial. It may start late if a front lacks networks.
        needed_s = self._longest_s / 2 if counts.evaluated >= LEAST_EVALUATED else \
            -max(LATE_S, LATE_TRIALS * self._longest_s)
        if self.end is not None:
            return True
        if counts.evaluated >= self.options.n_trials:
            self.end = "done", f"{counts.evaluated} architectures evaluated"
        elif left_s <= needed_s and (counts.evaluated or counts.failed):
            self.end = "time", f"its minutes are over, {counts.evaluated} architectures evaluated"
        elif counts.asks >= self.max_asks:
            self.end = "max_asks", (f"max_asks={self.max_asks} reached: {counts.evaluated} of {self.options.n_trials} "
                                    "architectures evaluated")
        return self.end is not None

    def _queue_unseen(self, trials: Sequence[FrozenTrial]) -> None:
        """Queue a network that no trial has had yet.

        It is the first of 4096 random draws that is within the cap, or else the draw nearest to it. If no draw is
        unseen, a small space is searched completely; the search ends if all its networks were seen.
        """
        if any(trial.state == TrialState.WAITING for trial in trials):
            return
        rng, seen = np.random.default_rng([self.options.seed, len(trials)]), find_settled(trials, running=True)
        params = self._first_unseen(self.space.sample(rng, _DRAW), seen)
        if params is None and self.space.size <= ENUMERABLE:
            choices = (range(len(parameter.choices)) for parameter in self.space.parameters)
            params = self._first_unseen(rng.permutation(np.array(list(product(*choices)))), seen)
            if params is None:
                self.end = "exhausted", (f"every network of the space was seen: {self.counts.evaluated} of "
                                         f"{self.options.n_trials} architectures evaluated")
        if params is not None:
            self.study.enqueue_trial(params)

    def _first_unseen(self, codes: NDArray[np.int64], seen: Container[str]) -> dict[str, Any] | None:
        """Return the parameters of an unseen network within the cap, or else nearest to it; None if all were seen."""
        if self.options.cap_ms is not None:
            over_ms = upper_ms(self.predict(codes), self.options.cap_quantile) - self.options.cap_ms
            codes = codes[np.argsort(np.maximum(over_ms, 0.0), kind="stable")]
        settings = (dict(self.space.to_params(row)) for row in codes)
        return next((params for params in settings if self.space.decode(params).id not in seen), None)
