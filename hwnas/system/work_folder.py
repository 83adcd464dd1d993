"""WorkFolder: a folder that belongs to one command. No command uses the folder of another, or a user's own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hwnas.errors import StudyError, UserError
from hwnas.system.documents import Document
from hwnas.system.paths import hold, unwritten, write_atomic

NAME = ".hwnas.json"
MARKER = Document("hwnas-folder", 1, "the mark of a folder", "Choose another out=FOLDER.")
_PASSING = re.compile(r"\.hwnas\.json.*|\.writable|\..+\.lock|\..+\.[0-9a-f]{8}\.tmp")  # names that hwnas itself leaves
_PROBE_BYTES = 1 << 20  # a disk that cannot take 1 MiB cannot take a run
_HEAD = 4096  # bytes in which documents and pictures of hwnas name it
_LOOKED_AT = 1 << 20  # bytes of a file that tell whether hwnas wrote it
_SECTIONS = ("target", "space", "n_trials", "accuracy", "sampler", "budget", "finalists")  # of a search's config.yaml

_SIGNS = (("certify", "plan.json", b'"hwnas-certify/'), ("train", "summary.json", b'"hwnas-training/'),
          ("train", "checkpoint.safetensors", b'"hwnas_checkpoint"'),
          ("compress", "steps/identity.json", b'"calibration_images"'),
          ("supernet", "supernet.safetensors", b'"hwnas_checkpoint"'))


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """The folder that `out` names. `kind` is the work done in it: search, train, compress, certify or supernet."""

    path: Path
    kind: str

    def take_up(self, overwrite: bool = False, within: Path | None = None) -> Self:
        """Make the folder and mark it as `kind`'s, or go on with one of this kind; returns itself.

        With `overwrite`, a folder with other files is used too: those that the work writes are replaced, the others
        stay. `within` is a folder whose work this is a part of. StudyError for a folder with other files, for one that
        is, or lies in, the folder of other work, and for one of a later version; nothing is changed then. UserError
        where it cannot be written.
        """
        if self.path.exists() and not self.path.is_dir():
            raise StudyError(f"{self.path} is a file. Choose another: out=FOLDER.")
        place = self.path.resolve()
        for around in place.parents:
            if within is not None and around == within.resolve():
                break
            if owner := kind_of(around):
                raise StudyError(f"{self.path} lies in {around}, {_folder_of(owner)}. Choose another out=FOLDER.")
        others = [] if overwrite or within is not None else _others(self.path)
        if kind_of(self.path) is None:  # asked last: meanwhile the same command may have begun in another process
            if others:
                more = f" and {len(others) - 1} more" if others[1:] else ""
                raise StudyError(f"{self.path} has files that hwnas did not make ({others[0]}{more}). Choose another "
                                 "out=FOLDER, or overwrite=true: files with the names of results are replaced.")
            self._mark()
        return self.check()

    def check(self) -> Self:
        """Itself; StudyError unless the folder is of this kind, UserError when it is read-only or the disk is full."""
        if (owner := kind_of(self.path)) != self.kind:
            raise StudyError(f"{self.path} is {_folder_of(owner)}. Choose another out=FOLDER." if owner else
                             f"{self.path} is not the folder of a {self.kind}.")
        if not (self.path / NAME).exists():
            self._mark()
        probe = self.path / ".writable"  # to fail now, in one line, rather than after hours of training
        try:
            write_atomic(probe, bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
        return self

    def hold(self, work: str, say: Callable[[str], None] | None = None, wait: bool = True
             ) -> AbstractContextManager[bool]:
        """A lock for one kind of `work` in the folder, see `locks.hold`; `say` is told that another process has it."""
        told = None if say is None else lambda: say(f"another process works in {self.path}; waiting")
        return hold(self.path / f".{work}.lock", told, wait=wait)

    def _mark(self) -> None:
        """Write the marker, unless another process was first."""
        from hwnas import __version__

        beside = self.path / f"{NAME}.{os.getpid()}"
        try:
            write_atomic(beside, json.dumps({**MARKER.header, "kind": self.kind, "hwnas": __version__}) + "\n")
            try:
                os.link(beside, self.path / NAME)
            except FileExistsError:
                pass
            except OSError:  # a file system without links
                os.replace(beside, self.path / NAME)
        except OSError as error:
            raise unwritten(self.path / NAME, error) from error
        finally:
            beside.unlink(missing_ok=True)


def check_replaceable(*paths: Path) -> None:
    """StudyError for a file that hwnas did not write: a command replaces results of its own only.

    Every document and picture of hwnas says so near its beginning.
    """
    for path in paths:
        if not path.is_file():
            continue
        with path.open("rb") as file:
            begin = file.read(_HEAD)
        if begin and b"hwnas" not in begin:
            raise StudyError(f"{path}: hwnas did not write this file, and would replace it. Move it, or name another.")


def kind_of(folder: Path) -> str | None:
    """The kind of work that a folder belongs to, None for a folder that hwnas did not make.

    Versions before the marker are known by what they wrote. StudyError for a marker of a later version.
    """
    if os.path.lexists(folder / NAME):
        return str(MARKER.read(folder / NAME).get("kind"))
    config = _begin(folder / "config.yaml").decode(errors="replace")
    if all(re.search(rf"^{key}:", config, re.MULTILINE) for key in _SECTIONS) and (
            (folder / "study.db").exists() or b'"hwnas-environment/' in _begin(folder / "environment.json")
            or re.search(r"^storage: (?!null)", config, re.MULTILINE)):
        return "search"
    return next((kind for kind, name, sign in _SIGNS if sign in _begin(folder / name)), None)


def _begin(path: Path) -> bytes:
    """The first bytes of a file, none where it cannot be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            return file.read(_LOOKED_AT)
    except OSError:
        return b""


def _others(path: Path) -> list[str]:
    """Names in a folder that hwnas does not leave itself."""
    try:
        return sorted(name for name in os.listdir(path) if not _PASSING.fullmatch(name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Choose another out=FOLDER.") from None


def _folder_of(kind: str) -> str:
    return f"the folder of a {'supernet' if kind == 'supernet' else f'python -m hwnas.{kind}'}"
