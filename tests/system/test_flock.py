"""The lock of a device that lacks the filelock package excludes those who have it."""

from __future__ import annotations

from pathlib import Path

import filelock
import pytest

from hwnas.system import flock


def test_both_locks_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    ours, theirs = flock.FileLock(path, mode=0o666), filelock.FileLock(path, mode=0o666)
    ours.acquire(timeout=0)
    assert ours.is_locked
    assert path.stat().st_mode & 0o777 == 0o666
    with pytest.raises(filelock.Timeout):
        theirs.acquire(timeout=0)
    ours.release()
    theirs.acquire(timeout=0)
    with pytest.raises(flock.Timeout):
        ours.acquire(timeout=0.1)
    assert not ours.is_locked
    theirs.release()
    ours.acquire(timeout=0)
    ours.release()
