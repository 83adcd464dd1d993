"""Contents: a hash of each file of a data set. A file that nobody has touched since is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path

from hwnas.errors import UserError
from hwnas.system.documents import Document
from hwnas.system.paths import home, write_atomic

CONTENTS = Document("hwnas-contents", 1, "a list of file contents", "Remove it.", most=1 << 30)
SETTLED_NS = 2 * 10**9  # a file system's clock may be this coarse: within it a second change leaves no trace
MOST_LISTS = 64  # data sets whose lists are kept
UNREADABLE = "-"  # stands for a digest; whoever decodes the file names the reason
THREADS = 4


@dataclass
class Contents:
    """The files of one data set, {path below `root`: its state}, and what is in them.

    The first use of `digests` or `identity` reads every file. It leaves a list below the user's folder, so that later
    uses, in other processes too, read only files whose state is another.
    """

    root: Path
    states: Mapping[str, str]

    @classmethod
    def of(cls, root: Path, paths: Iterable[Path]) -> Contents:
        """The contents of these files below `root`."""
        return cls(root, {os.path.relpath(path, root): state_of(os.stat(path)) for path in paths})

    @property
    def identity(self) -> str:
        """Twelve digits that change with any byte or name of a file."""
        return digest("contents", *(f"{name}:{content}" for name, content in self.digests.items()))

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file, cut to 32 digits, by its path below `root`."""
        place = home() / "cache" / f"contents-{digest(self.root.resolve())}.json"
        known = _read_list(place)
        keys = {name: f"{state} {name}" for name, state in self.states.items()}
        changed = [name for name, key in keys.items() if key not in known]
        if not changed:
            return {name: known[key] for name, key in keys.items()}
        # Of a file that has just changed, a later change might not be seen by its state.
        settled = time.time_ns() - SETTLED_NS
        with ThreadPool(THREADS) as pool:
            hashed = pool.map(_hash, [os.path.join(self.root, name) for name in changed])
        fresh = dict(zip(changed, hashed, strict=True))
        digests = {name: fresh.get(name) or known[key] for name, key in keys.items()}
        unsafe = {name for name, content in fresh.items()
                  if content == UNREADABLE or int(self.states[name].rpartition(" ")[2]) >= settled}
        if len(unsafe) < len(fresh):
            _write_list(place, {keys[name]: content for name, content in digests.items() if name not in unsafe})
        return digests


def state_of(status: os.stat_result) -> str:
    """Size (bytes), inode, time of change of the content and of the file (ns): another text once a file is changed."""
    return f"{status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"


def _hash(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError:
        return UNREADABLE


def _read_list(place: Path) -> dict[str, str]:
    """{state and path: digest}; empty where the list is missing, torn or foreign: it is then made again."""
    try:
        known = (CONTENTS.find(place) or {}).get("files")
    except UserError:
        return {}
    return known if isinstance(known, dict) and all(isinstance(value, str) for value in known.values()) else {}


def _write_list(place: Path, files: Mapping[str, str]) -> None:
    """Write the list whole. It may be missing: where it cannot be written, files are read again at the next start."""
    with contextlib.suppress(UserError, OSError):
        write_atomic(place, json.dumps({**CONTENTS.header, "files": files}))
        lists = sorted(place.parent.glob("contents-*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in lists[:-MOST_LISTS]:
            old.unlink(missing_ok=True)


def digest(*values: object) -> str:
    """Twelve hexadecimal digits that name `values`, which may be names of files that are not UTF-8."""
    return hashlib.sha256("\n".join(map(str, values)).encode(errors="surrogateescape")).hexdigest()[:12]
