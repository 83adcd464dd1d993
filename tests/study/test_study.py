"""What a study records, what counts, how it ends, what it refuses, and whose claims on the lines of a race count."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState
from study_fixtures import IDENTITY, OBJECTIVE, Scores, TinySpace, load_sampler, opened, predict, searched, url

from hwnas.errors import CandidateError, ConfigError, SpaceError, StudyError, TrainingError
from hwnas.search import sampling
from hwnas.search.sampling import SearchEvent
from hwnas.space.architecture import Architecture
from hwnas.study import claims
from hwnas.study.objective import Objective
from hwnas.study.record import count, trial_rows
from hwnas.study.study import check_resumable, identity_of, load_study, open_study
from hwnas.system.clock import Deadline
from hwnas.system.run_folder import OF_EVERY_TRIAL


def by_outcome(study: optuna.Study, outcome: str) -> list[dict[str, Any]]:
    return [row for row in trial_rows(study) if row["outcome"] == outcome]


def test_every_evaluated_trial_records_all_of_it(tmp_path: Path) -> None:
    study, scores = opened(tmp_path), Scores()
    ended = searched(study, 3, estimator=scores)
    rows = trial_rows(study)
    assert (ended.ended, ended.counts.evaluated, len(set(scores.calls))) == ("done", 3, 3)
    assert all(tuple(row) == tuple(OF_EVERY_TRIAL) for row in rows)
    for row in by_outcome(study, "evaluated"):
        trial = study.trials[row["number"]]
        codes = np.array([trial.user_attrs["codes"]])
        assert trial.values == [row["top1_proxy"], row["latency_ms_predicted"]]
        assert row["latency_ms_predicted"] == pytest.approx(float(predict(codes).mean[0]))
        assert row["latency_ms_predicted_low"] < row["latency_ms_predicted"] < row["latency_ms_predicted_high"]
        assert row["reward"] == pytest.approx(OBJECTIVE.reward(row["top1_proxy"], row["latency_ms_predicted"]))
        assert TinySpace().decode(trial.params).id == row["id"]
        assert (row["state"], row["seconds"]) == ("COMPLETE", 0.5)
        assert row["feasible"] is True
        assert row["started"] <= row["finished"]


@pytest.mark.parametrize(("objective", "names"), [
    (Objective(1.0), ["top1", "latency_ms"]), (Objective(1.0, "reward"), ["reward"]), (Objective(1.0, "cap"), ["top1"]),
    (Objective(1.0, known=("latency_ms", "macs")), ["top1", "latency_ms", "macs"])])
def test_the_values_of_a_study_have_names(tmp_path: Path, objective: Objective, names: list[str]) -> None:
    opened(tmp_path, objective=objective)
    assert load_study(url(tmp_path)).metric_names == names


def test_over_the_cap_nothing_is_trained_and_progress_hears_every_trial(tmp_path: Path) -> None:
    study, scores, events = opened(tmp_path), Scores(), list[SearchEvent]()
    ended = searched(study, 4, estimator=scores, cap_ms=1.6, cap_quantile=0.95, progress=events.append)
    told = [event for event in events if event.kind != "training"]
    assert len(events) - len(told) == 4
    assert [event.number for event in told] == list(range(ended.counts.asks))
    assert [event.counts.evaluated for event in told][-1] == 4
    assert {event.kind for event in told} >= {"evaluated", "infeasible"}
    over = by_outcome(study, "infeasible")
    assert ended.counts.evaluated == len(scores.calls) == 4
    assert len(over) == ended.counts.infeasible > 0
    for row in over:
        trial = study.trials[row["number"]]
        assert trial.state == TrialState.PRUNED
        assert trial.constraints == {"latency_ms": pytest.approx(row["latency_ms_predicted_high"] - 1.6)}
        assert row["feasible"] is False
        assert row["id"] not in scores.calls
    for row in by_outcome(study, "evaluated"):
        assert row["latency_ms_predicted_high"] <= 1.6
        assert study.trials[row["number"]].constraints["latency_ms"] <= 0


def test_candidates_that_fail_do_not_count_and_are_not_tried_again(tmp_path: Path) -> None:
    def fail(architecture: Architecture) -> None:
        if int(architecture.id, 16) % 2:
            raise TrainingError("loss is\nnot finite")

    study, scores = opened(tmp_path), Scores(fail=fail)
    ended = searched(study, 3, estimator=scores)
    failed = by_outcome(study, "failed")
    assert (ended.ended, ended.counts.evaluated, ended.counts.failed) == ("done", 3, len(failed))
    assert failed
    assert {row["reason"] for row in failed} == {"TrainingError: loss is not finite"}
    assert {row["state"] for row in failed} == {"FAIL"}
    assert len(scores.calls) == len(set(scores.calls))


def test_a_score_that_is_no_number_fails_its_candidate(tmp_path: Path) -> None:
    class Diverges(Scores):
        def evaluate(self, *args: Any) -> Any:
            estimate = super().evaluate(*args)
            return estimate if len(self.calls) > 1 else type(estimate)(float("nan"), 0.0, 0.0, 0.0, "proxy")

    study = opened(tmp_path)
    searched(study, 2, estimator=Diverges())
    assert [row["reason"] for row in by_outcome(study, "failed")] == ["TrainingError: top-1 is nan"]


def test_programming_errors_propagate_and_lose_no_trial(tmp_path: Path) -> None:
    def fail(architecture: Architecture) -> None:
        raise AssertionError("a bug")

    study = opened(tmp_path)
    with pytest.raises(AssertionError, match="a bug"):
        searched(study, 3, estimator=Scores(fail=fail))
    assert searched(opened(tmp_path), 3).counts.evaluated == 3
    assert len(study.trials) == 3  # the trial was taken up


def test_duplicates_cost_nothing_and_do_not_count(tmp_path: Path) -> None:
    space, scores = TinySpace(1), Scores()
    study = opened(tmp_path)
    same = [space.to_params(np.array(codes)) for codes in ([0, 0, 0], [0, 0, 1], [0, 0, 0], [2, 1, 1])]
    assert space.decode(same[0]).id == space.decode(same[1]).id
    ended = searched(study, 2, space, scores, first=same)
    rows = trial_rows(study)
    assert [row["outcome"] for row in rows] == ["evaluated", "duplicate", "evaluated"]
    assert (rows[1]["duplicate_of"], rows[1]["state"], rows[1]["top1_proxy"]) == (0, "PRUNED", rows[0]["top1_proxy"])
    assert (ended.counts.evaluated, ended.counts.duplicates, len(scores.calls)) == (2, 1, 2)


def test_what_another_worker_trains_is_a_duplicate(tmp_path: Path) -> None:
    space, study = TinySpace(1), opened(tmp_path)
    name = space.decode(space.every()[0]).id
    claim = {"worker": "elsewhere/1/1", "claimed": 1, "beat": 0}
    study.add_trial(optuna.create_trial(state=TrialState.RUNNING, user_attrs={"architecture_id": name, "claim": claim}))

    def other_ends(event: SearchEvent) -> None:
        if event.kind == "waiting":
            study.tell(0, state=TrialState.FAIL)

    searched(study, 9, space, first=[space.every()[0]], max_asks=3, progress=other_ends)
    rows = trial_rows(study)
    assert (rows[1]["id"], rows[1]["outcome"], rows[1]["duplicate_of"]) == (name, "duplicate", 0)


def test_known_networks_come_first_and_once(tmp_path: Path) -> None:
    space = TinySpace()
    first = [space.every()[7], space.every()[100]]
    for n_trials in (1, 3):
        searched(opened(tmp_path), n_trials, space, first=first)
    params = [trial.params for trial in load_study(url(tmp_path)).trials]
    assert params[:2] == first
    assert all(params.count(known) == 1 for known in first)
    with pytest.raises((SpaceError, KeyError)):
        searched(opened(tmp_path), 6, space, first=[{"stage0.kernel": 3}])


@pytest.mark.parametrize("sampler", ["nsga2", *(
    pytest.param(name, marks=pytest.mark.soak) for name in ("random", "tpe"))])
def test_a_small_space_is_exhausted_and_the_search_says_so(tmp_path: Path, sampler: str) -> None:
    scores, space = Scores(), TinySpace(1, kernels=(3,))
    ended = searched(opened(tmp_path, sampler), 50, space, scores, max_asks=5000)
    assert (ended.ended, ended.counts.evaluated) == ("exhausted", space.n_architectures)
    assert len(set(scores.calls)) == len(scores.calls) == 5
    assert "every network of the space was seen: 5 of 50 architectures evaluated" in ended.reason


def test_no_trial_begins_after_its_time_but_three_are_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "LATE_S", 3600.0)  # whatever stops this machine meanwhile
    scores, study = Scores(), opened(tmp_path)
    ended = searched(study, 50, estimator=scores, until=Deadline.after(0.0))
    assert (ended.ended, ended.counts.evaluated, len(scores.calls)) == ("time", 3, 3)
    assert "minutes are over" in ended.reason
    assert searched(study, 5, estimator=scores, until=Deadline.after(9e9)).ended == "done"
    (tmp_path / "late").mkdir()
    ended = searched(opened(tmp_path / "late"), 50, until=Deadline.after(-1e6))  # far beyond it waits for no third
    assert (ended.ended, ended.counts.evaluated) == ("time", 1)
    (tmp_path / "failing").mkdir()

    def fail(*_: object) -> None:
        raise CandidateError("its loss is nan")

    monkeypatch.setattr(scores, "evaluate", fail)
    ended = searched(opened(tmp_path / "failing"), 50, estimator=scores, until=Deadline.after(-1e6))
    assert (ended.ended, ended.counts.evaluated) == ("time", 0)  # also if nothing can be evaluated


def test_asks_are_limited_in_total(tmp_path: Path) -> None:
    for _ in range(2):
        ended = searched(opened(tmp_path), 30, cap_ms=1.12, max_asks=6)
        assert (ended.ended, ended.counts.asks) == ("max_asks", 6)
        assert ended.reason.startswith(f"max_asks=6 reached: {ended.counts.evaluated} of 30 architectures evaluated")


def test_n_trials_is_the_total_over_restarts(tmp_path: Path) -> None:
    scores = Scores()
    for n_trials in (2, 2, 4):
        assert searched(opened(tmp_path), n_trials, estimator=scores).counts.evaluated == n_trials
    assert len(scores.calls) == 4


def test_the_reward_objective_has_one_direction(tmp_path: Path) -> None:
    single = Objective(1.4, "reward", "hard")
    study = opened(tmp_path, "tpe", objective=single)
    searched(study, 4, objective=single)
    assert [direction.name for direction in study.directions] == ["MAXIMIZE"]
    best = max(by_outcome(study, "evaluated"), key=lambda row: row["reward"])
    assert study.best_trial.number == best["number"]
    with pytest.raises(StudyError, match="cannot resume, objective was reward"):
        opened(tmp_path)


def test_another_identity_is_refused_by_what_changed_before_long_work_too(tmp_path: Path) -> None:
    check_resumable(url(tmp_path), IDENTITY)
    assert not list(tmp_path.iterdir())
    (tmp_path / "study.db").touch()  # a killed search's
    check_resumable(url(tmp_path), IDENTITY)
    opened(tmp_path)
    check_resumable(url(tmp_path), IDENTITY)
    changed = {**IDENTITY, "space": "tiny 9f9f", "seed": "3"}
    with pytest.raises(StudyError, match=r"cannot resume, space was tiny 1a2b, now tiny 9f9f; seed was not set, now 3"):
        opened(tmp_path, identity=changed)
    without = {key: value for key, value in IDENTITY.items() if key != "host"}
    with pytest.raises(StudyError, match="host was zen5-2, now not set"):
        opened(tmp_path, identity=without)
    assert identity_of(opened(tmp_path)) == {**IDENTITY, "objective": str(OBJECTIVE)}
    with pytest.raises(StudyError, match="cannot resume, seed was not set, now 3"):
        check_resumable(url(tmp_path), {**IDENTITY, "seed": "3"})


def test_studies_of_others_are_refused(tmp_path: Path) -> None:
    foreign = optuna.create_study(storage=url(tmp_path), study_name="hwnas", directions=["maximize", "minimize"])
    foreign.add_trial(optuna.create_trial(values=[0.1, 1.0]))
    for command in (lambda: opened(tmp_path), lambda: load_study(url(tmp_path))):
        with pytest.raises(StudyError, match="holds trials of another program"):
            command()


def test_databases_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StudyError, match=r"database of something else \(recipes\)"):
        opened(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("storage", "error", "match"), [
    ("study.db", ConfigError, "not a database URL"), ("sqlite://", ConfigError, "would be lost"),
    ("sqlite:////no/such/folder/study.db", StudyError, "Check that its folder exists"),
    ("carrierpigeon://host/x", ConfigError, "carrierpigeon is no database of hwnas")])
def test_bad_urls(storage: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        open_study(storage, IDENTITY, OBJECTIVE, load_sampler("random", 0))


def test_reading_needs_a_study(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"there is none\. Search first"):
        load_study(url(tmp_path))


def test_counts_take_an_architecture_once(tmp_path: Path) -> None:
    study = opened(tmp_path)
    attrs = {"architecture_id": "aa", "outcome": "evaluated"}
    for _ in range(2):
        study.add_trial(optuna.create_trial(values=[0.5, 1.0], user_attrs=attrs))
    counts = count(study.trials)
    assert (counts.evaluated, counts.duplicates, counts.asks) == (1, 1, 2)
    assert [row["outcome"] for row in trial_rows(study)] == ["evaluated", "duplicate"]


def claimed(claim: dict[str, Any] | None) -> FrozenTrial:
    return optuna.create_trial(state=TrialState.RUNNING, user_attrs={"claim": claim})


def test_a_second_claim_of_one_process_is_not_the_first_one_grown_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    claim = {"worker": "elsewhere/1/1", "claimed": 1, "beat": 0}
    beats = claims.Beats()
    assert beats.show_work(claimed(claim))
    now[0] += claims.GRACE_S / 2
    assert beats.show_work(claimed(claim))
    now[0] += claims.GRACE_S
    assert not beats.show_work(claimed(claim)), "it has been silent for too long"
    assert beats.show_work(claimed({**claim, "claimed": 2})), "it is at work on another leg"
    assert not beats.show_work(claimed(None))
