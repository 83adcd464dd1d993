"""Locks between processes: held by one at a time, gone with the process that held them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hwnas.errors import UserError


@contextmanager
def hold(path: Path, waiting: Callable[[], None] | None = None, *, wait: bool = True, most_s: float = -1
         ) -> Iterator[bool]:
    """Hold an operating-system lock on `path` inside the block; yields whether it is held.

    Where another process has the lock, `waiting` is called once. Then this process waits for it, `most_s` seconds at
    most (-1: without end). With `wait` false the block is entered at once, without the lock. UserError where the file
    cannot be written or the lock cannot be had.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=0o666)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if wait:
                if waiting is not None:
                    waiting()
                lock.acquire(timeout=most_s)
    except Timeout:
        raise UserError(f"another process has held {path} for {most_s:g} s. Wait for it, or end it.") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Make its folder writable.") from None
    try:
        yield lock.is_locked
    finally:
        lock.release()
