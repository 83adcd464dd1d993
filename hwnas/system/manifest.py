"""Manifest: the files that were made in a model folder, by size and SHA-256. It is written last, and whole."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hwnas.errors import UserError
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic

NAME = "manifest.json"
_MOST_NAME = 255  # bytes
MANIFEST = Document("hwnas-model", 1, "the manifest of a model folder", "Remove it, and give the command again: the "
                    "files beside it are then checked, or made again.",
                    shape={"recipe": str, "parity": {"*": float}, "files": {"*": {"size": int, "sha256": str}}})


@dataclass(frozen=True, slots=True)
class Content:
    """What is in a file: its bytes, counted and by SHA-256 (hexadecimal)."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Content | None:
        """The content of a file; None where there is no regular file. UserError where it cannot be read."""
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                return None
            with open(path, "rb") as file:
                return cls(status.st_size, hashlib.file_digest(file, "sha256").hexdigest())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}. Make it readable.") from None


@dataclass(frozen=True)
class Manifest:
    """The files of one model folder by name, the fingerprint of what decides the weights, and what parity saw.

    `parity` is empty where no export was checked. A manifest tells damage and mix-ups, not intent: who can write the
    folder can write the manifest, too.
    """

    recipe: str
    files: Mapping[str, Content]
    parity: Mapping[str, float]

    @classmethod
    def find(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`, None where there is none; StudyError for one that is torn or of a later version."""
        path = folder / NAME
        data = MANIFEST.find(path)
        if data is None:
            return None
        with MANIFEST.reading(path):
            if wrong := next((name for name in data["files"] if len(os.fsencode(name)) > _MOST_NAME), None):
                raise ValueError(f"{wrong[:40]}… is no name of a file")
            files = {name: Content(entry["size"], entry["sha256"]) for name, entry in data["files"].items()}
            return cls(data["recipe"], files, data["parity"])

    @classmethod
    def write(cls, folder: Path, paths: Iterable[Path], recipe: str, parity: Mapping[str, float] | None = None) -> None:
        """Say in `folder` that those of `paths` that are files are finished."""
        files = {path.name: asdict(content) for path in paths if (content := Content.of(path)) is not None}
        data = {**MANIFEST.header, "recipe": recipe, "parity": dict(parity or {}), "files": files}
        write_atomic(folder / NAME, json.dumps(data, indent=1) + "\n")

    def fault(self, path: Path) -> str:
        """Why `path` is not the file that was made, as a sentence without a full stop; empty where it is."""
        made, now = self.files.get(path.name), Content.of(path)
        if made is None:
            return f"{path.name} is not in {NAME}: its making did not come to an end"
        if now == made:
            return ""
        if now is None:
            return f"{path.name} is missing"
        how = f"{now.size} bytes, was {made.size}" if now.size != made.size else \
            f"SHA-256 {now.sha256[:12]}…, was {made.sha256[:12]}…"
        return f"{path.name} is not the file that was made: {how}"

    def faults(self, *needed: Path) -> list[str]:
        """`fault` of every `needed` file, and of those listed that lie in the same folder and differ."""
        folder = needed[0].parent
        others = [folder / name for name in self.files if (folder / name).name == name and (folder / name).exists()]
        return [text for path in dict.fromkeys([*needed, *others]) if (text := self.fault(path))]
