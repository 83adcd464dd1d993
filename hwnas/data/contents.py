"""The contents of a data set: a hash of each file, which is read again only after a change, and copies of images."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import UserError
from hwnas.system.documents import Document
from hwnas.system.paths import home, write_atomic

CONTENTS = Document("hwnas-contents", 1, "a list of file contents", "Remove it.", most=1 << 30)
SETTLED_NS = 2 * 10**9  # a file system's clock may be this coarse: within it a second change leaves no trace
MOST_LISTS = 64  # data sets whose lists are kept
UNREADABLE = "-"  # in place of a digest; the decoder of the file says the reason
BATCH, THREADS = 256, 4  # files that a thread hashes at a time
_SHOWN = 2  # names of copies
Place = tuple[str, int]  # part and row of an image


@dataclass
class Contents:
    """The files of one data set, {path below `root`: its state}, and a digest of each file.

    The first use of `digests` or `identity` reads every file. It leaves a list below the user's folder, so that later
    uses, in other processes too, read only files whose state is another.
    """

    root: Path
    states: Mapping[str, str]

    @classmethod
    def of(cls, root: Path, paths: Iterable[Path]) -> Contents:
        """Return the contents of these files below `root`."""
        return cls(root, {os.path.relpath(path, root): state_of(os.stat(path)) for path in paths})

    @property
    def identity(self) -> str:
        """Twelve digits that change with any byte or name of a file."""
        return digest("contents", *(f"{name}:{content}" for name, content in self.digests.items()))

    @cached_property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file, cut to 32 digits, by its path below `root`."""
        # 1. Find the files whose state is not in the list of an earlier command.
        place = home() / "cache" / f"contents-{digest(self.root.resolve())}.json"
        stored = _read_list(place)
        keys = {name: f"{state} {name}" for name, state in self.states.items()}
        changed_names = [name for name, key in keys.items() if key not in stored]
        if not changed_names:
            return {name: stored[key] for name, key in keys.items()}
        newest_safe = time.time_ns() - SETTLED_NS
        # 2. Hash them in batches, by a few threads.
        paths = [os.path.join(self.root, name) for name in changed_names]
        batches = [paths[start:start + BATCH] for start in range(0, len(paths), BATCH)]
        with ThreadPoolExecutor(THREADS) as pool:
            results = chain.from_iterable(pool.map(lambda batch: [*map(_hash, batch)], batches))
            new_digests = dict(zip(changed_names, results, strict=True))
        # 3. Store all but files that changed just now: their state might not show a further change.
        digests = {name: new_digests.get(name) or stored[key] for name, key in keys.items()}
        unsafe_names = {name for name, content in new_digests.items()
                        if content == UNREADABLE or int(self.states[name].rpartition(" ")[2]) >= newest_safe}
        if len(unsafe_names) < len(new_digests):
            _write_list(place, {keys[name]: content for name, content in digests.items() if name not in unsafe_names})
        return digests


def state_of(status: os.stat_result) -> str:
    """Return size (bytes), inode, and change times of content and file (ns): a text that changes with the file."""
    return f"{status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"


def _hash(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError:
        return UNREADABLE


def _read_list(place: Path) -> dict[str, str]:
    """Return {state and path: digest}; empty if the list is missing, torn or foreign, as it is then made again."""
    try:
        stored = (CONTENTS.find(place) or {}).get("files")
    except UserError:
        return {}
    return stored if isinstance(stored, dict) and all(isinstance(value, str) for value in stored.values()) else {}


def _write_list(place: Path, files: Mapping[str, str]) -> None:
    """Write the list as a whole, and remove the oldest lists. After an error files are read again at the next start."""
    with contextlib.suppress(UserError, OSError):
        write_atomic(place, json.dumps({**CONTENTS.header, "files": files}))
        remove_oldest(place.parent, "contents-*.json", MOST_LISTS)


def remove_oldest(folder: Path, pattern: str, most: int) -> None:
    """Remove the oldest files, each with the .json file beside it, until `most` are left."""
    with contextlib.suppress(OSError):  # another process may remove them at the same time
        for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)[:-most]:
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)


def digest(*values: object) -> str:
    """Return twelve hexadecimal digits that name `values`, which may be names of files that are not UTF-8."""
    return hashlib.sha256("\n".join(map(str, values)).encode(errors="surrogateescape")).hexdigest()[:12]


def hash_images(images: NDArray[np.uint8]) -> list[str]:
    """Return the keys of images in memory. Images mapped from a file get none, as all of it would be read."""
    if isinstance(images, np.memmap):
        return [UNREADABLE] * len(images)
    return [hash_image(image.tobytes()) for image in images]


def hash_image(content: bytes) -> str:
    """Return the key of an image with these pixels, or in this file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def name_copies(sets: Mapping[str, Sequence[tuple[str, int, Place]]], name_of: Callable[[str, int], str]) -> list[str]:
    """Return a sentence for each set that shares images with earlier sets, and for images in two classes.

    Args:
        sets: The training, validation and test set, in this order: of each image a key that equal ones share, its label
            and its place.
        name_of: Returns the name of an image in messages, by its part and row.
    """
    # 1. Images of a set that earlier sets have too.
    remarks: list[str] = []
    earlier_keys: set[str] = set()
    for number, (name, images) in enumerate(sets.items()):
        copies = [place for key, _, place in images if key in earlier_keys]
        if number and copies:
            names = " and ".join(name_of(*place) for place in copies[:_SHOWN])
            remarks.append(f"{len(copies):,} of {len(images):,} {name} images are also in "
                           f"{' or '.join(list(sets)[:number])}, such as {names}")
        earlier_keys |= {key for key, *_ in images} - {UNREADABLE}
    # 2. Images whose first copy, in any set, has another label.
    originals: dict[str, tuple[int, Place]] = {}
    conflicts = [(place, originals[key][1]) for key, label, place in chain(*sets.values())
                 if key != UNREADABLE and originals.setdefault(key, (label, place))[0] != label]
    if conflicts:
        copy, original = conflicts[0]
        remarks.append(f"{len(conflicts):,} images are copies of images of another class, such as {name_of(*copy)} of "
                       f"{name_of(*original)}")
    return remarks
