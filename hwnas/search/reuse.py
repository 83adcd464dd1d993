"""Reuse: take accuracies from an earlier search of the same space.

The two searches may have other targets or known objectives, because accuracy does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from hwnas.errors import StudyError
from hwnas.search.trial import SearchOptions
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import Predict, upper_ms
from hwnas.study.record import EVALUATED, REUSED, known, outcome
from hwnas.study.storage import storage_errors
from hwnas.study.study import database_path, identity_of, load_study, storage_of, study_lock

SAME = ("space", "data set", "accuracy")  # what accuracies depend on
_KEPT = ("architecture_id", "architecture", "codes", "top1_proxy", "top1_std", "curve", "stopped",
         "curve_epochs")


def reuse_trials(study: optuna.Study, folder: Path, space: SearchSpace, predict: Predict, options: SearchOptions
                 ) -> int:
    """Add the evaluated networks of the run in `folder` to `study` with this search's costs.

    Returns the number of added networks; a second call adds none. They count as known, but not as evaluated here.
    Networks over the cap are left out. Networks whose training was stopped are left out too: they could not enter the
    other search's front, but they may enter this one. StudyError when the runs differ in space, data set or accuracy.
    """
    earlier = load_study(database_path(folder))
    theirs, ours = identity_of(earlier), identity_of(study)
    for key in SAME:
        if theirs.get(key) != ours.get(key):
            raise StudyError(f"search.reuse={folder}: its {key} is {theirs.get(key)}, here it is {ours.get(key)}. "
                             "Accuracies carry over between targets only. Leave search.reuse out.")
    url = storage_of(study).url
    with study_lock(url), storage_errors(url):
        held = known(study.get_trials(deepcopy=False))
        usable = [trial for trial in earlier.get_trials(deepcopy=False) if outcome(trial) == EVALUATED
                  and trial.state == TrialState.COMPLETE and not trial.user_attrs.get("extrapolated")
                  and trial.user_attrs["architecture_id"] not in held]
        added = 0
        for trial in usable:
            carried = _carried_over(trial, folder, space, predict, options)
            if carried is not None and carried.user_attrs["architecture_id"] not in held:
                held[carried.user_attrs["architecture_id"]] = carried
                study.add_trial(carried)
                added += 1
    return added


def _carried_over(trial: FrozenTrial, folder: Path, space: SearchSpace, predict: Predict, options: SearchOptions
                  ) -> FrozenTrial | None:
    predicted = predict(space.to_codes(trial.params).reshape(1, -1))
    if options.cap_ms is not None and float(upper_ms(predicted, options.cap_quantile)[0]) > options.cap_ms:
        return None
    latency_ms, top1 = float(predicted.mean[0]), float(trial.user_attrs["top1_proxy"])
    objective, architecture = options.objective, space.decode(trial.params)
    attrs: Mapping[str, Any] = {
        **{key: trial.user_attrs[key] for key in _KEPT if key in trial.user_attrs},
        "outcome": EVALUATED, REUSED: str(folder), "seconds": 0.0, "seed": trial.user_attrs.get("seed"),
        "latency_ms_predicted": latency_ms, "latency_ms_predicted_low": float(np.asarray(predicted.low)[0]),
        "latency_ms_predicted_high": float(np.asarray(predicted.high)[0]),
        "reward": objective.reward(top1, latency_ms), **objective.costs(latency_ms, architecture)}
    distributions: dict[str, BaseDistribution] = {
        parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters}
    return optuna.create_trial(state=TrialState.COMPLETE, params=trial.params, distributions=distributions,
                               values=list(objective.values(top1, latency_ms, architecture)), user_attrs=dict(attrs))
