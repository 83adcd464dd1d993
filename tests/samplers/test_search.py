"""The known-objective sampler in a search: repeatable over restarts, within the cap, with workers, reusing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from race_fixtures import SPACE, check_race, named, opened, predict, race, search, share
from study_fixtures import IDENTITY, OBJECTIVE, url

from hwnas.errors import StudyError
from hwnas.search.reuse import reuse_trials
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import Objective
from hwnas.study.record import REUSED
from hwnas.study.study import load_study


def asked(study: Any) -> list[Any]:
    return [trial.params for trial in study.trials if trial.state == TrialState.COMPLETE]


@pytest.mark.soak
def test_same_seed_same_networks_over_restarts_and_better_than_random_ones(tmp_path: Path) -> None:
    search(opened(tmp_path / "whole"), 14)  # the first eight are spread out, the others the model asks for
    for n in (9, 14):
        search(opened(tmp_path / "parts"), n)
    assert asked(opened(tmp_path / "whole")) == asked(opened(tmp_path / "parts"))
    search(opened(tmp_path / "random", "random"), 14)
    assert share(opened(tmp_path / "whole")) > share(opened(tmp_path / "random"))


@pytest.mark.parametrize("kind", ["pareto", "reward", "cap"])
def test_no_ask_is_over_the_cap_and_none_is_asked_twice(tmp_path: Path, kind: str) -> None:
    objective, cap_ms = Objective(0.4, kind), 0.42
    ended = search(opened(tmp_path / kind, objective=objective, cap_ms=cap_ms), 11, cap_ms=cap_ms, objective=objective)
    counts = ended.counts
    assert (counts.evaluated, counts.infeasible, counts.duplicates) == (11, 0, 0)  # the last three by the model


@pytest.mark.soak
def test_an_earlier_run_for_another_target_is_reused_once(tmp_path: Path) -> None:
    search(opened(tmp_path / "a"), 10)
    study = opened(tmp_path / "b", identity={**IDENTITY, "target": "ort_int8", "host": "other"})
    options = SearchOptions(4, OBJECTIVE, cap_ms=0.6)
    added = reuse_trials(study, tmp_path / "a", SPACE, predict, options)
    assert 0 < added <= 10
    assert reuse_trials(study, tmp_path / "a", SPACE, predict, options) == 0
    ended = search(study, 4, cap_ms=0.6)
    assert ended.counts.evaluated == 4  # evaluated here, besides those reused
    held = load_study(url(tmp_path / "b")).trials
    assert sum(REUSED in trial.user_attrs for trial in held) == added
    names = [trial.user_attrs["architecture_id"] for trial in held if trial.state == TrialState.COMPLETE]
    assert len(set(names)) == len(names) == 4 + added
    foreign = opened(tmp_path / "c", identity={**IDENTITY, "space": "fused 00"})
    with pytest.raises(StudyError, match=r"its space is tiny 1a2b, here it is fused 00"):
        reuse_trials(foreign, tmp_path / "a", SPACE, predict, options)


@pytest.mark.soak
def test_four_workers_find_what_one_finds(tmp_path: Path) -> None:
    told = race(tmp_path, 40, (0,))
    study = load_study(url(tmp_path), name=named(0))
    check_race(study, told[0], 40)
    search(opened(tmp_path / "alone"), 40)
    assert share(study, 40) > 0.93 * share(opened(tmp_path / "alone"))
