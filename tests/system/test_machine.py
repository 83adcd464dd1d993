"""Machines as people have them: no home, a full or a read-only disk, files called like Python's own modules."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from hwnas.errors import BudgetError, ConfigError, DataError, TargetError, UserError
from hwnas.system import clock, paths
from hwnas.system.clock import Deadline, read_spent_s, spending
from hwnas.system.paths import check_home, check_locks
from hwnas.target import Host

COMMAND = Path(sys.executable).with_name("hwnas")


def run(*given: str, cwd: Path | None = None, **changes: str | None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in {**os.environ, **changes}.items() if value is not None}
    return subprocess.run([COMMAND, *given], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300,
                          check=False)


NAMES = ("types.py", "signal.py", "random.py", "numpy.py")


def test_no_process_imports_what_lies_in_the_current_folder(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("raise SystemExit('a file of the user')\n")
    done = run("train", "--help", cwd=tmp_path)
    assert "a file of the user" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    script = tmp_path / "apart" / "script.py"
    script.parent.mkdir()
    script.write_text("from hwnas.system.processes import Pool\n"
                      "with Pool(1) as pool:\n"
                      "    print(pool.submit(eval, \"__import__('types').__file__\").result())\n")
    found = subprocess.run([sys.executable, "-P", script], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                           check=False)
    assert found.stdout.strip().endswith("types.py"), found.stderr
    assert str(tmp_path) not in found.stdout + found.stderr


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_moves_no_deadline(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.of(asdict(Deadline.after(60.0)))
    assert deadline is not None
    wall = time.time
    monkeypatch.setattr(clock.time, "time", lambda: wall() + jump_s)
    assert 0 < deadline.left_s <= 60
    other = Deadline.of({**asdict(deadline), "machine": "another"})
    assert other is not None
    assert other.left_s == pytest.approx(60 - jump_s, abs=30)


def test_the_seconds_that_a_run_took_outlive_its_process(tmp_path):
    path = tmp_path / "spent.json"
    with spending(path, time.monotonic()):
        pass
    first = read_spent_s(path)
    with spending(path, time.monotonic()):
        time.sleep(0.05)
    assert read_spent_s(path) >= first + 0.05
    before_s = read_spent_s(path)
    for refused in (BudgetError("too short"), DataError("torn image")):  # such a command did nothing
        with pytest.raises(type(refused)), spending(path, time.monotonic() - 100):
            raise refused
    assert read_spent_s(path) == before_s
    path.write_text("{torn")
    assert read_spent_s(path) == 0.0


def test_locks_that_do_not_work_are_told_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(paths.fcntl, "lockf", refuse)
    with open(tmp_path / "file", "w") as file, pytest.raises(UserError) as caught:
        check_locks(file.fileno(), tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert os.strerror(errno.ENOLCK) in str(caught.value)
    assert "storage=postgresql" in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_a_name_and_a_home_is_told_what_to_give(tmp_path: Path) -> None:
    nobody = ["setpriv", "--reuid", "12345", "--clear-groups", "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME",
              "-u", "HWNAS_HOME", f"TMPDIR={tmp_path}"]
    tmp_path.chmod(0o777)
    if subprocess.run([*nobody, COMMAND, "--help"], capture_output=True, check=False).returncode == 126:
        pytest.skip("that user cannot read this checkout")
    helped = subprocess.run([*nobody, COMMAND, "--help"], capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    refused = subprocess.run([*nobody, COMMAND, "profile", "target=ort_fp32", "space=mnasnet_small"],
                             capture_output=True, text=True, cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert "HWNAS_HOME" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_home_on_a_disk_that_is_read_only_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="HWNAS_HOME=DIR"):
        check_home()


def test_threads_that_openmp_shall_bind_leave_a_command_its_cores() -> None:
    """As on many clusters. The import of torch would bind this process, and so all its children, to one core."""
    script = """
import os
from hwnas.cli.command import run_command
run_command(lambda config, console: __import__("torch"), "predict", "", [], target=False)
print(len(os.sched_getaffinity(0)))"""
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, timeout=300, check=True,
                          env={**os.environ, "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"})
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0)))], done.stderr


def test_other_systems_than_linux_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    with pytest.raises(TargetError, match="on Linux alone"):
        Host.detect()
    done = subprocess.run([sys.executable, "-c", "import sys; sys.platform = 'win32'; import hwnas"], text=True,
                          capture_output=True, check=False)
    assert "WSL" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full disk to write to")
def test_standard_output_on_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, "train", "--show-config"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "standard output" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.3, 0.7, 1.2])
def test_ctrl_c_while_the_command_is_being_loaded_is_one_line(after_s: float) -> None:
    started = subprocess.Popen([COMMAND, "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=300)
    if "Traceback" in said and "hwnas/__main__.py" not in said:
        return  # before anything of ours was there
    assert started.returncode in (0, 130, -2)  # done already; heard; before Python was there
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= 1
