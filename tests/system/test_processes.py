"""Processes that a script without a guard may start, and that end with it, however it ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_fixtures import attack, python_path, wait_until

from hwnas.errors import UserError
from hwnas.system import processes
from hwnas.system.processes import Pool, crew, end, start

# Says by a file that it runs, and then works for long: most of it so that no thread of Python's gets a turn.
CHILD = """
import ctypes, os, pathlib, sys

def work(folder):
    pathlib.Path(folder, f"{os.getpid()}.runs").write_text("")
    ctypes.PyDLL(None).sleep(3000)

if __name__ == "__main__":
    work(sys.argv[1])
"""
PARENT = """
import sys
from pathlib import Path

from hwnas.cli import command
from hwnas.system.paths import hold
from hwnas.system.processes import Pool, crew

def pool(folder):
    import child
    with Pool(2) as several:
        jobs = [several.submit(child.work, folder) for _ in range(5)]
        jobs[4].result()

def workers(folder):
    with crew(2, "child", [folder], print):
        pass

def foreign(folder):
    import json
    from hwnas.runtimes.child import run_child
    from hwnas.target import Target
    run_child("serving", {"path": folder}, Target("t", "null", "fp32", 1, 1), timeout_s=3000, memory_mb=100)

def main(config, console):
    with hold(Path(sys.argv[2], "a.lock")):
        globals()[sys.argv[1]](sys.argv[2])

sys.exit(command.run_command(main, "report", "", ["run=x"], target=False))
"""


def test_a_pool_does_not_run_the_callers_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
from hwnas.system.processes import Pool

print("once")
with Pool(2) as pool:
    print([job.result() for job in [pool.submit(abs, -1), pool.submit(abs, -2)]], __name__)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.splitlines() == ["once", "[1, 2] __main__"], done.stderr


@pytest.mark.parametrize(("kind", "children", "number"), [
    ("pool", 2, signal.SIGKILL), ("pool", 2, signal.SIGINT), ("workers", 2, signal.SIGTERM),
    ("foreign", 1, signal.SIGKILL),
    *(pytest.param(kind, children, number, marks=pytest.mark.soak) for kind, children, number in (
        ("pool", 2, signal.SIGTERM), ("workers", 2, signal.SIGKILL), ("workers", 2, signal.SIGINT),
        ("foreign", 1, signal.SIGTERM), ("foreign", 1, signal.SIGINT)))])
def test_no_child_outlives_the_command(kind: str, children: int, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "serving.py").write_text("import child, json, sys\nchild.work(json.loads(sys.argv[1])['path'])\n")
    (tmp_path / "parent.py").write_text(PARENT)
    process = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), kind, str(tmp_path)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, "PYTHONPATH": python_path(tmp_path)})
    wait_until(lambda: len(list(tmp_path.glob("*.runs"))) >= children or process.poll() is not None)
    said = attack(process, number, tmp_path / "a.lock")
    assert "Traceback" not in said
    assert number == signal.SIGKILL or "the same command goes on" in said


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module for `start`, made of its text."""
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))

    def make(text: str) -> str:
        (tmp_path / "a_child.py").write_text(text)
        return "a_child"

    return make


def test_a_pool_that_an_error_ends_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress(UserError), Pool(1) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        raise UserError("the disk is full")
    assert capfd.readouterr().err == ""


def test_a_child_whose_parent_ended_before_it_asked_does_nothing(child: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "hwnas.system.processes", str(os.getpid() + 1), child("print('runs')")]
    done = subprocess.run(command, input=b"[]", stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def test_what_a_child_is_given_arrives_as_it_is(child: Callable[[str], str]) -> None:
    given = ["ü (1), x=y", "${oc.env:HOME}", "'\"\\", "a\udcffb", "", "-q"]
    module = child("import sys\nprint(ascii(sys.argv[1:]), sys.stdin.read() == '')")
    with start(module, given, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"{given!a} True\n"


DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(3000)"


def test_a_child_takes_this_package_and_no_module_of_the_current_folder(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other" / "hwnas"
    other.mkdir(parents=True)
    for path in (other / "__init__.py", tmp_path / "types.py", tmp_path / "json.py"):
        path.write_text("import os\nos._exit(7)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    assert start("hwnas.errors").wait() == 0
    assert start("hwnas.errors", env={**os.environ, "PYTHONPATH": ""}).wait() == 0


@pytest.mark.parametrize("why", ["daemon", "no semaphores"])
def test_processes_that_cannot_be_started_are_one_line(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "daemon":
        monkeypatch.setattr(processes, "current_process", lambda: SimpleNamespace(daemon=True))
    else:
        def fail(*given: Any, **options: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr("concurrent.futures.process.ProcessPoolExecutor.__init__", fail)
    with pytest.raises(UserError, match="daemonic" if why == "daemon" else "/dev/shm"):
        Pool(2)


def test_a_process_that_does_not_hear_is_killed(child: Callable[[str], str]) -> None:
    with start(child(DEAF), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        end([process], grace_s=0.0)
    assert process.returncode == -signal.SIGKILL


def test_who_insists_does_not_wait_for_what_does_not_hear(child, monkeypatch):
    def insist(process: subprocess.Popen[bytes]) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with start(child(DEAF), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        monkeypatch.setattr(subprocess.Popen, "terminate", insist)
        with pytest.raises(KeyboardInterrupt):
            end([process])
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("text", "reason"), [
    ("import sys\nprint('first')\nsys.exit('no space left')", "no space left (exit code 1)"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL")])
def test_the_crew_says_who_ended_early_and_why(child: Callable[[str], str], text: str, reason: str) -> None:
    said: list[str] = []
    with crew(1, child(text), [], said.append) as early:
        pass
    assert early == [reason]
    assert said == [f"a worker ended early: {reason}"]


def test_unseen_arguments_come_last_and_stand_in_no_list_of_processes(child: Callable[[str], str]) -> None:
    unseen = ["ü\n" * 20_000, "a\udcffb", "${x}"]
    module = child("import sys\nprint(sys.argv[1], ascii(sys.argv[2:]), sys.stdin.read() == '')\n"
                   "print(len(open('/proc/self/cmdline').read()) < 1000)")
    with start(module, ["seen"], unseen=unseen, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read() == f"seen {unseen!a} True\nTrue\n"
