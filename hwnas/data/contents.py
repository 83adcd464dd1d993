"""Contents: a hash of each file of a data set. A file that nobody has touched since is not read again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from pathlib import Path

from hwnas.errors import UserError
from hwnas.system.documents import Document
from hwnas.system.paths import home, write_atomic

CONTENTS = Document("hwnas-contents", 1, "a list of file contents", "Remove it.", most=1 << 30)
SETTLED_NS = 2 * 10**9  # a file system's clock may be this coarse: within it a second change leaves no trace
MOST_LISTS = 64  # data sets whose lists are kept
UNREADABLE = "-"  # stands for a digest; whoever decodes the file names the reason
BATCH, THREADS = 256, 4


class Contents:
    """The files of one data set, {path below `root`: its state}, and what is in them.

    The first use of `digests` or `identity` reads every file. It leaves a list below the user's folder, so that later
    uses, in other processes too, read only files whose state is another.
    """

    def __init__(self, root: Path, states: Mapping[str, str]) -> None:
        self.root, self.states = root, states

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
        begun = time.time_ns()
        fresh = dict(zip(changed, self._hash_all(changed), strict=True))
        if any(self._may_keep(name, content, begun) for name, content in fresh.items()):
            kept = {key: fresh.get(name) or known[key] for name, key in keys.items()
                    if name not in fresh or self._may_keep(name, fresh[name], begun)}
            _write_list(place, kept)
        return {name: fresh.get(name) or known[key] for name, key in keys.items()}

    def _may_keep(self, name: str, content: str, begun: int) -> bool:
        """Return whether a later change of the file would be seen by its state."""
        changed = int(self.states[name].rpartition(" ")[2])
        return content != UNREADABLE and changed < begun - SETTLED_NS

    def _hash_all(self, names: list[str]) -> list[str]:
        batches = [names[start:start + BATCH] for start in range(0, len(names), BATCH)]
        with ThreadPoolExecutor(THREADS) as pool:
            hashed = pool.map(lambda batch: [_hash(os.path.join(self.root, name)) for name in batch], batches)
            return list(chain.from_iterable(hashed))


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
