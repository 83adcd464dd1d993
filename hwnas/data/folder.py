"""Images in folders, a folder a class: found and checked."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from hwnas.data.contents import Contents, digest_files, state_of
from hwnas.data.dataset import DatasetInfo, DatasetOptions, Listing
from hwnas.data.decoding import Decoder, look
from hwnas.errors import DataError
from hwnas.lazy import PIL
from hwnas.system.paths import is_utf8

if TYPE_CHECKING:
    from PIL import Image

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
PLUGINS = (".avif", ".heic", ".heif")  # read where this Pillow can
ALIASES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_GIVE = "Give dataset.root=FOLDER that holds train/ and val/, or one folder per class."


def image_folder(options: DatasetOptions) -> Listing:
    """List a folder in the layout of torchvision's ImageFolder, once or in train/, val/, test/; DataError names what is
    wrong.

    Grey files make one channel. Any colour file among the first ones looked at makes three (`channels` overrides that).
    """
    root = options.root
    if root is None or not root.is_dir():
        fact = "dataset.root is not set" if root is None else f"{root}: no such folder"
        raise DataError(f"{fact}. {_GIVE}")
    folders = _parts(root)
    names = {part: _class_names(folder) for part, folder in folders.items()}
    for part, part_names in names.items():
        if part_names != names["train"]:
            only = sorted(set(part_names) - set(names["train"])), sorted(set(names["train"]) - set(part_names))
            raise DataError(f"{folders[part]}: classes differ from {folders['train'].name}/: "
                            f"{_few(only[0]) or 'none'} only here, {_few(only[1]) or 'none'} only there. "
                            "Give both the same class folders.")
    left_out = Counter[str]()
    files = {part: _files(folder, names[part], left_out) for part, folder in folders.items()}
    channels, native_size = look(files["train"], options, str(root))
    labels = {part: np.asarray([entry.label for entry in entries], np.int64) for part, entries in files.items()}
    start = len(str(root / "x")) - 1  # of a path below the root, in each file's
    listed = {entry.path[start:]: entry for entries in files.values() for entry in entries}
    contents = Contents(root, {place: entry.state for place, entry in listed.items()})
    reader = Decoder(files, channels, options, lambda: contents.identity, left_out)
    return Listing(DatasetInfo(options.name, channels, len(names["train"]), native_size), names["train"], labels,
                   digest_files([(place, entry.size) for place, entry in listed.items()]), str(root), reader, contents,
                   left_out, pictures=True)


def _parts(root: Path) -> dict[str, Path]:
    """{part: folder}; the root itself is `train` when it holds the classes. A `train` folder without subfolders is
    a class of that name."""
    folders: dict[str, Path] = {}
    for part, aliases in ALIASES.items():
        present = [root / name for name in aliases if _folders(root / name)]
        if len(present) > 1:
            raise DataError(f"{root}: {present[0].name}/ and {present[1].name}/ mean the same. Keep one of them.")
        if present:
            folders[part] = present[0]
    if folders and "train" not in folders:
        raise DataError(f"{root}: {next(iter(folders.values())).name}/ without train/. Give train/, or one folder per "
                        "class.")
    return folders or {"train": root}


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}). Make it readable.") from error


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(_folders(folder))
    if not names:
        raise DataError(f"{folder}: empty, no class folders. {_GIVE}")
    for name in names:
        if not is_utf8(name):
            raise DataError(f"{folder}: the name of class {name!a} is not UTF-8. Rename its folder.")
    return names


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _files(folder: Path, names: Sequence[str], left_out: Counter[str]) -> list[Entry]:
    files = []
    for label, name in enumerate(names):
        entries = sorted(image_files(str(folder / name), label, left_out), key=lambda entry: entry.path)
        if not entries:
            raise DataError(f"{folder / name}: no images ({', '.join(EXTENSIONS)}). Add some or remove the folder.")
        files += entries
    return files


def _is_image(name: str) -> bool:
    name = name.lower()
    return name.endswith(EXTENSIONS) or (name.endswith(PLUGINS) and _opens(os.path.splitext(name)[1]))


@cache
def _opens(ending: str) -> bool:
    """Whether this Pillow, with its plugins, reads images of an ending among PLUGINS."""
    return ending in PIL.Image.registered_extensions()


def image_files(folder: str, label: int, left_out: Counter[str]) -> Iterator[Entry]:
    """Images below the folder. Hidden files are nobody's images; others, and what is no file, such as a pipe or a link
    to nothing, are counted in `left_out` by the reason."""
    folders = [folder]
    while folders:  # not by recursion: folders may lie deeper than Python calls
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        folders.append(entry.path)
                    elif not _is_image(entry.name):
                        left_out[_reason(entry.name)] += 1
                    elif (status := _status(entry)) is None:
                        left_out["link to nothing"] += 1
                    elif not stat.S_ISREG(status.st_mode):  # who opens a pipe waits for ever
                        left_out["no regular file"] += 1
                    else:
                        yield Entry(entry.path, status.st_size, label, state_of(status))
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror}). Make it readable.") \
                from error


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What a name stands for; None for a link to nothing."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None


def _reason(name: str) -> str:
    ending = os.path.splitext(name)[1].lower()
    return f"ending {ending}" if 1 < len(ending) <= 8 and ending.isprintable() else "no image's ending"


@dataclass(frozen=True, slots=True)
class Entry:
    """An image file: where it is, its size in bytes, its class, and its state, which another content changes."""

    path: str
    size: int
    label: int
    state: str

    @property
    def name(self) -> str:
        """The path, for messages."""
        return self.path

    def open(self) -> Image.Image:
        return open_image(self.path)


def open_image(file: str | BinaryIO) -> PIL.Image.Image:
    """Open an image of a format whose ending is listed, whatever the file is called: Pillow runs another program for
    some others (PostScript)."""
    return PIL.Image.open(file, formats=_formats())


@cache
def _formats() -> tuple[str, ...]:
    """Pillow's names of the formats that are read."""
    known = PIL.Image.registered_extensions()
    return tuple(dict.fromkeys(known[ending] for ending in (*EXTENSIONS, *PLUGINS) if ending in known))
