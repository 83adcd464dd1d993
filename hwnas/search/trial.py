"""One trial: decode, predict, skip known networks and those over the cap, train, record; or take what an earlier
search measured. Nothing here prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import TrialPruned, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from hwnas.accuracy.estimator import AccuracyEstimator
from hwnas.errors import CandidateError, StudyError, TrainingError, UserError
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import CAP_QUANTILE, Objective, Predict, upper_ms
from hwnas.study.record import (
    CAP,
    DEPLOYMENT,
    DUPLICATE,
    ERROR,
    EVALUATED,
    FAILED,
    INFEASIBLE,
    INTERRUPTED,
    REUSED,
    find_settled,
    outcome,
)
from hwnas.study.storage import requeue, storage_errors
from hwnas.study.study import database_path, identity_of, load_study, storage_of, study_lock
from hwnas.system.clock import Deadline
from hwnas.system.processes import Interrupts

if TYPE_CHECKING:
    from hwnas.latency.model import Predictions

INTERRUPTIONS = (KeyboardInterrupt, SystemExit)
LEAST_EVALUATED = 3  # of fewer networks no front can be made


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a search.

    `n_trials` is the number of architectures to evaluate, over all workers and restarts. `max_asks` limits the trials
    that are started, over the same (None: 20 * n_trials + 100). `cap_ms` is the hard cap on the `cap_quantile` of the
    predicted latency. `enqueue` holds the parameters of networks to try first, once in a study. Once LEAST_EVALUATED
    were evaluated, no trial begins that would lie more than half behind `until`. Until then trials begin for as long
    after it as so many take.
    """

    n_trials: int
    objective: Objective
    seed: int = 0
    max_asks: int | None = None
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE
    enqueue: Sequence[Mapping[str, Any]] = ()
    until: Deadline | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """The objects that every trial of a search works with."""

    study: optuna.Study
    space: SearchSpace
    predict: Predict
    estimator: AccuracyEstimator
    options: SearchOptions


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial: the attributes to write and, if it was evaluated, the study's values.

    If it was not evaluated, `reason` says why.
    """

    attrs: Mapping[str, Any]
    values: tuple[float, ...] | None = None
    reason: str = ""


@dataclass(slots=True)
class AtWork:
    """The trial of a worker, its result once there is one, and the error that it raised.

    With these the loop distinguishes failures of a trial from those of the study, and keeps a result that the study
    refused.
    """

    trial: optuna.Trial
    result: TrialResult | None = None
    error: BaseException | None = None

    @property
    def evaluated(self) -> TrialResult | None:
        """The result of a network that was trained."""
        return self.result if self.result is not None and self.result.values is not None else None


def run_trial(trial: optuna.Trial, setting: Setting, on_train: Callable[[int, str, float], None],
              interrupts: Interrupts) -> TrialResult:
    """Decode the trial's network, predict its latency, and estimate its top-1.

    A network that is known or over the cap is skipped. The facts known before training are written at once; the
    caller writes the result. `on_train` gets number, id and predicted latency (ms) before an estimate. CandidateError
    when the estimator fails.
    """
    storage, options = storage_of(setting.study), setting.options
    with storage.params_together(trial):
        params = {parameter.name: trial.suggest_categorical(parameter.name, parameter.choices)
                  for parameter in setting.space.parameters}
    architecture = setting.space.decode(params)
    codes = setting.space.to_codes(params)
    facts, constraints = facts_of(architecture, setting.predict(codes.reshape(1, -1)), options)
    storage.write_attrs(trial, {**facts, "codes": codes.tolist()}, constraints)
    latency_ms, over_ms = float(facts["latency_ms_predicted"]), constraints.get(CAP, 0.0)
    earlier = find_settled(same_architecture(setting.study, architecture.id), before=trial.number).get(architecture.id)
    if earlier is not None:
        return _duplicate(earlier)
    if over_ms > 0:
        return TrialResult({"outcome": INFEASIBLE}, reason=f"{over_ms:.4g} ms over the cap")
    on_train(trial.number, architecture.id, latency_ms)
    with interrupts.allowed():
        estimate = setting.estimator.evaluate(architecture, options.seed)
    if not math.isfinite(estimate.value):
        raise TrainingError(f"top-1 is {estimate.value}")
    values = options.objective.values(float(estimate.value), latency_ms, architecture)
    for other in same_architecture(setting.study, architecture.id):
        if other.state == TrialState.COMPLETE:  # Another worker evaluated it meanwhile; the first result stands.
            return _duplicate(other)
    reward = options.objective.reward(estimate.value, latency_ms)
    return TrialResult({
        "outcome": EVALUATED, "top1_proxy": float(estimate.value), "top1_std": float(estimate.std),
        "seconds": float(estimate.seconds), "reward": reward}, values)


def facts_of(architecture: Architecture, predicted: Predictions, options: SearchOptions
             ) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what is known of a network before training, as a trial's attributes, and how far it is over the cap.

    `predicted` holds its latency alone.
    """
    mean = float(predicted.mean[0])
    over = {} if options.cap_ms is None else {
        CAP: float(upper_ms(predicted, options.cap_quantile)[0]) - options.cap_ms}
    return {
        **_deployment_of(predicted), "architecture_id": architecture.id, "architecture": str(architecture),
        "seed": options.seed,
        "latency_ms_predicted": mean, "latency_ms_predicted_low": float(predicted.low[0]),
        "latency_ms_predicted_high": float(predicted.high[0]), **options.objective.costs(mean, architecture)}, over


def _deployment_of(predicted: Predictions) -> dict[str, str]:
    """The attribute that names the deployment of the only prediction, where there are several."""
    return {} if predicted.deployment is None else {DEPLOYMENT: str(predicted.deployment[0])}


def _duplicate(earlier: FrozenTrial) -> TrialResult:
    attrs: dict[str, Any] = {"outcome": DUPLICATE, "duplicate_of": earlier.number}
    attrs |= {key: earlier.user_attrs[key] for key in ("top1_proxy", "top1_std", "reward") if key in earlier.user_attrs}
    return TrialResult(attrs, reason=f"same architecture as trial {earlier.number}")


def same_architecture(study: optuna.Study, name: str) -> list[FrozenTrial]:
    """Every trial of the architecture `name`, in its present state."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get("architecture_id") == name]


def record_failure(study: optuna.Study, trial: optuna.Trial, error: BaseException) -> None:
    """Write why a trial failed, and queue it again if the network was not the reason."""
    if isinstance(error, TrialPruned | UpdateFinishedTrialError):
        return
    if isinstance(error, INTERRUPTIONS):
        kind, reason = INTERRUPTED, "interrupted"
    else:
        kind = FAILED if isinstance(error, CandidateError) else ERROR
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    storage = storage_of(study)
    try:
        storage.write_attrs(trial, {"outcome": kind, "reason": reason[:1000]})
        if kind == INTERRUPTED or isinstance(error, UserError):
            requeue(study, storage.fresh(trial), counts=False)
    except (UpdateFinishedTrialError, optuna.exceptions.StorageInternalError):
        return  # The trial's error is being raised, and it matters more.


def keep_result(study: optuna.Study, at_work: AtWork | None) -> bool:
    """Add the result of a trial that other workers gave up, as a finished trial; returns whether it was added.

    They give up a trial whose worker was stopped for longer than the heartbeat's grace. Nothing is added without a
    result, or when another worker has evaluated the architecture in the meantime.
    """
    if at_work is None or at_work.evaluated is None:
        return False
    storage, result = storage_of(study), at_work.evaluated
    lost = storage.fresh(at_work.trial)
    same = same_architecture(study, lost.user_attrs["architecture_id"])
    if lost.state != TrialState.FAIL or any(trial.state == TrialState.COMPLETE for trial in same):
        return False
    system = {key: value for key, value in lost.system_attrs.items() if key != "fixed_params"}
    study.add_trial(optuna.create_trial(
        state=TrialState.COMPLETE, values=list(result.values or ()), params=lost.params,
        distributions=lost.distributions, system_attrs=system,
        user_attrs={**lost.user_attrs, **result.attrs, "rescued_from": lost.number}))
    return True


def settle(study: optuna.Study, at_work: AtWork | None) -> None:
    """Leave no trial of this process running when the search ends by force, not even one that is being asked for.

    A trial with a result is finished. Any other is failed as interrupted and queued again.
    """
    storage = storage_of(study)
    for trial in storage.own(study):
        mine = at_work is not None and at_work.trial.number == trial.number
        if mine and at_work is not None and at_work.evaluated is not None:
            storage.write_attrs(trial, at_work.evaluated.attrs)
            storage.finish(trial, TrialState.COMPLETE, at_work.evaluated.values)
            continue
        storage.write_attrs(trial, {"outcome": INTERRUPTED, "reason": "interrupted"})
        storage.finish(trial, TrialState.FAIL)
        if not mine or at_work is None or at_work.error is None:
            requeue(study, trial, counts=False)


SAME = ("space", "data set", "accuracy")  # what accuracies depend on
_KEPT = ("architecture_id", "architecture", "codes", "top1_proxy", "top1_std")


def reuse_trials(study: optuna.Study, folder: Path, space: SearchSpace, predict: Predict, options: SearchOptions
                 ) -> int:
    """Add the evaluated networks of the run in `folder` to `study` with this search's costs.

    Returns the number of added networks; a second call adds none. They count as known, but not as evaluated here.
    Networks over the cap are left out. StudyError when the runs differ in space, data set or accuracy.
    """
    earlier = load_study(database_path(folder))
    before, now = identity_of(earlier), identity_of(study)
    for key in SAME:
        if before.get(key) != now.get(key):
            raise StudyError(f"search.reuse={folder}: its {key} is {before.get(key)}, here it is {now.get(key)}. "
                             "Accuracies carry over between targets only. Leave search.reuse out.")
    url = storage_of(study).url
    with study_lock(url), storage_errors(url):
        held = find_settled(study.get_trials(deepcopy=False))
        usable = [trial for trial in earlier.get_trials(deepcopy=False) if outcome(trial) == EVALUATED
                  and trial.state == TrialState.COMPLETE and trial.user_attrs["architecture_id"] not in held]
        added = 0
        for trial in usable:
            carried = _carried_over(trial, trial.params, folder, space, predict, options)
            if carried is not None and carried.user_attrs["architecture_id"] not in held:
                held[carried.user_attrs["architecture_id"]] = carried
                study.add_trial(carried)
                added += 1
    return added


def _carried_over(trial: FrozenTrial, params: Mapping[str, Any], folder: Path, space: SearchSpace, predict: Predict,
                  options: SearchOptions) -> FrozenTrial | None:
    predicted = predict(space.to_codes(params).reshape(1, -1))
    if options.cap_ms is not None and float(upper_ms(predicted, options.cap_quantile)[0]) > options.cap_ms:
        return None
    latency_ms, top1 = float(predicted.mean[0]), float(trial.user_attrs["top1_proxy"])
    objective, architecture = options.objective, space.decode(params)
    attrs: Mapping[str, Any] = {
        **{key: trial.user_attrs[key] for key in _KEPT if key in trial.user_attrs},
        **_deployment_of(predicted), "codes": space.to_codes(params).tolist(),
        "outcome": EVALUATED, REUSED: str(folder), "seconds": 0.0, "seed": trial.user_attrs.get("seed"),
        "latency_ms_predicted": latency_ms, "latency_ms_predicted_low": float(np.asarray(predicted.low)[0]),
        "latency_ms_predicted_high": float(np.asarray(predicted.high)[0]),
        "reward": objective.reward(top1, latency_ms), **objective.costs(latency_ms, architecture)}
    distributions: dict[str, BaseDistribution] = {
        parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters}
    return optuna.create_trial(state=TrialState.COMPLETE, params=dict(params), distributions=distributions,
                               values=list(objective.values(top1, latency_ms, architecture)), user_attrs=dict(attrs))
