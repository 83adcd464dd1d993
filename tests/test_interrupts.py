"""Ctrl-C takes effect where a search can bear it."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hwnas.interrupts import Interrupts

WORKER = Path(__file__).with_name("study_worker.py")


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def held(*acts: str) -> list[str]:
    """Which of `acts` were reached in a held block before it raised KeyboardInterrupt."""
    interrupts, reached = Interrupts(), list[str]()

    def go() -> None:
        with interrupts.held():
            for act in acts:
                if act == "press":
                    press()
                elif act == "allowed press":
                    with interrupts.allowed():
                        press()
                elif act == "allowed":
                    with interrupts.allowed():
                        pass
                reached.append(act)

    with pytest.raises(KeyboardInterrupt):
        go()
    return reached


def test_it_waits_for_a_place_where_it_is_allowed() -> None:
    assert held("press", "more", "allowed", "never") == ["press", "more"]


def test_it_takes_effect_at_once_where_it_is_allowed() -> None:
    assert held("more", "allowed press", "never") == ["more"]


def test_what_still_waits_at_the_end_is_not_lost_and_handlers_are_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert held("press", "end") == ["press", "end"]
    assert signal.getsignal(signal.SIGINT) is before


def test_who_insists_is_heard() -> None:
    assert held("press", "press", "never") == ["press"]


def test_another_error_is_not_replaced() -> None:
    interrupts = Interrupts()

    def go() -> None:
        with interrupts.held():
            press()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go()


def test_other_threads_hear_no_signals_and_need_nothing() -> None:
    done = []

    def work() -> None:
        with Interrupts().held():
            done.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [before]


@pytest.mark.parametrize("seed", range(6))
def test_two_workers_interrupted_at_any_moment_leave_nothing_running(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(WORKER), str(tmp_path), "400", "0.01", "30", "120"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    time.sleep(random.Random(seed).random())
    for worker in workers:
        worker.send_signal(signal.SIGINT)
    said = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [130, 130], said
    database = next(tmp_path.rglob("*.db"))
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(*) from trials where state = 'RUNNING'").fetchone() == (0,)
