"""Image files to uint8 arrays: decoded and resized once, in threads (Pillow decodes outside the interpreter lock)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.dataset import Images, Progress, digest_files
from hwnas.accuracy.options import DatasetOptions
from hwnas.accuracy.splits import Selection
from hwnas.errors import DataError
from hwnas.latency.host import usable_cores
from hwnas.paths import home, write_atomic

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
