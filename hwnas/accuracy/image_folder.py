"""A folder of images: train/, val/ and test/ with one folder per class, or the class folders alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hwnas.accuracy.dataset import DatasetInfo, Listing, digest_files
from hwnas.accuracy.image_files import GREY, Entry, FileReader, unreadable
from hwnas.accuracy.options import DatasetOptions
from hwnas.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
ALIASES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}


def image_folder(options: DatasetOptions) -> Listing:
    """List a folder laid out as torchvision's ImageFolder, once or in train/, val/, test/; DataError says what is off.

    Grey files make one channel, any colour file among the first looked at makes three (`channels` decides otherwise).
    """
    root = options.root
    if root is None:
        raise DataError("dataset.root is not set. Give dataset.root=FOLDER that holds train/ and val/, or one folder "
                        "per class.")
    if not root.is_dir():
        raise DataError(f"{root}: no such folder. Give dataset.root=FOLDER that holds train/ and val/, or one folder "
                        "per class.")
    folders = _parts(root)
    names = {part: _class_names(folder) for part, folder in folders.items()}
    for part, found in names.items():
        if found != names["train"]:
            only = sorted(set(found) - set(names["train"])), sorted(set(names["train"]) - set(found))
            raise DataError(f"{folders[part]}: classes differ from {folders['train'].name}/: "
                            f"{_few(only[0]) or 'none'} only here, {_few(only[1]) or 'none'} only there. "
                            "Give both the same class folders.")
    files = {part: _files(folder, names[part]) for part, folder in folders.items()}
    channels, native_size = _look(files["train"], options)
    labels = {part: np.asarray([entry.label for entry in found], np.int64) for part, found in files.items()}
    listed = [(os.path.relpath(entry.path, root), entry.size) for found in files.values() for entry in found]
    reader = FileReader(files, channels, options)
    return Listing(DatasetInfo(options.name, channels, len(names["train"]), native_size), names["train"], labels,
                   digest_files(listed), str(root), reader)


def _parts(root: Path) -> dict[str, Path]:
    """{part: folder}; the root itself is `train` when it holds the classes. A `train` folder without subfolders is
    a class of that name."""
    found: dict[str, Path] = {}
    for part, aliases in ALIASES.items():
        present = [root / name for name in aliases if _folders(root / name)]
        if len(present) > 1:
            raise DataError(f"{root}: {present[0].name}/ and {present[1].name}/ mean the same. Keep one of them.")
        if present:
            found[part] = present[0]
    if found and "train" not in found:
        raise DataError(f"{root}: {next(iter(found.values())).name}/ without train/. Give train/, or one folder per "
                        "class.")
    return found or {"train": root}


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
        raise DataError(f"{folder}: empty, no class folders. Give dataset.root=FOLDER that holds train/ and val/, or "
                        "one folder per class.")
    return names


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def _files(folder: Path, names: Sequence[str]) -> list[Entry]:
    found = []
    for label, name in enumerate(names):
        entries = sorted(_walk(str(folder / name), label), key=lambda entry: entry.path)
        if not entries:
            raise DataError(f"{folder / name}: no images ({', '.join(EXTENSIONS)}). Add some or remove the folder.")
        found += entries
    return found


def _walk(folder: str, label: int) -> Iterator[Entry]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    yield from _walk(entry.path, label)
                elif entry.name.lower().endswith(EXTENSIONS):
                    status = entry.stat()
                    yield Entry(entry.path, status.st_size, label, status.st_mtime_ns)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read ({error.strerror}). Make it readable.") from error


def _look(files: Sequence[Entry], options: DatasetOptions, most: int = 64) -> tuple[int, int]:
    """Channels and usual shorter side, from the headers of some files spread over the classes."""
    from PIL import Image

    rows = np.unique(np.linspace(0, len(files) - 1, min(most, len(files))).round().astype(int))
    grey, sides = True, []
    for row in rows:
        try:
            with Image.open(files[row].path) as image:
                grey &= image.mode in GREY
                sides.append(min(image.size))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            if not options.skip_unreadable:
                raise unreadable(files[row].path, error) from error
    if not sides:
        raise DataError(f"{options.root}: none of {len(rows)} images looked at can be read. Check the files.")
    return options.channels or (1 if grey else 3), int(np.median(sides))
