"""The accuracies of an earlier search, taken over into a new one with the new one's costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from hwnas.errors import StudyError
from hwnas.space.search_space import SearchSpace
from hwnas.study.candidate import Candidate, SearchOptions
from hwnas.study.objective import Predict
from hwnas.study.record import CAP, EVALUATED, REUSED, find_settled, outcome
from hwnas.study.storage import storage_errors
from hwnas.study.study import database_path, identity_of, load_study, storage_of, study_lock

SAME = ("space", "data set", "accuracy")  # what accuracies depend on
_KEPT = ("top1_proxy", "top1_std", "seed")


def check_reusable(folder: Path, identity: Mapping[str, str]) -> None:
    """Raise StudyError if the run in `folder` differs from this `identity`, or part of one, in what accuracies depend
    on."""
    before = identity_of(load_study(database_path(folder)))
    for key in SAME:
        if key in identity and before.get(key) != identity[key]:
            raise StudyError(f"search.reuse={folder}: its {key} is {before.get(key)}, here it is {identity[key]}. "
                             "Accuracies carry over between targets only. Leave search.reuse out.")


def reuse_trials(study: optuna.Study, folder: Path, space: SearchSpace, predict: Predict, options: SearchOptions
                 ) -> int:
    """Add the evaluated networks of the run in `folder` to `study` with this search's costs.

    Returns the number of added networks; a second call adds none. They count as known, but not as evaluated here.
    Networks over the cap are left out. Raises StudyError if the runs differ in space, data set or accuracy.
    """
    check_reusable(folder, identity_of(study))
    earlier, url = load_study(database_path(folder)), storage_of(study).url
    with study_lock(url), storage_errors(url):
        settled = find_settled(study.get_trials(deepcopy=False))
        usable = [trial for trial in earlier.get_trials(deepcopy=False) if outcome(trial) == EVALUATED
                  and trial.state == TrialState.COMPLETE and trial.user_attrs["architecture_id"] not in settled]
        added = 0
        for trial in usable:
            carried = _carry_over(trial, folder, space, predict, options)
            if carried is not None and carried.user_attrs["architecture_id"] not in settled:
                settled[carried.user_attrs["architecture_id"]] = carried
                study.add_trial(carried)
                added += 1
    return added


def _carry_over(trial: FrozenTrial, folder: Path, space: SearchSpace, predict: Predict, options: SearchOptions
                ) -> FrozenTrial | None:
    """Return an earlier trial as one of this search; None if its network is over the cap."""
    params = trial.params
    codes, architecture = space.to_codes(params), space.decode(params)
    candidate = Candidate(architecture, predict(codes.reshape(1, -1)))
    if candidate.constraints(options).get(CAP, 0.0) > 0:
        return None
    objective, latency_ms, top1 = options.objective, candidate.latency_ms, float(trial.user_attrs["top1_proxy"])
    attrs: dict[str, Any] = {
        **candidate.facts(options), **{key: trial.user_attrs[key] for key in _KEPT if key in trial.user_attrs},
        "codes": codes.tolist(), "outcome": EVALUATED, REUSED: str(folder), "seconds": 0.0,
        "reward": objective.reward(top1, latency_ms)}
    distributions: dict[str, BaseDistribution] = {
        parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters}
    return optuna.create_trial(state=TrialState.COMPLETE, params=dict(params), distributions=distributions,
                               values=list(objective.values(top1, latency_ms, architecture)), user_attrs=attrs)
