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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from race_fixtures import Worker
from study_fixtures import IDENTITY, Scores, TinySpace, opened, searched, url

import hwnas.study.storage
from hwnas.errors import StudyError, UserError
from hwnas.export import command as export
from hwnas.space.architecture import Architecture
from hwnas.study import claims
from hwnas.study.record import trial_rows
from hwnas.study.study import load_study, storage_of
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
    assert searched(opened(tmp_path), len(kept) + 2).counts.evaluated == len(kept) + 2
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


def test_a_result_that_cannot_be_told_is_one_line_and_is_kept(tmp_path: Path) -> None:
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
    assert searched(opened(tmp_path), 3, estimator=scores).counts.evaluated == 3
    assert len(scores.calls) == 3


def test_ctrl_c_ends_cleanly_and_the_same_command_goes_on(tmp_path: Path, start: Start) -> None:
    worker = start(tmp_path, 4, 20.0, 30, 120)
    worker.until("training")
    name = worker.lines[-1].split()[2]
    worker.process.send_signal(signal.SIGINT)
    assert worker.end() == (130, "")
    assert searched(opened(tmp_path), 4).counts.evaluated == 4
    rows = trial_rows(load_study(url(tmp_path)))
    assert (len(rows), rows[0]["id"], rows[0]["outcome"]) == (4, name, "evaluated")


@pytest.mark.parametrize("error", [SystemExit(3), UserError("disk full"), KeyboardInterrupt()])
def test_what_is_not_the_networks_fault_is_tried_again(tmp_path: Path, error: BaseException) -> None:
    def fail(architecture: Architecture) -> None:
        raise error

    study = opened(tmp_path)
    for _ in range(claims.MOST_TRIES + 1):
        with pytest.raises(type(error)):
            searched(study, 2, estimator=Scores(fail=fail))
    assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    assert searched(study, 2).counts.evaluated == 2
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2


@pytest.mark.parametrize("queued", [False, True])
def test_a_worker_killed_while_it_asks_costs_no_network(tmp_path: Path, queued: bool) -> None:
    study, space = opened(tmp_path), TinySpace()
    if queued:
        study.enqueue_trial(space.every()[5])
    study.ask()  # and nobody claims it
    assert searched(study, 2).counts.evaluated == 2
    rows = trial_rows(study)
    assert [row["outcome"] for row in rows] == ["lost", "evaluated", "evaluated"]  # samplers do not learn it as failed
    assert {row["reason"] for row in rows[:1]} == {"its worker died or was stopped for too long"}
    assert not queued or study.trials[1].params == space.every()[5]


@pytest.mark.parametrize("cap_ms", [None, 0.1])
def test_a_kill_between_the_end_of_a_trial_and_its_telling_trains_nothing_twice(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap_ms: float | None) -> None:
    """Evaluated, and over the cap."""
    study, scores = opened(tmp_path), Scores()
    with monkeypatch.context() as patch:
        patch.setattr(study, "tell", lambda *args, **more: (_ for _ in ()).throw(SystemExit(9)))
        with pytest.raises(SystemExit):
            searched(study, 2, estimator=scores, cap_ms=cap_ms)
    assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    before = len(scores.calls)
    assert before == (cap_ms is None)
    searched(study, 1, estimator=scores, cap_ms=cap_ms, max_asks=1)
    said = "evaluated" if cap_ms is None else "infeasible"
    assert [row["outcome"] for row in trial_rows(study)] == [said]
    assert len(scores.calls) == before


def test_who_leaves_a_trial_takes_nothing_from_the_one_who_took_it_over(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.ask()
    beats = claims.Beats()
    first = claims.claim(study, study.trials[0], {})
    claims.put_down(first)
    second = claims.claim(study, study.trials[0], {})
    claims.leave(study, study.trials[0], first)
    assert claims.is_mine(study, study.trials[0], second)
    assert beats.show_work(study.trials[0]), "by another thread of this process"
    claims.leave(study, study.trials[0], second)
    assert not beats.show_work(study.trials[0])
    assert claims.claim(study, study.trials[0], {})["tries"] == 2, "the first ended without a word"


def test_a_bug_for_one_network_does_not_stop_the_search_for_good(tmp_path: Path) -> None:
    def fail(architecture: Architecture) -> None:
        if len(scores.calls) <= claims.MOST_TRIES:
            raise ValueError("a bug")

    study, scores = opened(tmp_path), Scores()
    scores.fail = fail
    for _ in range(claims.MOST_TRIES):
        with pytest.raises(ValueError, match="a bug"):
            searched(study, 2, estimator=scores)
    assert searched(study, 2, estimator=scores).counts.evaluated == 2
    assert trial_rows(study)[0]["reason"] == claims.GIVEN_UP


def test_a_network_that_kills_its_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = opened(tmp_path)
    space, dead = TinySpace(), worker_name().rsplit("/", 1)[0] + "/1"
    claim = {"worker": dead, "claimed": 1, "beat": 0, "tries": claims.MOST_TRIES}
    network = space.decode(space.every()[5])
    study.add_trial(optuna.create_trial(state=TrialState.RUNNING, params={}, user_attrs={
        "architecture_id": network.id, "latency_ms_predicted": 1.0, "claim": claim}))
    scores = Scores()
    assert searched(study, 2, estimator=scores).counts.evaluated == 2
    assert network.id not in scores.calls
    assert (trial_rows(study)[0]["outcome"], trial_rows(study)[0]["reason"]) == ("failed", claims.GIVEN_UP)


@pytest.mark.soak
def test_a_worker_stopped_past_the_grace_counts_nothing_twice(
        tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start(tmp_path, 2, 1.5, 0.5, 2)
    worker.until("training")
    number, name = worker.lines[-1].split()[1:]
    stop_without_lock(worker, tmp_path / "study.db")
    monkeypatch.setattr(claims, "GRACE_S", 2.0)
    assert searched(opened(tmp_path), 2).counts.evaluated == 2  # its trial was taken over
    worker.process.send_signal(signal.SIGCONT)
    assert worker.end() == (0, "")
    assert worker.lines[-1] == "ended done 2"
    rows = evaluated(tmp_path)
    assert {(row["number"], row["id"]) for row in rows} >= {(int(number), name)}
    assert len(rows) == len(load_study(url(tmp_path)).trials) == 2


@pytest.mark.soak
def test_a_search_waits_for_those_who_still_train(tmp_path: Path, start: Start) -> None:
    worker = start(tmp_path, 1, 1.0, 30, 120)
    worker.until("training")
    scores = Scores()
    assert searched(opened(tmp_path), 1, estimator=scores).counts.evaluated == 1
    assert scores.calls == []


def test_beats_outlive_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hwnas.study.storage, "BUSY_S", 0.2)
    monkeypatch.setattr(claims, "BEAT_S", 0.05)
    study, beats = opened(tmp_path), list[int]()

    def look(until: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            beats.append(load_study(url(tmp_path)).trials[0].user_attrs["claim"]["beat"])
            if until(beats[-1]):
                return
            time.sleep(0.05)

    def fail(architecture: Architecture) -> None:
        if not beats:
            look(lambda beat: beat > 0)
            lock(tmp_path, 1.8).join()
            before = beats[-1]
            look(lambda beat: beat > before)

    assert searched(study, 1, estimator=Scores(fail=fail)).counts.evaluated == 1
    assert beats[-1] > beats[0]


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


def test_who_is_dead() -> None:
    machine, pid, started = worker_name().rsplit("/", 2)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True,
                          check=True, timeout=300).stdout.strip()
    assert not is_dead(worker_name())
    assert is_dead(f"{machine}/{gone}/{started}")
    assert is_dead(f"{machine}/{pid}/{int(started) + 1}")
    assert not is_dead(f"elsewhere/{gone}/{started}")


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
    assert searched(opened(tmp_path, identity=IDENTITY), 1).counts.evaluated == 1


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
    with pytest.raises(StudyError, match=r"its last trials are in study\.db-wal, .* Copy both files"):
        load_study(url(copy))
