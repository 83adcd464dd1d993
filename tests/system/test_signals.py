"""Ctrl-C takes effect where a search can bear it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

from hwnas.study.claims import claim_of
from hwnas.study.study import load_study

WORKER = Path(__file__).parents[1] / "study_worker.py"


SCRIPT = """
import json, os, signal, sys, threading
from hwnas.system.processes import Interrupts
before = signal.getsignal(signal.SIGINT)

def go(interrupts, acts, reached):
    with interrupts.held():
        for act in acts:
            if act == "press":
                os.kill(os.getpid(), signal.SIGINT)
            elif act == "allowed press":
                with interrupts.allowed():
                    os.kill(os.getpid(), signal.SIGINT)
            elif act == "allowed":
                with interrupts.allowed():
                    pass
            elif act == "error":
                raise ZeroDivisionError
            elif act == "thread":
                thread = threading.Thread(target=go, args=(interrupts, [], []))
                thread.start()
                thread.join()
            reached.append(act)

def all_of(acts):
    reached = []
    try:
        go(Interrupts(), acts, reached)
    except BaseException as error:
        reached.append(type(error).__name__)
    return [*reached, signal.getsignal(signal.SIGINT) is before]

print(json.dumps([*map(all_of, json.loads(sys.argv[1]))]))
"""


def test_a_signal_takes_effect_where_it_is_allowed() -> None:
    cases = [
        (["press", "more", "allowed", "never"], ["press", "more", "KeyboardInterrupt"]),  # waits for an allowed place
        (["more", "allowed press", "never"], ["more", "KeyboardInterrupt"]),
        (["press", "end"], ["press", "end", "KeyboardInterrupt"]),  # what waits at the end is not lost
        (["press", "press", "never"], ["press", "KeyboardInterrupt"]),  # who insists is heard
        (["press", "error"], ["press", "ZeroDivisionError"]),  # another error is not replaced
        (["thread", "press"], ["thread", "press", "KeyboardInterrupt"]),
        (["allowed", "more"], ["allowed", "more"])]
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps([acts for acts, _ in cases])], capture_output=True,
                          text=True, timeout=300, check=True)
    assert json.loads(done.stdout) == [[*reached, True] for _, reached in cases]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8))
def test_two_workers_interrupted_at_any_moment_leave_all_that_they_claimed(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, str(WORKER), str(tmp_path), "400", "0.01", "30", "120"]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    time.sleep(random.Random(seed).random())
    for worker in workers:
        worker.send_signal(signal.SIGINT)
    said = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [130, 130], said
    study = load_study(f"sqlite:///{next(tmp_path.rglob('*.db'))}")
    left = [trial for trial in study.trials if trial.state == TrialState.RUNNING]
    claims = [held for trial in left if (held := claim_of(trial)) is not None]
    assert all(held["left"] and held["tries"] == 0 for held in claims), "the next process takes them over"


DESTRUCTOR = """
import os, signal, sys, threading
from hwnas.system.processes import ended_by_signals, exit_code
class Thing:
    def __del__(self):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        [None for _ in range(100_000)]
try:
    with ended_by_signals():
        thing = Thing()
        del thing
        threading.Event().wait(200)
except KeyboardInterrupt as interrupt:
    sys.exit(exit_code(interrupt))
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_falls_into_a_destructor_is_not_lost(name: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", DESTRUCTOR, name], capture_output=True, text=True, timeout=100,
                          check=False)
    assert (done.returncode, done.stderr) == (code, "")
