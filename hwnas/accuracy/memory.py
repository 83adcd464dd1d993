"""What the C library does with freed memory while networks are trained (glibc; elsewhere nothing is changed)."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER = -1
# Outside: what glibc comes to by itself once large blocks have been freed. Its own adaptation ends with any mallopt.
_OUTSIDE = {_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
_INSIDE = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER}

_lock = threading.Lock()
_depth = 0


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, this process keeps what it frees, for its next allocation.

    Blocks of 32 MB and more (activations) otherwise go back to the system each time, and their pages are faulted in
    and cleared again: an eighth of the CPU time of a training step of small networks (benchmarks/bench_training.py).
    """
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, and hundreds of trials add up."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _enter(step: int) -> None:
    global _depth
    with _lock:
        _depth += step
        if _depth == (1 if step > 0 else 0):
            _set(_INSIDE if step > 0 else _OUTSIDE)


def _set(options: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options.items():
            mallopt(option, value)
