"""Signals: Ctrl-C held back while something must not be torn, and a stack of our own for native crashes."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """Signals that Python handles by raising: deferred while `held`, but inside `allowed`. A second one that has to
    wait as well is let through at once: somebody insists."""

    def __init__(self) -> None:
        self._earlier: dict[int, Handler] = {}
        self._allowed = False
        self._waiting: int | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer signals inside; one that still waits at the end is raised there, unless another error is on its way.
        Nothing outside the main thread, which alone hears signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        found = {number: signal.getsignal(number) for number in _SIGNALS}
        self._earlier = {number: handler for number, handler in found.items() if callable(handler)}
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
        """Signals take effect at once inside, and one that waits before."""
        self.check()
        try:
            self._allowed = True
            yield
        finally:
            self._allowed = False

    def check(self) -> None:
        """Raise what waits."""
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

    OpenVINO's CPU plugin sets one of the least size that the kernel takes (11.6 kB with AVX-512) when it looks for AMX.
    Python's handlers ask for the alternate stack and can overflow that: Ctrl-C is then a segmentation fault.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).sigaltstack(ctypes.byref(_Stack(None, _SS_DISABLE, 0)), None)
