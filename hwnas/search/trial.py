"""One trial: decode, predict, skip what is known or over the cap, train, record. Nothing here prints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from hwnas.accuracy.estimator import Estimate, EvaluatesAmong
from hwnas.errors import CandidateError, TrainingError, UserError
from hwnas.space.architecture import Architecture
from hwnas.study.costs import KNOWN, LATENCY
from hwnas.study.objective import CAP_QUANTILE, Objective, Predict, upper_ms
from hwnas.study.record import (
    CAP,
    DUPLICATE,
    ERROR,
    EVALUATED,
    FAILED,
    INFEASIBLE,
    INTERRUPTED,
    curves,
    evaluated_networks,
    known,
)
from hwnas.study.study import requeue, storage_of
from hwnas.system.processes import worker_name
from hwnas.system.signals import Interrupts

INTERRUPTIONS = (KeyboardInterrupt, SystemExit)


class Space(Protocol):
    """What a search needs of a search space; `hwnas.space.SearchSpace` has it."""

    @property
    def parameters(self) -> tuple[Any, ...]: ...
    @property
    def size(self) -> int: ...
    @property
    def n_architectures(self) -> int: ...
    def decode(self, params: Mapping[str, Any]) -> Architecture: ...
    def to_codes(self, params: Mapping[str, Any]) -> NDArray[np.int64]: ...
    def to_params(self, codes: NDArray[np.int64]) -> dict[str, Any]: ...
    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]: ...


class Estimator(Protocol):
    """Top-1 of an architecture; `history` is what earlier trials reached, epoch by epoch.

    One that also has `evaluate_among` (`hwnas.accuracy.EvaluatesAmong`) is asked by that.
    """

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]], seed: int) -> Estimate: ...


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search runs. `n_trials`: architectures evaluated in total, over all workers and restarts; `max_asks`:
    trials started in total (None: 20 for each of n_trials and 100); `cap_ms`: hard cap on the `cap_quantile` of the
    predicted latency; `enqueue`: parameters of networks to try first, once a study."""

    n_trials: int
    objective: Objective
    seed: int = 0
    max_asks: int | None = None
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE
    enqueue: Sequence[Mapping[str, Any]] = ()


class Evaluate:
    """The function that Optuna calls for each trial, and what it is at.

    `trial` is the one at work, `result` its values and attributes once it is trained, `raised` what it raised: with
    these the loop tells its own failures from those of the study, and keeps a result that the study refused.
    """

    def __init__(self, study: optuna.Study, space: Space, predict: Predict, estimator: Estimator,
                 options: SearchOptions, on_train: Callable[[int, str, float], None]) -> None:
        self.study, self.space, self.predict, self.estimator = study, space, predict, estimator
        self.options, self.on_train = options, on_train
        self.storage = storage_of(study)
        self.interrupts = Interrupts()
        self.trial: optuna.Trial | None = None
        self.result: tuple[tuple[float, ...], dict[str, Any]] | None = None
        self.raised: BaseException | None = None
        self._upper_ms = 0.0

    def __call__(self, trial: optuna.Trial) -> tuple[float, ...]:
        self.trial, self.result, self.raised = trial, None, None
        try:
            return self._run(trial)
        except BaseException as error:
            self.raised = error
            self._record_failure(trial, error)
            raise

    def _record_failure(self, trial: optuna.Trial, error: BaseException) -> None:
        if isinstance(error, TrialPruned | UpdateFinishedTrialError):
            return
        if isinstance(error, INTERRUPTIONS):
            kind, reason = INTERRUPTED, "interrupted"
        else:
            kind = FAILED if isinstance(error, CandidateError) else ERROR
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        try:
            self.storage.write_attrs(trial._trial_id, {"outcome": kind, "reason": reason[:1000]})
            if kind == INTERRUPTED or isinstance(error, UserError):
                requeue(self.study, self.storage.get_trial(trial._trial_id), counts=False)
        except (UpdateFinishedTrialError, optuna.exceptions.StorageInternalError):
            return  # The error itself is on its way and matters more.

    def _run(self, trial: optuna.Trial) -> tuple[float, ...]:
        with self.storage.params_together(trial._trial_id):
            params = {parameter.name: trial.suggest_categorical(parameter.name, parameter.choices)
                      for parameter in self.space.parameters}
        architecture = self.space.decode(params)
        latency_ms = self._record_prediction(trial, architecture, self.space.to_codes(params))
        self._skip_known(trial, architecture.id)
        over = 0.0 if self.options.cap_ms is None else self._upper_ms - self.options.cap_ms
        if over > 0:
            self.storage.write_attrs(trial._trial_id, {"outcome": INFEASIBLE})
            raise TrialPruned(f"{over:.4g} ms over the cap")
        self.on_train(trial.number, architecture.id, latency_ms)
        estimate = self._estimate(architecture, latency_ms)
        if not math.isfinite(estimate.value):
            raise TrainingError(f"top-1 is {estimate.value}")
        objective = self.options.objective
        attrs = {
            "outcome": EVALUATED, "top1_proxy": float(estimate.value), "top1_std": float(estimate.std),
            "seconds": float(estimate.seconds), "curve": [float(value) for value in estimate.curve],
            "stopped": bool(estimate.stopped), "reward": objective.reward(estimate.value, latency_ms)}
        if estimate.curve_epochs:
            attrs["curve_epochs"] = list(estimate.curve_epochs)
        if estimate.extrapolated:
            attrs["extrapolated"] = True
        values = objective.values(float(estimate.value), latency_ms, architecture)
        self._skip_evaluated(trial, architecture.id)
        self.result = values, attrs
        self.storage.write_attrs(trial._trial_id, attrs)
        return values

    def _estimate(self, architecture: Architecture, latency_ms: float) -> Estimate:
        trials = self.study._get_trials(deepcopy=False, use_cache=True)  # as they were at this trial's ask
        seed = self.options.seed
        if isinstance(self.estimator, EvaluatesAmong):
            costs = self.options.objective.costs(latency_ms, architecture) or {KNOWN[LATENCY].predicted: latency_ms}
            among = evaluated_networks(trials, list(costs))
            with self.interrupts.allowed():
                return self.estimator.evaluate_among(architecture, tuple(costs.values()), among, seed)
        history = curves(trials)
        with self.interrupts.allowed():
            return self.estimator.evaluate(architecture, history, seed)

    def _record_prediction(self, trial: optuna.Trial, architecture: Architecture, codes: NDArray[np.int64]) -> float:
        options, row = self.options, np.asarray(codes, dtype=np.int64).reshape(1, -1)
        found = self.predict(row)
        mean = float(found.mean[0])
        self._upper_ms = float(upper_ms(found, options.cap_quantile)[0])
        constraints = {CAP: self._upper_ms - options.cap_ms} if options.cap_ms is not None else {}
        self.storage.write_attrs(trial._trial_id, {
            "architecture_id": architecture.id, "architecture": str(architecture), "codes": row[0].tolist(),
            "seed": options.seed,
            "latency_ms_predicted": mean, "latency_ms_predicted_low": float(found.low[0]),
            "latency_ms_predicted_high": float(found.high[0]), **options.objective.costs(mean, architecture)},
            constraints)
        return mean

    def _skip_known(self, trial: optuna.Trial, name: str) -> None:
        earlier = known(same_architecture(self.study, name), before=trial.number).get(name)
        if earlier is not None:
            self._skip(trial, earlier)

    def _skip_evaluated(self, trial: optuna.Trial, name: str) -> None:
        """Another worker may have evaluated the same architecture meanwhile; the first result stands."""
        for other in same_architecture(self.study, name):
            if other.state == TrialState.COMPLETE:
                self._skip(trial, other)

    def _skip(self, trial: optuna.Trial, earlier: FrozenTrial) -> None:
        attrs: dict[str, Any] = {"outcome": DUPLICATE, "duplicate_of": earlier.number}
        for key in ("top1_proxy", "top1_std", "reward"):
            if key in earlier.user_attrs:
                attrs[key] = earlier.user_attrs[key]
        self.storage.write_attrs(trial._trial_id, attrs)
        raise TrialPruned(f"same architecture as trial {earlier.number}")


def same_architecture(study: optuna.Study, name: str) -> list[FrozenTrial]:
    """Every trial that was given the architecture `name`, as it is now."""
    ids = storage_of(study).with_attr(study._study_id, "architecture_id", name)
    return [study._storage.get_trial(trial_id) for trial_id in ids]


def keep_result(evaluate: Evaluate) -> bool:
    """Add the result of a trial that others gave up (its worker was stopped past the heartbeat's grace) as a finished
    trial; False when there is none, or when its architecture was evaluated by somebody else meanwhile."""
    if evaluate.trial is None or evaluate.result is None:
        return False
    lost = evaluate.storage.get_trial(evaluate.trial._trial_id)
    same = same_architecture(evaluate.study, lost.user_attrs["architecture_id"])
    if lost.state != TrialState.FAIL or any(trial.state == TrialState.COMPLETE for trial in same):
        return False
    values, attrs = evaluate.result
    system = {key: value for key, value in lost.system_attrs.items() if key != "fixed_params"}
    evaluate.study.add_trial(optuna.create_trial(
        state=TrialState.COMPLETE, values=list(values), params=lost.params, distributions=lost.distributions,
        user_attrs={**lost.user_attrs, **attrs, "rescued_from": lost.number}, system_attrs=system))
    evaluate.storage.flush()
    return True


def settle(evaluate: Evaluate) -> None:
    """Leave no trial of this process running when the search ends by force: finish it where its result is there,
    otherwise fail it as interrupted and queue it again. One that was still being asked for counts as well."""
    # From the database itself: what ended the search may have left Optuna's cache behind it.
    running = evaluate.storage.get_all_trials(evaluate.study._study_id, deepcopy=False, states=(TrialState.RUNNING,))
    for trial in [trial for trial in running if trial.user_attrs.get("worker") == worker_name()]:
        at_work = evaluate.trial is not None and evaluate.trial._trial_id == trial._trial_id
        if at_work and evaluate.result is not None:
            evaluate.storage.write_attrs(trial._trial_id, evaluate.result[1])
            evaluate.storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, evaluate.result[0])
            continue
        evaluate.storage.write_attrs(trial._trial_id, {"outcome": INTERRUPTED, "reason": "interrupted"})
        evaluate.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        if not at_work or evaluate.raised is None:
            requeue(evaluate.study, trial, counts=False)
