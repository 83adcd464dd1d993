"""What the C library does with freed memory while networks are trained. Only glibc is changed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER = -1
# Outside the block: the values that glibc reaches by itself once large blocks have been freed. Any mallopt ends glibc's
# own adaptation, so that the process keeps these values.
_OUTSIDE = {_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
_INSIDE = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER}

_lock = threading.Lock()
_depth = 0


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, this process keeps freed memory for its next allocation.

    Otherwise blocks of 32 MB and more (activations) go back to the system each time. Their pages are then faulted in
    and cleared again: a fifth of the CPU time of a training step of small networks (benchmarks/bench_training.py). The
    end of the outermost block gives the memory back. Nothing is done where the user's environment says how to allocate.
    """
    try:
        _enter(1)
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
        _depth = max(0, _depth + step)  # Ctrl-C may have come before it was counted
        if _depth == (1 if step > 0 else 0) and _ours():
            _set(_INSIDE if step > 0 else _OUTSIDE)
            if step < 0:
                release_memory()


def _ours() -> bool:
    """Whether this is glibc and nobody has configured its allocator already."""
    given = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    return not given and platform.libc_ver()[0] == "glibc"


def _set(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options.items():
            mallopt(option, value)
