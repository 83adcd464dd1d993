"""Where signal handlers run: on the thread's own stack, not on a small one that a library has put in its place."""

from __future__ import annotations

import contextlib
import ctypes
import sys

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
