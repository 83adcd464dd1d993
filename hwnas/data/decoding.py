"""Decodes images: once, to uint8 at one size, in memory or in a file that is mapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hwnas.data.contents import digest
from hwnas.data.dataset import Images, Progress
from hwnas.data.options import DatasetOptions
from hwnas.data.splits import Selection
from hwnas.errors import DataError
from hwnas.system.paths import home, write_atomic
from hwnas.target.host import usable_cores

if TYPE_CHECKING:
    from PIL import Image

IN_MEMORY = 1 << 30
GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L", "I")


class Source(Protocol):
    """One encoded image."""

    @property
    def name(self) -> str:
        """What messages call the image: a path, or a place in an array."""
        ...

    def open(self) -> Image.Image:
        """The image, not yet decoded; raises what Pillow does."""
        ...


def look(sources: Sequence[Source], options: DatasetOptions, where: str, most: int = 64) -> tuple[int, int]:
    """Channels and usual shorter side in pixels, from the headers of `most` images spread over the classes.

    DataError when no image can be read, or when any cannot and `skip_unreadable` is off.
    """
    rows = np.unique(np.linspace(0, len(sources) - 1, min(most, len(sources))).round().astype(int))
    grey, sides = True, []
    for row in rows:
        try:
            with sources[row].open() as image:
                grey &= image.mode in GREY
                sides.append(min(image.size))
        except _unreadable() as error:
            if not options.skip_unreadable:
                raise unreadable(sources[row].name, error) from error
    if not sides:
        raise DataError(f"{where}: none of {len(rows)} images looked at can be read. Check the files.")
    return options.channels or (1 if grey else 3), int(np.median(sides))


def _unreadable() -> tuple[type[Exception], ...]:
    from PIL import Image

    return (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


def unreadable(path: str, error: Exception) -> DataError:
    """The error that names an image which cannot be decoded, the reason, and what to do."""
    reason = " ".join(str(error).replace(path, "").split()) or type(error).__name__
    return DataError(f"{path}: unreadable image ({reason}). Remove it, or set dataset.skip_unreadable=true.")


def decode(file: Image.Image, image_size: int, channels: int) -> Images:
    """One image [c, size, size]: shorter side resized (bilinear, anti-aliased), centre kept. Raises what Pillow does.

    EXIF orientation is left alone, as torchvision's ImageFolder does.
    """
    from PIL import Image, ImageOps

    file.draft(None, (2 * image_size, 2 * image_size))
    image = file
    if file.mode.startswith("I"):
        image = Image.fromarray((np.asarray(file).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif file.mode == "F":
        raise ValueError("floating-point pixels")
    fitted = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (image_size, image_size),
                          Image.Resampling.BILINEAR)
    array = np.asarray(fitted)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the images of each part, in memory or, above 1 GiB, in a file that is mapped.

    `content` names what all sources hold, and that file by it: another content is decoded anew.
    """

    sources: Mapping[str, Sequence[Source]]
    channels: int
    options: DatasetOptions
    content: Callable[[], str]

    def __call__(self, selection: Selection, image_size: int, progress: Progress | None
                 ) -> list[tuple[Images, NDArray[np.bool_]]]:
        sources = [self.sources[part][row] for part, rows in selection for row in rows]
        shape = (len(sources), self.channels, image_size, image_size)
        if np.prod(shape) <= IN_MEMORY:
            images = np.empty(shape, np.uint8)
            kept = self._decode_all(sources, images, progress)
        else:
            chosen = [f"{part} {hashlib.sha256(rows.tobytes()).hexdigest()}" for part, rows in selection]
            key = digest(self.content(), *chosen, self.options.skip_unreadable, shape)
            images, kept = self._map_file(key, sources, shape, progress)
        parts, row, position = [], 0, 0
        for _, rows in selection:
            here = kept[row:row + len(rows)]
            row, start, position = row + len(rows), position, position + int(here.sum())
            parts.append((images[start:position], here))
        return parts

    def _decode_all(self, sources: Sequence[Source], images: Images, progress: Progress | None) -> NDArray[np.bool_]:
        """Fill `images` from the front with the images that can be read; returns which they were."""
        kept, position = np.zeros(len(sources), bool), 0
        with ThreadPoolExecutor(max(1, len(usable_cores()))) as pool:
            for row, image in enumerate(_keep_order(pool, self._try, sources, images.shape[2])):
                if image is not None:
                    images[position], kept[row] = image, True
                    position += 1
                if progress is not None and ((row + 1) % 100 == 0 or row + 1 == len(sources)):
                    progress(row + 1, len(sources))
        return kept

    def _try(self, source: Source, image_size: int) -> Images | None:
        try:
            with source.open() as image:
                if self.channels == 1 and self.options.channels is None and image.mode not in GREY:
                    raise DataError(f"{source.name}: a colour image ({image.mode}) among grey ones. Set "
                                    "dataset.channels to 3, or to 1 to drop colour.")  # never dropped in silence
                return decode(image, image_size, self.channels)
        except _unreadable() as error:
            if self.options.skip_unreadable:
                return None
            raise unreadable(source.name, error) from error

    def _map_file(self, key: str, sources: Sequence[Source], shape: tuple[int, ...], progress: Progress | None
                  ) -> tuple[Images, NDArray[np.bool_]]:
        """Images in a file below the user's folder, decoded once; `key` names their content.

        The file of kept rows is written first, so that a whole .npy always has one beside it.
        """
        path = home() / "cache" / f"images-{key}.npy"
        rows = path.with_suffix(".json")
        if not (path.is_file() and rows.is_file()):
            beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                images: Any = np.lib.format.open_memmap(beside, "w+", np.uint8, shape)
                kept = self._decode_all(sources, images, progress)
                images.flush()
                del images
                write_atomic(rows, json.dumps({"dropped": np.flatnonzero(~kept).tolist()}))
                os.replace(beside, path)
            except OSError as error:
                raise DataError(f"cannot write {path}: {error.strerror or error}. Free space there or set HWNAS_HOME "
                                "to a folder on another disk.") from error
            finally:
                beside.unlink(missing_ok=True)
        kept = np.ones(len(sources), bool)
        kept[json.loads(rows.read_text())["dropped"]] = False
        return np.load(path, mmap_mode="r", allow_pickle=False), kept


def _keep_order(pool: ThreadPoolExecutor, work: Any, sources: Iterable[Source], image_size: int
             ) -> Iterator[Images | None]:
    """Results in order. Few images are decoded ahead, so that memory stays small and the first error ends it."""
    waiting: list[Any] = []
    todo = iter(sources)
    try:
        for source in islice(todo, 64):
            waiting.append(pool.submit(work, source, image_size))
        while waiting:
            result: Images | None = waiting.pop(0).result()
            yield result
            waiting += [pool.submit(work, source, image_size) for source in islice(todo, 1)]
    finally:
        for future in waiting:
            future.cancel()
