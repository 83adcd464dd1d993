"""Disturbances of a machine, which can be switched on and off: processes of other users, as real ones do them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_BUSY = "while True: sum(i * i for i in range(1000))"
_MEMORY = "import numpy as np\na = np.ones(1 << 23)\nb = np.empty_like(a)\nwhile True: b[:] = a"  # 64 MB each
_BURSTS = """import random, time
while True:
    end = time.monotonic() + 0.05
    while time.monotonic() < end: pass
    time.sleep(0.15 * random.random())"""
_COMPILE = """import compileall, os, shutil, sys
while True:
    for package in ("email", "asyncio", "json", "unittest"):
        shutil.copytree(os.path.join(os.path.dirname(os.__file__), package), os.path.join(sys.argv[1], package))
    compileall.compile_dir(sys.argv[1], quiet=2, force=True)
    shutil.rmtree(sys.argv[1])"""
SETTLE_S = 0.25  # between switching and measuring


@dataclass(frozen=True)
class Process:
    """A program of the disturbance, and the core it is kept to; None: any."""

    code: str
    core: int | None = None


def processes_of(state: str, here: int, other: int) -> list[Process]:
    """The programs of a state of the machine, seen from a measurement on core `here`."""
    return {"nothing": [], "other core": [Process(_BUSY, other)], "same core": [Process(_BUSY, here)],
            "both cores": [Process(_BUSY, here), Process(_BUSY, other)],
            "memory": [Process(_MEMORY, here), Process(_MEMORY, other)],
            "bursts": [Process(_BURSTS, here), Process(_BURSTS, other)], "build": [Process(_COMPILE)] * 2}[state]


STATES = ("nothing", "other core", "same core", "both cores", "memory", "bursts", "build")


class Disturbance:
    """Processes that are stopped until they are switched on."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._folders = [tempfile.mkdtemp() for _ in processes]
        self._running = [subprocess.Popen([sys.executable, "-c", process.code, f"{folder}/work"])
                         for process, folder in zip(processes, self._folders, strict=True)]
        for process, running in zip(processes, self._running, strict=True):
            if process.core is not None:
                os.sched_setaffinity(running.pid, {process.core})
        self.switch(False)

    def switch(self, on: bool) -> None:
        """Let the processes go on, or stop them."""
        for running in self._running:
            running.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        time.sleep(SETTLE_S)

    def end(self) -> None:
        """Kill the processes, and remove what they wrote."""
        for running, folder in zip(self._running, self._folders, strict=True):
            running.kill()
            running.wait()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disturbed(state: str, here: int, other: int) -> Iterator[Disturbance]:
    """A state of the machine, not switched on yet."""
    disturbance = Disturbance(processes_of(state, here, other))
    try:
        yield disturbance
    finally:
        disturbance.end()
