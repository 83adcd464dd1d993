"""Locks between processes: held by one at a time, gone with the process that held them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hwnas.errors import UserError


@contextmanager
def file_lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an operating-system lock on `path`; `waiting` is called once when another process has it."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, mode=0o666)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is not None:
                waiting()
            lock.acquire()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}. Make its folder writable.") from None
    try:
        yield
    finally:
        lock.release()
