"""Images in folders, a folder a class: found, checked, decoded once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import DatasetInfo, Images, Listing, Progress, digest_files
from hwnas.data.options import DatasetOptions
from hwnas.data.splits import Selection
from hwnas.errors import DataError
from hwnas.system.paths import home, write_atomic
from hwnas.target.host import usable_cores

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

IN_MEMORY = 1 << 30
GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L", "I")


@dataclass(frozen=True, slots=True)
class Entry:
    """An image file: where it is, its size in bytes, its class."""

    path: str
    size: int
    label: int
    changed: int


def unreadable(path: str, error: Exception) -> DataError:
    reason = " ".join(str(error).replace(path, "").split()) or type(error).__name__
    return DataError(f"{path}: unreadable image ({reason}). Remove it, or set dataset.skip_unreadable=true.")


def decode(path: str, image_size: int, channels: int) -> Images:
    """One image [c, size, size]: shorter side resized (bilinear, anti-aliased), centre kept. Raises what Pillow does.

    EXIF orientation is left alone, as torchvision's ImageFolder does.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as file:
        file.draft(None, (2 * image_size, 2 * image_size))
        image: Image.Image = file
        if file.mode.startswith("I"):
            image = Image.fromarray((np.asarray(file).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
        elif file.mode == "F":
            raise ValueError("floating-point pixels")
        fitted = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (image_size, image_size),
                              Image.Resampling.BILINEAR)
    array = np.asarray(fitted)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _refuse_colour(path: str) -> None:
    """Colour is never dropped in silence."""
    from PIL import Image

    with Image.open(path) as image:
        if image.mode not in GREY:
            raise DataError(f"{path}: a colour image ({image.mode}) among grey ones. Set dataset.channels to 3, or to "
                            "1 to drop colour.")


@dataclass(frozen=True, slots=True)
class FileReader:
    """Decodes the files of each part, in memory or, above 1 GiB, in a file that is mapped."""

    files: dict[str, list[Entry]]
    channels: int
    options: DatasetOptions

    def __call__(self, selection: Selection, image_size: int, progress: Progress | None
                 ) -> list[tuple[Images, NDArray[np.bool_]]]:
        entries = [self.files[part][row] for part, rows in selection for row in rows]
        shape = (len(entries), self.channels, image_size, image_size)
        if np.prod(shape) <= IN_MEMORY:
            images = np.empty(shape, np.uint8)
            kept = self._decode_all(entries, images, progress)
        else:
            images, kept = self._mapped(entries, shape, progress)
        found, row, position = [], 0, 0
        for _, rows in selection:
            here = kept[row:row + len(rows)]
            row, start, position = row + len(rows), position, position + int(here.sum())
            found.append((images[start:position], here))
        return found

    def _decode_all(self, entries: Sequence[Entry], images: Images, progress: Progress | None) -> NDArray[np.bool_]:
        """Fill `images` from the front with those that can be read; which those were."""
        kept, position = np.zeros(len(entries), bool), 0
        with ThreadPoolExecutor(max(1, len(usable_cores()))) as pool:
            for row, image in enumerate(_ordered(pool, self._try, entries, images.shape[2])):
                if image is not None:
                    images[position], kept[row] = image, True
                    position += 1
                if progress is not None and ((row + 1) % 100 == 0 or row + 1 == len(entries)):
                    progress(row + 1, len(entries))
        return kept

    def _try(self, entry: Entry, image_size: int) -> Images | None:
        from PIL import Image

        try:
            if self.channels == 1 and self.options.channels is None:
                _refuse_colour(entry.path)
            return decode(entry.path, image_size, self.channels)
        except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
            if self.options.skip_unreadable:
                return None
            raise unreadable(entry.path, error) from error

    def _mapped(self, entries: Sequence[Entry], shape: tuple[int, ...], progress: Progress | None
                ) -> tuple[Images, NDArray[np.bool_]]:
        """Images in a file below the user's folder, decoded once; its name is the content's fingerprint.

        The file of rows kept is written first, so that a whole .npy always has one beside it.
        """
        key = digest_files([*((f"{e.path}:{e.changed}", e.size) for e in entries), (str(shape), 0)])
        path = home() / "cache" / f"images-{key}.npy"
        rows = path.with_suffix(".json")
        if not (path.is_file() and rows.is_file()):
            beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                images: Any = np.lib.format.open_memmap(beside, "w+", np.uint8, shape)
                kept = self._decode_all(entries, images, progress)
                images.flush()
                del images
                write_atomic(rows, json.dumps({"dropped": np.flatnonzero(~kept).tolist()}))
                os.replace(beside, path)
            except OSError as error:
                raise DataError(f"cannot write {path}: {error.strerror or error}. Free space there or set HWNAS_HOME "
                                "to a folder on another disk.") from error
            finally:
                beside.unlink(missing_ok=True)
        kept = np.ones(len(entries), bool)
        kept[json.loads(rows.read_text())["dropped"]] = False
        return np.load(path, mmap_mode="r", allow_pickle=False), kept


def _ordered(pool: ThreadPoolExecutor, work: Any, entries: Iterable[Entry], image_size: int) -> Iterator[Images | None]:
    """Results in order with few decoded ahead, so that memory stays small and the first error ends it."""
    waiting: list[Any] = []
    todo = iter(entries)
    try:
        for entry in islice(todo, 64):
            waiting.append(pool.submit(work, entry, image_size))
        while waiting:
            result: Images | None = waiting.pop(0).result()
            yield result
            waiting += [pool.submit(work, entry, image_size) for entry in islice(todo, 1)]
    finally:
        for future in waiting:
            future.cancel()
