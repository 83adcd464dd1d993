"""Many workers on one PostgreSQL study: a private server, races, kills, restarts, and what goes wrong as one line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from postgresql_fixtures import SECRET, Server, psycopg
from race_fixtures import Worker, check_race, named, race, search, share
from race_fixtures import opened as informed
from study_fixtures import IDENTITY, OBJECTIVE, Scores, TinySpace, load_sampler, searched

from hwnas.errors import ConfigError, StudyError, hidden
from hwnas.study.record import trial_rows
from hwnas.study.storage import server_lock
from hwnas.study.study import check_resumable, load_study, open_study, storage_of, study_lock


@pytest.fixture
def keep() -> Iterator[Callable[[optuna.Study], optuna.Study]]:
    """Studies whose connections are closed at the end."""
    studies: list[optuna.Study] = []

    def kept(study: optuna.Study) -> optuna.Study:
        studies.append(study)
        return study

    yield kept
    for study in studies:
        storage_of(study).engine.dispose()


Keep = Callable[[optuna.Study], optuna.Study]
Start = Callable[..., Worker]


def opened(place: str, **options: Any) -> optuna.Study:
    return open_study(place, IDENTITY, OBJECTIVE, load_sampler("random", 0), **options)


def refusal(error: type[Exception], match: str, url: str, secret: str = SECRET) -> None:
    """Whoever opens the study at this URL is told so in one line, which does not hold the password."""
    for command in (opened, load_study, lambda url: check_resumable(url, {})):
        with pytest.raises(error, match=match) as caught:
            command(url)
        assert "\n" not in str(caught.value)
        assert secret not in str(caught.value)


def ask(study: optuna.Study) -> int:
    """A trial as `study.optimize` asks for one; its id."""
    waiting = study._pop_waiting_trial_id()
    return study._storage.create_new_trial(study._study_id) if waiting is None else waiting


def at_once(n: int, what: Callable[[int], Any]) -> list[Any]:
    """What `n` threads return or raise that begin together."""
    barrier, found = threading.Barrier(n), [None] * n

    def run(index: int) -> None:
        barrier.wait()
        try:
            found[index] = what(index)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


@pytest.mark.soak
def test_four_workers_lose_nothing_and_find_what_one_finds(place: str, keep: Keep, tmp_path: Path) -> None:
    n, seeds = 18, (0, 1, 2)
    told = race(place, n, seeds)
    studies = [keep(load_study(place, name=named(seed))) for seed in seeds]
    for seed, study in zip(seeds, studies, strict=True):
        check_race(study, told[seed], n)
    alone = [informed(tmp_path / str(seed), seed=seed) for seed in seeds]
    for study in alone:
        search(study, n)
    # Random search reaches 0.76 of it.
    assert sum(share(study, n) for study in studies) > 0.92 * sum(share(study, n) for study in alone)


def test_workers_that_open_a_new_study_at_once_all_work_on_it(place: str, keep: Keep) -> None:
    studies = at_once(6, lambda index: opened(place))
    assert [study for study in studies if not isinstance(study, optuna.Study)] == []
    assert {keep(study)._study_id for study in studies} == {studies[0]._study_id}


def test_workers_that_queue_the_same_networks_at_once_queue_each_once(place: str, keep: Keep) -> None:
    studies = [keep(opened(place)) for _ in range(4)]

    def queue(index: int) -> None:
        with study_lock(place):
            for params in TinySpace().every()[:5]:
                studies[index].enqueue_trial(params, skip_if_exists=True)

    assert at_once(4, queue) == [None] * 4
    assert len(studies[0].trials) == 5


def test_a_queued_trial_goes_to_one_worker(place: str, keep: Keep) -> None:
    studies = [keep(opened(place)) for _ in range(4)]
    for params in TinySpace().every()[:16]:
        studies[0].enqueue_trial(params)

    def pop(index: int) -> list[int]:
        return list(iter(studies[index]._pop_waiting_trial_id, None))

    taken = [number for popped in at_once(4, pop) for number in popped]
    assert len(taken) == len(set(taken)) == 16
    assert all(trial.state == TrialState.RUNNING for trial in studies[0].trials)


def test_a_lock_on_the_server_is_held_by_one_at_a_time_and_ends_with_its_process(place: str) -> None:
    inside: list[int] = []

    def hold(index: int) -> None:
        with server_lock(place, "study"):
            inside.append(index)
            time.sleep(0.05)
            assert inside[-1] == index
            inside.append(index)

    assert at_once(4, hold) == [None] * 4
    assert inside[::2] == inside[1::2]
    script = f"from hwnas.study.storage import server_lock\nimport os\n" \
             f"with server_lock({place!r}, 'study'):\n    os._exit(7)"
    assert subprocess.run([sys.executable, "-c", script], timeout=300).returncode == 7
    hold(9)


def test_a_killed_workers_trial_is_taken_up_by_the_next(place, keep, start):
    killed = start(place, 50, 60.0, 30, 120)
    killed.until("training")
    number, name = killed.lines[-1].split()[1:]
    killed.kill()
    study = keep(opened(place))
    assert study.trials[int(number)].state == TrialState.RUNNING
    assert searched(study, int(number) + 1).counts.evaluated == int(number) + 1
    taken = study.trials[int(number)]
    assert (taken.state, taken.user_attrs["architecture_id"]) == (TrialState.COMPLETE, name)


@pytest.mark.soak
def test_a_server_that_stops_ends_a_worker_with_one_line_and_the_same_command_goes_on(server, place, keep, start):
    worker = start(place, 30, 0.2, 30, 120)
    worker.until("told-evaluated", 3)
    server.stop()
    try:
        code, error = worker.end()
    finally:
        server.start()
    assert (code, error.count("\n")) == (2, 1), error
    assert "When it is up, give the same command again" in error or "Start the server" in error, error
    assert SECRET not in error
    told = {tuple(line.split()[1:]) for line in worker.lines if line.startswith("told-evaluated")}
    again = start(place, len(told) + 2, 0.0, 30, 120)
    assert again.end() == (0, "")
    rows = trial_rows(keep(load_study(place)))
    done = [(str(row["number"]), row["id"]) for row in rows if row["outcome"] == "evaluated"]
    assert told <= set(done)
    assert len(done) == len({name for _, name in done}) == len(told) + 2
    assert not [row for row in rows if row["state"] == "RUNNING"]


def test_a_server_restarted_while_a_network_is_trained_is_not_even_noticed(server, place, keep):
    calls = []

    def restart(architecture: Any) -> None:
        calls.append(architecture.id)
        if len(calls) == 2:
            server.stop()
            server.start()

    study = keep(opened(place))
    assert searched(study, 3, estimator=Scores(fail=restart)).counts.evaluated == 3
    assert len(calls) == 3


@pytest.mark.parametrize(("password", "database", "match"), [
    ("wr0ng-w0rd", "postgres", "password authentication failed.*Mend user and password"),
    (SECRET, "nowhere", 'database "nowhere" does not exist. Create it on the server'),
])
def test_a_server_that_refuses_is_one_line(server: Server, password: str, database: str, match: str) -> None:
    refusal(StudyError, match, server.url(database, password), password)


@pytest.mark.parametrize(("url", "error", "match"), [
    (f"postgresql+psycopg://me:{SECRET}@127.0.0.1:1/x", StudyError, "onnection refused. Start the server, or mend"),
    (f"postgresql+psycopg://127.0.0.1:1/x?user=me&password={SECRET}", StudyError, r"password=\*\*\*: .*refused"),
    (f"postgresql+psycopg://me:{SECRET}@127.0.0.1:1/x?connect_timeout=soon", ConfigError, "whole number of seconds"),
    (f"postgresql+psycopg://me:{SECRET}%zz@127.0.0.1:99999/x?a=b", StudyError, "invalid"),
    (f"postgresql+psycopg://me:a@{SECRET}@127.0.0.1:1/x", ConfigError, "Write an @ in the password as %40"),
    (f"postgresql+psycopg://me:{SECRET}@127.0.0.1:port/x", ConfigError, "is not a database URL"),
])
def test_urls_that_lead_nowhere_are_one_line_without_the_password(url: str, error: type[Exception], match: str) -> None:
    psycopg()
    refusal(error, match, url)


def test_passwords_are_hidden_wherever_a_url_stands() -> None:
    text = "storage: {}\nout: me:a@b\n"
    for url, shown in (("postgresql+psycopg://me:a:b/c@d@host:5432/x", "postgresql+psycopg://me:***@host:5432/x"),
                       ("postgresql://host:5432/x?password=a@b&sslmode=require",
                        "postgresql://host:5432/x?password=***&sslmode=require"),
                       ("postgresql://me:a?b@host/x", "postgresql://me:***@host/x"),
                       ("postgresql://host/x?user=me&password=a b", "postgresql://host/x?user=me&password=***"),
                       ("postgresql://me@host/x", "postgresql://me@host/x"),
                       ("sqlite:////runs/a:b@c/study.db", "sqlite:////runs/a:b@c/study.db")):
        assert hidden(text.format(url), whole=True) == text.format(shown)
        if " " not in url:
            said = "study {}: not there. Write e.g. postgresql://user@host/name, or 'me:a@b'."
            assert hidden(said.format(url)) == said.format(shown)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql"])
def test_a_missing_driver_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    refusal(ConfigError, r"pip install 'hwnas\[postgres\]'", f"{scheme}://me:{SECRET}@127.0.0.1:1/x")
