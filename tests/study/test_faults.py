"""Workers that are killed, stopped, interrupted or locked out: nothing acknowledged is lost or counted twice."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from race_fixtures import Worker
from study_fixtures import IDENTITY, OBJECTIVE, Scores, TinySpace, opened, predict, searched, url

import hwnas.study.storage
from hwnas.errors import StudyError, UserError
from hwnas.export import command as export
from hwnas.search.loop import run_search
from hwnas.search.trial import SearchOptions
from hwnas.space.architecture import Architecture
from hwnas.study.record import LOST, count, trial_rows
from hwnas.study.storage import MAX_RETRIES
from hwnas.study.study import load_study, release_lost, storage_of, wait_for_others
from hwnas.system.processes import is_dead, worker_name
from hwnas.system.run_folder import RunFolder

Start = Callable[..., Worker]


def evaluated(folder: Path) -> list[dict[str, Any]]:
    return [row for row in trial_rows(load_study(url(folder))) if row["outcome"] == "evaluated"]


@pytest.mark.parametrize("word", ["training", pytest.param("told-evaluated", marks=pytest.mark.soak)])
def test_sigkill_loses_at_most_the_running_trial(tmp_path: Path, start: Start, word: str) -> None:
    worker = start(tmp_path, 50, 0.05, 30, 120)
    worker.until(word, 3)
    worker.kill()
    told = [line.split()[1:] for line in worker.lines if line.startswith("told-evaluated")]
    kept = {(str(row["number"]), row["id"]) for row in evaluated(tmp_path)}
    assert {tuple(pair) for pair in told} <= kept
    running = [trial for trial in load_study(url(tmp_path)).trials if trial.state == TrialState.RUNNING]
    assert len(running) <= 1
    # The same search goes on at once, long before the heartbeat's grace is over, and the lost trial is taken up.
    assert searched(opened(tmp_path, heartbeat_s=30, grace_s=120), len(kept) + 2).n_complete == len(kept) + 2
    names = [row["id"] for row in evaluated(tmp_path)]
    assert len(names) == len(set(names)) == len(kept) + 2
    assert {trial.user_attrs.get("architecture_id", names[0]) for trial in running} <= set(names)


def stop_without_lock(worker: Worker, database: Path) -> None:
    """SIGSTOP at a moment at which the worker does not write: nobody else could until it goes on."""
    state = Path(f"/proc/{worker.process.pid}/stat")
    for _ in range(1000):
        worker.process.send_signal(signal.SIGSTOP)
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        with contextlib.closing(sqlite3.connect(database, isolation_level=None, timeout=0.5)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                worker.process.send_signal(signal.SIGCONT)
                time.sleep(0.05)
    raise AssertionError("the worker writes all the time")


@pytest.mark.soak
def test_a_worker_stopped_past_the_grace_keeps_its_result(tmp_path: Path, start: Start) -> None:
    worker = start(tmp_path, 2, 1.5, 1, 2)
    worker.until("training")
    number, name = worker.lines[-1].split()[1:]
    stop_without_lock(worker, tmp_path / "study.db")
    study = opened(tmp_path, heartbeat_s=1, grace_s=2)
    deadline = time.monotonic() + 60
    while study.trials[int(number)].state == TrialState.RUNNING and time.monotonic() < deadline:
        release_lost(study)
        time.sleep(0.2)
    assert study.trials[int(number)].state == TrialState.FAIL
    worker.process.send_signal(signal.SIGCONT)
    code, error = worker.end()
    assert (code, error) == (0, "")
    rows = evaluated(tmp_path)
    trials = load_study(url(tmp_path)).trials
    rescued = [trial for trial in trials if trial.user_attrs.get("rescued_from") == int(number)]
    assert [trial.user_attrs["architecture_id"] for trial in rescued] == [name]
    assert rescued[0].values == [rescued[0].user_attrs["top1_proxy"], rescued[0].user_attrs["latency_ms_predicted"]]
    assert len(rows) == len({row["id"] for row in rows}) == 2
    assert worker.lines[-1] == "ended done 2"


def test_a_trial_given_up_between_its_result_and_the_telling_is_kept(tmp_path: Path) -> None:
    """The narrow window in which Optuna's own tell fails with an AssertionError."""
    study = opened(tmp_path)
    storage = storage_of(study)
    write_attrs = storage.write_attrs
    given_up = []

    def then_give_up(trial: Any, user: Any, constraints: Any = None) -> None:
        write_attrs(trial, user, constraints)
        if "top1_proxy" in user and not given_up:
            given_up.append(trial)
            storage.finish(trial, TrialState.FAIL)

    storage.write_attrs = then_give_up  # type: ignore[method-assign]
    scores = Scores()
    assert searched(study, 3, estimator=scores).n_complete == 3
    assert len(scores.calls) == 3
    assert [trial.user_attrs.get("rescued_from") for trial in study.trials if trial.state == TrialState.COMPLETE
            ].count(0) == 1


def test_a_result_that_cannot_be_told_is_one_line_and_is_kept(tmp_path: Path) -> None:
    """Optuna hides the database's error behind an assertion of its own."""
    study = opened(tmp_path)
    storage = storage_of(study)
    tell = storage.set_trial_state_values
    full = [True]

    def refuse(trial_id: int, state: TrialState, values: Any = None) -> bool:
        if state == TrialState.COMPLETE and full:
            full.clear()
            raise StorageInternalError("not written") from sqlite3.OperationalError("database or disk is full")
        return tell(trial_id, state, values)

    storage.set_trial_state_values = refuse  # type: ignore[method-assign]
    scores = Scores()
    with pytest.raises(StudyError, match=r"database or disk is full\. Free space on that disk"):
        searched(study, 3, estimator=scores)
    assert searched(opened(tmp_path), 3, estimator=scores).n_complete == 3
    assert len(scores.calls) == 3


def test_an_error_is_not_swallowed_where_the_trial_was_given_up(tmp_path: Path) -> None:
    study = opened(tmp_path)

    def fail(architecture: Architecture) -> None:
        storage_of(study).set_trial_state_values(study.trials[-1]._trial_id, TrialState.FAIL)
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        searched(study, 3, estimator=Scores(fail=fail))


def test_ctrl_c_ends_cleanly_and_the_same_command_goes_on(tmp_path: Path, start: Start) -> None:
    worker = start(tmp_path, 4, 20.0, 30, 120)
    worker.until("training")
    name = worker.lines[-1].split()[2]
    worker.process.send_signal(signal.SIGINT)
    assert worker.end() == (130, "")
    rows = trial_rows(load_study(url(tmp_path)))
    assert [(row["state"], row["outcome"], row["reason"]) for row in rows] == [("FAIL", "interrupted", "interrupted")]
    assert searched(opened(tmp_path), 4).n_complete == 4
    assert trial_rows(load_study(url(tmp_path)))[1]["id"] == name


@pytest.mark.parametrize("error", [SystemExit(3), UserError("disk full"), KeyboardInterrupt()])
def test_what_is_not_the_networks_fault_is_tried_again(tmp_path: Path, error: BaseException) -> None:
    def fail(architecture: Architecture) -> None:
        raise error

    study = opened(tmp_path)
    with pytest.raises(type(error)):
        searched(study, 2, estimator=Scores(fail=fail))
    assert [trial.state.name for trial in study.trials] == ["FAIL", "WAITING"]
    assert searched(study, 2).n_complete == 2
    assert study.trials[1].params == study.trials[0].params


@pytest.mark.parametrize("queued", [False, True])
def test_ctrl_c_while_the_sampler_asks_leaves_nothing_running(tmp_path, monkeypatch, queued):
    study = opened(tmp_path)
    if queued:
        study.enqueue_trial(TinySpace().every()[5])

    def interrupt(study: optuna.Study, trial: FrozenTrial) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(study.sampler, "before_trial", interrupt)
        with pytest.raises(KeyboardInterrupt):
            searched(study, 2)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "WAITING"][: 1 + queued]
    assert [row["outcome"] for row in trial_rows(study)] == ["interrupted"]
    assert searched(study, 2).n_complete == 2


def test_two_workers_share_one_study(tmp_path: Path, start: Start) -> None:
    workers = [start(tmp_path, 8, 0.2) for _ in range(2)]
    assert [worker.end() for worker in workers] == [(0, "")] * 2
    rows = trial_rows(load_study(url(tmp_path)))
    done = [row for row in rows if row["outcome"] == "evaluated"]
    assert 8 <= len(done) == len({row["id"] for row in done}) <= 9
    assert not [row for row in rows if row["state"] == "RUNNING"]
    trained = [sum(line.startswith("told-evaluated") for line in worker.lines) for worker in workers]
    assert min(trained) > 0
    assert sum(trained) == len(done)
    # The known network was queued once, whoever came first.
    fixed = [trial for trial in load_study(url(tmp_path)).trials if "fixed_params" in trial.system_attrs]
    assert len(fixed) == 1


def lock(folder: Path, seconds: float) -> threading.Thread:
    """Hold the write lock on the study for a while from another connection."""
    ready = threading.Event()

    def hold() -> None:
        connection = sqlite3.connect(folder / "study.db", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        ready.set()
        time.sleep(seconds)
        connection.execute("ROLLBACK")
        connection.close()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    return thread


def test_heartbeats_outlive_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hwnas.study.storage, "BUSY_S", 0.2)
    study = opened(tmp_path, heartbeat_s=1, grace_s=60)
    beats: list[float] = []

    def fail(architecture: Architecture) -> None:
        holder = lock(tmp_path, 1.8)
        with sqlite3.connect(tmp_path / "study.db") as connection:
            query = "SELECT heartbeat FROM trial_heartbeats"
            beats.append(connection.execute(query).fetchall())
            holder.join()
            deadline = time.monotonic() + 120
            while connection.execute(query).fetchall() == beats[0] and time.monotonic() < deadline:
                time.sleep(0.1)
            beats.append(connection.execute(query).fetchall())
        connection.close()

    assert searched(study, 1, estimator=Scores(fail=fail)).n_complete == 1
    assert len(beats) == 2
    assert beats[0] != beats[1]


def test_a_lock_that_stays_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hwnas.study.storage, "BUSY_S", 0.05)
    study = opened(tmp_path)
    holder = lock(tmp_path, 1.5)
    with pytest.raises(StudyError, match=r"study\.db: database is locked\. Another program holds it") as caught:
        searched(study, 1)
    holder.join()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("pragma", "match"), [
    ("PRAGMA max_page_count=34", "full. Free space on that disk"),
    ("PRAGMA query_only=1", "readonly database. Make file and folder writable")])
def test_a_disk_that_refuses_is_one_line(tmp_path, monkeypatch, pragma, match):
    searched(opened(tmp_path), 2)
    before = evaluated(tmp_path)
    monkeypatch.setattr(hwnas.study.storage, "PRAGMAS", (*hwnas.study.storage.PRAGMAS, pragma))
    monkeypatch.setattr("optuna.storages._rdb.storage.time.sleep", lambda seconds: None)
    with pytest.raises(StudyError, match=match) as caught:
        searched(opened(tmp_path), 300, TinySpace(3))
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert evaluated(tmp_path)[:2] == before
    assert searched(opened(tmp_path), 3 + len(evaluated(tmp_path))).ended == "done"


def test_damaged_databases_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    study = opened(tmp_path)
    searched(study, 3)
    storage_of(study).engine.dispose()
    whole = path.read_bytes()
    ends = 3 * 4096
    for content in (b"trials,top1\n" * 500, whole[: len(whole) // 2],
                    whole[:ends] + b"\xff" * (len(whole) - 2 * ends) + whole[-ends:]):
        path.write_bytes(content)
        with pytest.raises(StudyError, match=r"Move it away to start anew") as caught:
            searched(opened(tmp_path), 5)
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == content


def test_a_network_that_kills_its_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study, space = opened(tmp_path), TinySpace()
    params = space.every()[0]
    study.enqueue_trial(params)
    monkeypatch.setattr(hwnas.study.storage, "worker_name", lambda: worker_name().rsplit("/", 1)[0] + "/1")
    for _ in range(MAX_RETRIES + 1):
        assert study._pop_waiting_trial_id() is not None
        assert release_lost(study) == 1
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * (MAX_RETRIES + 1)
    assert {row["reason"] for row in trial_rows(study)} == {"its worker died or was stopped for too long"}


def test_who_is_dead() -> None:
    machine, pid, started = worker_name().rsplit("/", 2)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True,
                          check=True, timeout=300).stdout.strip()
    assert not is_dead(worker_name())
    assert is_dead(f"{machine}/{gone}/{started}")
    assert is_dead(f"{machine}/{pid}/{int(started) + 1}")
    assert not is_dead(f"elsewhere/{gone}/{started}")


@pytest.mark.parametrize("queued", [False, True])
def test_a_worker_killed_while_it_asks_is_noticed_at_once(tmp_path, monkeypatch, queued):
    study, space = opened(tmp_path), TinySpace()
    if queued:
        study.enqueue_trial(space.every()[5])
    gone = worker_name().rsplit("/", 1)[0] + "/1"
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(hwnas.study.storage, "worker_name", lambda: gone)
        study.ask()
    assert study.trials[0].state == TrialState.RUNNING
    assert release_lost(study) == 1
    assert study.trials[0].user_attrs == {"outcome": LOST}  # samplers do not learn it as failed
    assert [trial.state.name for trial in study.trials] == ["FAIL", "WAITING"][: 1 + queued]


def test_a_worker_elsewhere_that_never_began_to_train_is_given_up_after_the_grace(tmp_path, monkeypatch):
    study = opened(tmp_path, heartbeat_s=1, grace_s=1200)
    monkeypatch.setattr(hwnas.study.storage, "worker_name", lambda: "elsewhere/1/1")
    study._storage.create_new_trial(study._study_id)
    assert release_lost(study) == 0
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-1201 seconds')")
    connection.close()
    assert release_lost(study) == 1


def test_a_study_without_claims_is_read_and_its_running_trials_are_lost(tmp_path: Path) -> None:
    """An earlier hwnas left it, which named workers elsewhere."""
    study = opened(tmp_path)
    study.enqueue_trial(TinySpace().every()[5])
    study._pop_waiting_trial_id()
    storage_of(study).engine.dispose()
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("DROP TABLE hwnas_claims")
    connection.close()
    assert [row["outcome"] for row in trial_rows(load_study(url(tmp_path)))] == ["running"]
    assert searched(opened(tmp_path), 1).n_complete == 1
    assert [row["outcome"] for row in trial_rows(study)] == ["lost", "evaluated"]


@pytest.mark.soak
@pytest.mark.parametrize("searches", [False, True])
def test_a_search_and_the_verifier_wait_for_those_who_still_train(tmp_path: Path, start: Start, searches: bool) -> None:
    worker = start(tmp_path, 1, 1.0, 30, 120)
    worker.until("training")
    waited: list[int] = []
    study, scores = opened(tmp_path), Scores()
    if searches:
        assert run_search(study, TinySpace(), predict, scores, SearchOptions(1, OBJECTIVE)).n_complete == 1
    else:
        wait_for_others(study, poll_s=0.1, waiting=waited.append)
        assert set(waited) == {1}
    assert (count(study.get_trials(deepcopy=False)).evaluated, scores.calls) == (1, [])


def test_reading_leaves_the_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path)
    searched(study, 2)
    storage_of(study).engine.dispose()
    read_only(monkeypatch)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(trial_rows(load_study(url(tmp_path)))) >= 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_identity_survives_a_kill_while_the_study_is_made(tmp_path: Path) -> None:
    optuna.create_study(storage=url(tmp_path), study_name="hwnas", directions=["maximize", "minimize"])
    assert searched(opened(tmp_path, identity=IDENTITY), 1).n_complete == 1


def read_only(patch: pytest.MonkeyPatch) -> None:
    """Let no folder be written."""
    access = os.access
    patch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))


def alone(folder: Path, to: Path) -> set[int]:
    """Numbers of the evaluated trials in a copy of study.db without the files beside it."""
    to.mkdir()
    shutil.copyfile(folder / "study.db", to / "study.db")
    return {row["number"] for row in evaluated(to)}


@pytest.mark.soak
def test_after_a_kill_the_next_command_folds_the_log_in_and_reading_needs_no_command(
        tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.write_config({"seed": 0})
    worker = start(run.path, 50, 0.05, 30, 120)
    worker.until("told-evaluated", 4)
    worker.kill()
    told = {int(line.split()[1]) for line in worker.lines if line.startswith("told-evaluated")}
    assert run.study.with_name("study.db-wal").stat().st_size > 0
    with monkeypatch.context() as patch:
        read_only(patch)
        assert told <= {row["number"] for row in evaluated(run.path)}
        assert export([f"run={run.path}", f"out={tmp_path / 'copy'}"]) == 0
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {".hwnas.json", "config.yaml", "study.db"}
    assert told <= alone(tmp_path / "copy", tmp_path / "of the copy")

    beside = sqlite3.connect(run.study)  # else SQLite folds the log in by itself where the last connection closes
    beside.execute("select * from trials").fetchall()
    study = opened(run.path)
    assert told <= alone(run.path, tmp_path / "at the start")
    searched(study, len(told) + 2)
    del study
    gc.collect()
    assert len(alone(run.path, tmp_path / "at the end")) >= len(told) + 2
    beside.close()
    capsys.readouterr()
    for out in (tmp_path / "copy", run.path / "inside"):
        assert export([f"run={run.path}", f"out={out}"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_log_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path)
    searched(study, 1)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("study.db", "study.db-wal"):
        shutil.copyfile(tmp_path / name, copy / name)
    (copy / "study.db-shm").symlink_to(tmp_path / "nowhere" / "x")  # SQLite cannot make its index of the log
    read_only(monkeypatch)
    with pytest.raises(StudyError, match=r"its last trials stand in study\.db-wal, .* Copy both files"):
        load_study(url(copy))
