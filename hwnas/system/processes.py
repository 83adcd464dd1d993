"""Processes: helpers that end with their parent, and the name under which one is told to be alive or dead."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any


def _started(pid: int) -> str:
    """Kernel ticks at which a process started, '' where /proc does not say or the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@cache
def _machine() -> str:
    """Names the process table that a pid belongs to: host, boot and pid namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip()[:8])
        except OSError:
            parts.append("")
    return "/".join(parts)


def worker_name() -> str:
    """This process: machine, pid, start."""
    return f"{_machine()}/{os.getpid()}/{_started(os.getpid())}"


def is_dead(worker: str) -> bool:
    """Whether `worker` ran here and is gone. A worker elsewhere is never called dead: its heartbeat tells."""
    machine, pid, started = worker.rsplit("/", 2)
    if machine != _machine() or not pid.isdigit():
        return False
    if started:
        return _started(int(pid)) != started
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def crew(command: Sequence[str], n: int, say: Callable[[str], None]) -> Iterator[None]:
    """`n` processes of `command` while the block runs, waited for at its end.

    `say` is told the last line of one that fails.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(n)]
        workers = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    preexec_fn=die_with_parent) for log in logs]
        try:
            yield
            for worker, log in zip(workers, logs, strict=True):
                if worker.wait() != 0:
                    log.seek(0)
                    say(f"a worker ended early: {(log.read().strip().splitlines() or ['no message'])[-1]}")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.send_signal(signal.SIGINT)
                    worker.wait()


class Pool(ProcessPoolExecutor):
    """`n` fresh processes that do not import the caller's script: it needs no `if __name__ == "__main__"`."""

    def __init__(self, n: int, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()) -> None:
        super().__init__(n, get_context("spawn"), initializer, initargs)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As Executor.submit, which starts processes: Python tells each of them where the main module lies."""
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            sys.modules["__main__"] = main


def die_with_parent() -> None:
    """In a child, before its command starts (Linux): a killed parent takes it with it, whatever it is at."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
