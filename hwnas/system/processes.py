"""Processes and signals: helpers that end with their parent, and Ctrl-C deferred while something must not be torn."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def _start_ticks(pid: int) -> str:
    """Kernel ticks at which a process started; '' where /proc does not say, or where the process is gone or a
    zombie."""
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
    return f"{_machine()}/{os.getpid()}/{_start_ticks(os.getpid())}"


def is_dead(worker: str) -> bool:
    """Whether `worker` ran here and is gone. A worker elsewhere never counts as dead: its heartbeat decides."""
    machine, pid, started = worker.rsplit("/", 2)
    if machine != _machine() or not pid.isdigit():
        return False
    if started:
        return _start_ticks(int(pid)) != started
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
    """Run `n` processes of `command` beside the block, and wait for them at its end.

    `say` gets the last line of a process that fails.
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
    """In a child, before its command starts (Linux): let the kernel kill the child when its parent is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Signals that Python handles by raising: deferred while `held`, except inside `allowed`.

    A second signal that would have to wait is let through at once, because somebody insists.
    """

    def __init__(self) -> None:
        self._earlier: dict[int, Handler] = {}
        self._allowed = False
        self._waiting: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals inside. A signal that still waits at the end is raised there, unless another error is on its
        way.

        Outside the main thread this does nothing, because only the main thread receives signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        self._earlier = {number: handler for number, handler in handlers.items() if callable(handler)}
        for number in self._earlier:
            signal.signal(number, self._hear)
        try:
            yield
        finally:
            for number, handler in self._earlier.items():
                signal.signal(number, handler)
        self.check()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, signals take effect at once. A signal that waits already takes effect before."""
        self.check()
        try:
            self._allowed = True
            yield
        finally:
            self._allowed = False

    def check(self) -> None:
        """Raise the signal that waits, if one does."""
        number, self._waiting = self._waiting, None
        if number is not None:
            self._earlier[number](number, None)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._allowed or self._waiting is not None:
            self._allowed, self._waiting = False, None
            self._earlier[number](number, frame)
        else:
            self._waiting = number


_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


def use_own_stack() -> None:
    """Take this thread's alternate signal stack away, on Linux.

    OpenVINO's CPU plugin sets a stack of the least size that the kernel takes (11.6 kB with AVX-512) when it looks for
    AMX. Python's signal handlers use the alternate stack and can overflow it. Ctrl-C then ends in a segmentation fault.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_Stack(None, _SS_DISABLE, 0)), None)
