"""The lock of the filelock package, for a machine that lacks it: both take flock(2) of the same file, and so exclude
each other."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

_AGAIN_S = 0.05


class Timeout(TimeoutError):
    """Another process held the lock for as long as was waited."""


class FileLock:
    """A lock on `path` that is gone with its process; `mode`: of a file that is made for it."""

    def __init__(self, path: str | os.PathLike[str], mode: int = 0o644) -> None:
        self._path, self._mode = os.fspath(path), mode
        self._file: int | None = None

    @property
    def is_locked(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def acquire(self, timeout: float = -1) -> None:
        """Take the lock; Timeout after so many seconds (-1: never)."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, self._mode)
        with suppress(PermissionError):  # of another user, who has done so
            os.fchmod(file, self._mode)
        until = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = file
                return
            except BlockingIOError:
                if timeout >= 0 and time.monotonic() >= until:
                    os.close(file)
                    raise Timeout(self._path) from None
                time.sleep(_AGAIN_S)

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
