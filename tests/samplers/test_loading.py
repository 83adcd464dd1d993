"""Samplers by name: repeatable over interruptions, aware of the cap, and better than chance on real accuracies."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import TrialState
from study_fixtures import Scores, TinySpace, load_sampler, opened, searched

import hwnas.search.sampling
from hwnas.accuracy.estimator import Estimate
from hwnas.errors import ConfigError, UnknownName
from hwnas.samplers.loading import StudyView, check_sampler
from hwnas.study.objective import Objective


def asked(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [tuple(trial.params.values()) for trial in study.trials if trial.state != TrialState.FAIL]


@pytest.mark.parametrize("name", ["tpe", *(
    pytest.param(name, marks=pytest.mark.soak) for name in ("nsga2", "random"))])
def test_same_seed_same_trials_also_over_restarts(tmp_path: Path, name: str) -> None:
    first = {"tpe": {"n_startup_trials": 4}, "random": {}}.get(name, {"population_size": 4})

    def study(text: str, seed: int = 0) -> optuna.Study:
        (tmp_path / text).mkdir(exist_ok=True)
        return opened(tmp_path / text, name, seed, sampler_options=first)

    searched(study("whole"), 7, cap_ms=1.9)  # four at random, then what is learnt
    for n_trials in (3, 6, 7):
        searched(study("parts"), n_trials, cap_ms=1.9)
    searched(study("other", 1), 3, cap_ms=1.9, seed=1)
    assert asked(study("whole")) == asked(study("parts"))
    assert asked(study("whole"))[:3] != asked(study("other", 1))[:3]


def test_same_trials_after_an_interruption(tmp_path: Path) -> None:
    def study(name: str) -> optuna.Study:
        (tmp_path / name).mkdir(exist_ok=True)
        return opened(tmp_path / name, "nsga2", sampler_options={"population_size": 4})

    searched(study("a"), 7)

    class Impatient(Scores):
        def evaluate(self, *args: Any) -> Estimate:
            estimate = super().evaluate(*args)
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return estimate

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            searched(study("b"), 7, estimator=Impatient())
    searched(study("b"), 7)
    assert asked(study("a")) == asked(study("b"))


def test_a_genetic_sampler_learns_from_what_is_over_the_cap(tmp_path, monkeypatch):
    """Without the view, generations would hold COMPLETE trials only, and a tight cap would leave the search random."""
    monkeypatch.setattr(hwnas.search.sampling, "UNPRODUCTIVE", 10**9)
    study = opened(tmp_path, "nsga2")
    searched(study, 20, TinySpace(4), cap_ms=2.0)
    trials = study.trials
    feasible = [trial.state == TrialState.COMPLETE for trial in trials]
    assert np.mean(feasible[-15:]) > 2 * np.mean(feasible[:15])
    parents = StudyView(study).get_trials(states=(TrialState.COMPLETE,))
    assert len(parents) == sum(trial.user_attrs["outcome"] in ("evaluated", "infeasible") for trial in trials)


def test_queued_networks_join_a_generation(tmp_path: Path) -> None:
    space = TinySpace()
    study = opened(tmp_path, "nsga2")
    searched(study, 4, space, first=[space.every()[3], space.every()[200]])
    keys = [key for key in study.trials[0].system_attrs if key.endswith("generation")]
    assert keys
    assert [trial.system_attrs.get(keys[0]) for trial in study.trials] == [0, 0, 0, 0]


def test_the_view_hides_duplicates_and_stands_in_for_the_infeasible(tmp_path: Path) -> None:
    study = opened(tmp_path, "random")
    for state, values, attrs in (
            (TrialState.COMPLETE, [0.6, 1.0], {"outcome": "evaluated"}),
            (TrialState.COMPLETE, [0.8, 2.0], {"outcome": "evaluated"}),
            (TrialState.PRUNED, None, {"outcome": "infeasible", "latency_ms_predicted": 9.0}),
            (TrialState.PRUNED, None, {"outcome": "duplicate", "duplicate_of": 0})):
        study.add_trial(optuna.create_trial(state=state, values=values, user_attrs=attrs))
    seen = StudyView(study).get_trials()
    assert [(trial.number, trial.state.name, trial.values) for trial in seen] == [
        (0, "COMPLETE", [0.6, 1.0]), (1, "COMPLETE", [0.8, 2.0]), (2, "COMPLETE", [pytest.approx(0.7), 9.0])]
    assert study.trials[2].state == TrialState.PRUNED


@pytest.mark.parametrize("kind", ["pareto", pytest.param("reward", marks=pytest.mark.soak)])
def test_gp_searches_under_a_cap(tmp_path: Path, kind: str) -> None:
    objective = Objective(1.5, kind)
    study = opened(tmp_path, "gp", objective=objective, sampler_options={"n_startup_trials": 5})
    ended = searched(study, 7, objective=objective, cap_ms=1.8)
    assert (ended.ended, ended.counts.evaluated) == ("done", 7)
    assert any(key.startswith("gp:") for trial in study.trials for key in trial.system_attrs)


def test_names_load_and_unknown_names_and_options_are_refused() -> None:
    names = {"nsga2": "nsgaiis", "tpe": "tpe", "gp": "gp", "random": "random"}
    assert all(str(load_sampler(name, 0).inner).lower().startswith(begins) for name, begins in names.items())
    with pytest.raises(UnknownName, match=r"unknown sampler 'nsga'\. Did you mean nsga"):
        load_sampler("nsga", 0)
    with pytest.raises(UnknownName, match=r"key of sampler_options 'populationsize'\. Did you mean population_size"):
        load_sampler("nsga2", 0, populationsize=4)
    for options in ({"population_size": 1}, {"population_size": "ten"}, {"population_size": True}):
        with pytest.raises(ConfigError):
            load_sampler("nsga2", 0, **options)
    with pytest.raises(ConfigError, match="seed must be"):
        load_sampler("random", -1)


def test_third_parties_register_theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point = EntryPoint("mine", "study_plugin:make", "hwnas.samplers")
    monkeypatch.setattr(EntryPoint, "load", lambda self: lambda seed, *, odd: RandomSampler(seed=seed + odd))
    monkeypatch.setattr("hwnas.system.libraries.entry_points", lambda group: [point] * (group == "hwnas.samplers"))
    assert check_sampler("mine") == {"mine": point}
    assert searched(opened(tmp_path, "mine", sampler_options={"odd": 1}), 3).counts.evaluated == 3
    with pytest.raises(ConfigError, match="sampler mine"):
        load_sampler("mine", 0, even=2)
