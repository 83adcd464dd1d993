"""Attacks on a process by a signal, and what of it is left: read from /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hwnas.system.paths import hold

CODES = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


def python_path(folder: Path) -> str:
    """PYTHONPATH for processes that import modules of `folder` beside those of the tests."""
    return os.pathsep.join([str(folder), *map(os.path.abspath, filter(None, sys.path))])


def status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent …; none where the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, theirs, and so on."""
    parents = {int(path.name): status(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    children = [child for child, fields in parents.items() if fields and int(fields[1]) == pid]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def attack(process: subprocess.Popen[str], number: signal.Signals, lock: Path) -> str:
    """Send a signal to this process alone: nothing that it started may be left, and its lock is free. Its words."""
    started = descendants(process.pid)
    assert started
    process.send_signal(number)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == CODES[number], said
    wait_until(lambda: not any(map(status, started)))
    with hold(lock, wait=False) as held:
        assert held
    return said
