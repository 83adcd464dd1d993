"""The places of files, shipped (checkout or wheel) and the user's own; atomic writing; locks between processes.

One process at a time holds a lock. The lock is free again when this process ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path

from hwnas.errors import ConfigError, UserError
from hwnas.lazy import filelock

_TEMPORARY = "hwnas-"  # the prefix of temporary folders
_PACKAGE = Path(__file__).resolve().parents[1]
_NEXT_STEP = {
    errno.ENOSPC: "Free space on that disk, then give the same command again.",
    errno.EDQUOT: "Free space in your quota, then give the same command again.",
    errno.EFBIG: "Allow larger files (ulimit -f), then give the same command again.",
    errno.EROFS: "Choose a folder on a writable disk.",
    errno.EACCES: "Make it writable or choose another folder.",
    errno.EPERM: "Make it writable or choose another folder.",
}


_REFUSED = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE, errno.EROFS}


def home() -> Path:
    """Return the user's data folder: $HWNAS_HOME, otherwise a folder of $XDG_DATA_HOME; it need not exist yet.

    Raises ConfigError for a user without a home folder, such as an arbitrary user id in a container.
    """
    place = find_home()
    if place is None:
        raise ConfigError("this user has no home folder, and tables, weights and caches need a place. Name one: "
                          "HWNAS_HOME=DIR, or give a search out=FOLDER.")
    return place


def find_home() -> Path | None:
    """Return `home`, or None for a user without a home folder."""
    chosen = os.environ.get("HWNAS_HOME")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "hwnas"
    except RuntimeError:  # no HOME, and no entry in the list of users
        return None


def check_home() -> None:
    """Raise ConfigError unless the user's data folder can be written. A command calls it before its long work."""
    folder = home()
    try:
        make_writable(folder)
    except UserError as error:
        raise ConfigError(f"{str(error).partition('. ')[0]}. Tables, weights and caches are there: set HWNAS_HOME=DIR "
                          "to a folder on a writable disk.") from None


def shipped(folder: str) -> Path:
    """Return the absolute path of a shipped folder (conf, search_spaces, latency_tables), of the wheel or checkout."""
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        if (root / "conf").is_dir():
            return root / folder
    raise ConfigError(f"no conf/ folder beside {_PACKAGE}: the installation is incomplete. Install hwnas again.")


def data_dirs(folder: str) -> list[Path]:
    """Return the places of `folder`, in the order of a search: the user's, which need not exist, then the shipped one.

    The user's place is left out if it cannot be entered, such as the one of root in a container of another user. An
    attempt to write there says why (`check_home`).
    """
    place = find_home()
    try:
        os.stat(place / folder if place else "")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # no permission, a link to itself, a disk that is gone
        place = None
    return [*([] if place is None else [place / folder]), shipped(folder)]


def table_dirs() -> list[Path]:
    """Return the folders of latency tables, in the order of a search.

    If $HWNAS_OWN_TABLES is set (not empty), only the user's: a host is then measured even if its table is shipped.
    """
    dirs = data_dirs("latency_tables")
    return dirs[:-1] if os.environ.get("HWNAS_OWN_TABLES") else dirs


def name_fault(name: str) -> str:
    """Return why no text file can hold a name, and what to do; empty if one can."""
    if not any("\ud800" <= letter <= "\udfff" for letter in name):  # Python's letters for bytes that are not UTF-8
        return ""
    try:
        os.fsencode(name).decode("utf-8")
    except UnicodeError:
        return "is not UTF-8, which the files of a run are written in. Rename it."
    return "is UTF-8, and this Python reads names otherwise. Set PYTHONUTF8=1."


def shown_name(name: str) -> str:
    """Return a name as people see it: in one Unicode form, with single blanks between words and none around them."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` (text as UTF-8) so that `path` has all of it or its earlier content, even after a kill.

    Missing parent folders are made. Raises UserError, in one line, if the disk is full, the place cannot be written or
    the text holds half a character.
    """
    path = Path(path)
    try:
        content = data.encode() if isinstance(data, str) else data
    except UnicodeEncodeError as error:
        raise UserError(f"cannot write {path}: {error.object[max(0, error.start - 20):error.end]!a} is no text. "
                        "Mend it in the file that it was read from.") from None
    # A new file beside `path` is written to the disk first and then takes its name: a rename is never half done.
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)  # so that the rename itself lasts
        finally:
            os.close(handle)
    except OSError as error:
        raise unwritten(path, error) from error


def unwritten(path: Path, error: OSError, otherwise: str = "Choose another place.") -> UserError:
    """Return the error for a file that could not be written, with the next step: `otherwise` if the error is rare."""
    step = _NEXT_STEP.get(error.errno or 0, otherwise)
    return UserError(f"cannot write {path}: {error.strerror or error}. {step}")


def make_writable(folder: Path) -> None:
    """Make a folder, unless it is there, and try to write in it. Raises UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:  # a file without a name: a kill leaves nothing
            probe.write(b"0")
            probe.flush()
    except OSError as error:
        raise unwritten(folder, error) from error


def no_space(error: OSError) -> UserError | None:
    """Return the error for a write that found no space: on the disk, in a quota, or below the limit of a file's size.

    None for any other error. A file that `write_atomic` did not write is in the folder of temporary files.
    """
    nowhere = isinstance(error, FileNotFoundError) and "usable temporary directory" in str(error)
    if not nowhere and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    place = error.filename or os.environ.get("TMPDIR") or "the folder of temporary files"
    fact = "no folder for temporary files can be written" if nowhere else error.strerror
    return UserError(f"{os.fsdecode(place) if isinstance(place, str | bytes) else place}: {fact}. Free space there, or "
                     "set TMPDIR to a folder on another disk; then give the same command again.")


def unusable(error: OSError) -> UserError | None:
    """Return the error for a path that the user gave and the system refuses; None for any other error."""
    if error.filename is None or error.errno not in _REFUSED:
        return None
    return UserError(f"{os.fsdecode(error.filename)[:200]}: {error.strerror}. Check the path, and whether you may use "
                     "it.")


@contextmanager
def hold(path: Path, waiting: Callable[[], None] | None = None, *, wait: bool = True, most_s: float = -1
         ) -> Iterator[bool]:
    """Hold an operating-system lock on `path` inside the block; yield whether it is held.

    If another process has the lock, `waiting` is called once. Then this process waits for it, `most_s` seconds at
    most (-1: without end). If `wait` is false, the block is entered at once, without the lock. Raises UserError if the
    file cannot be written or the lock is not free in time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, mode=0o666)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if wait:
                if waiting is not None:
                    waiting()
                lock.acquire(timeout=most_s)
    except filelock.Timeout:
        raise UserError(f"another process has held {path} for {most_s:g} s. Wait for it, or end it.") from None
    except OSError as error:
        raise unwritten(path, error, "Make its folder writable.") from None
    if lock.is_locked:
        with suppress(OSError):
            os.utime(path)  # the access time is for `holder`; a waiting process changes only the modification time
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Make a folder for the files of this block, in the system's folder of temporary files. The folders that killed
    processes left there are removed first."""
    _remove_left_folders(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as folder, hold(Path(folder, ".lock.new")):
        Path(folder, ".lock.new").rename(Path(folder, ".lock"))  # so that others never see it unlocked
        yield folder


@cache
def _remove_left_folders(within: str) -> None:
    for lock in Path(within).glob(f"{_TEMPORARY}*/.lock"):
        with suppress(UserError, FileNotFoundError):
            if lock.parent.lstat().st_uid != os.getuid():  # another user's, with any content
                continue
            with hold(lock, wait=False) as is_left:
                if is_left:
                    shutil.rmtree(lock.parent, ignore_errors=True)


def check_locks(handle: int, folder: Path) -> None:
    """Raise UserError if file locks do not work in the folder of an open file: a study and its workers need them."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as SQLite does
        fcntl.lockf(handle, fcntl.LOCK_UN)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as the locks of this module
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError as error:
        raise UserError(f"file locks do not work in {folder}: {error.strerror}. Choose out=FOLDER on a local disk; for "
                        "workers on several machines also storage=postgresql+psycopg://…") from None


def holder(path: Path) -> str:
    """Return who holds the lock on `path`, and since when; "another process" if this system does not say it."""
    try:
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        # a line: 1: FLOCK  ADVISORY  WRITE 1234 00:19:56 0 EOF; "->" marks a process that waits
        lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" not in line]
        number = next(int(line[4]) for line in lines if line[5] == device)
        words = Path(f"/proc/{number}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (OSError, StopIteration, ValueError, IndexError):
        return "another process"
    command = " ".join(" ".join(words).split())[:80]
    return f"process {number} ({command}), since {datetime.fromtimestamp(status.st_atime):%H:%M:%S}"
