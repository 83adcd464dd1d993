"""Locks between processes: held by one at a time, gone with the process that held them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from hwnas.errors import UserError
from hwnas.system.paths import unwritten


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
        raise unwritten(path, error, "Make its folder writable.") from None
    if lock.is_locked:
        with suppress(OSError):
            os.utime(path)  # when it was taken: who waits changes the time of modification, not that of access
    try:
        yield lock.is_locked
    finally:
        lock.release()


def holder(path: Path) -> str:
    """Who holds the lock on `path` and since when, as far as this system says; "another process" where it does not."""
    try:
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        # a line: 1: FLOCK  ADVISORY  WRITE 1234 00:19:56 0 EOF; "->" marks one that waits
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        number = next(int(line[4]) for line in lines if line[5] == device)
        words = Path(f"/proc/{number}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, StopIteration, ValueError, IndexError):
        return "another process"
    command = " ".join(" ".join(words).split())[:80]
    return f"process {number} ({command}), since {datetime.fromtimestamp(status.st_atime):%H:%M:%S}"
