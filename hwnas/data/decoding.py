"""Decodes images: once, to uint8 at one size, in memory or in a file that is mapped."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hwnas.data.contents import digest
from hwnas.data.dataset import DatasetOptions, Images, Progress, Selection
from hwnas.errors import DataError
from hwnas.lazy import PIL
from hwnas.system.cores import usable_cores
from hwnas.system.paths import home, write_atomic

if TYPE_CHECKING:
    from PIL import Image

Dropped = dict[str, list[int]]  # rows left out, by reason
IN_MEMORY = 1 << 30
ZEROS = 1 << 20
IN_FLIGHT = 64_000_000  # pixels that all threads decode at a time: up to 8 bytes each while an image is converted
FREE = 1_000_000  # pixels of an image that needs no leave: asking costs more than so few can take
CANNOT, TOO_LARGE = "cannot be decoded", "too many pixels"  # reasons to leave an image out
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
            with _bounded_here(), sources[row].open() as image:
                grey &= image.mode in GREY
                sides.append(min(image.size))
        except _unreadable() as error:
            if not options.skip_unreadable:
                raise unreadable(sources[row].name, error) from error
    if not sides:
        raise DataError(f"{where}: none of {len(rows)} images looked at can be read. Check the files.")
    return options.channels or (1 if grey else 3), int(np.median(sides))


def _unreadable() -> tuple[type[Exception], ...]:
    return (OSError, ValueError, SyntaxError, EOFError, PIL.Image.DecompressionBombError)


@contextmanager
def _bounded_here() -> Iterator[None]:
    """Pillow warns of large images; in this block, which all threads share, `max_pixels` decides without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        yield


def _too_large() -> tuple[type[Exception], ...]:
    return TooManyPixels, PIL.Image.DecompressionBombError


def unreadable(path: str, error: Exception) -> DataError:
    """The error that names an image which cannot be decoded, the reason, and what to do."""
    reason = " ".join(str(error).replace(path, "").split()) or type(error).__name__
    what = "image too large" if isinstance(error, _too_large()) else "unreadable image"
    step = "Set dataset.max_pixels higher" if isinstance(error, TooManyPixels) else "Remove it"
    return DataError(f"{path}: {what} ({reason}). {step}, or set dataset.skip_unreadable=true.")


class TooManyPixels(ValueError):
    """An image is larger than `dataset.max_pixels`."""


class _Gate:
    """Lets threads pass with so many pixels, `most` together; an image of more passes alone."""

    def __init__(self, most: int) -> None:
        self._most, self._free, self._changed = most, most, Condition()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for the pixels, and take it during the block."""
        pixels = min(pixels, self._most)
        with self._changed:
            self._changed.wait_for(lambda: pixels <= self._free)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


def decode(file: PIL.Image.Image, image_size: int, channels: int) -> Images:
    """One image [c, size, size]: shorter side resized (bilinear, anti-aliased), centre kept. Raises what Pillow does.

    EXIF orientation is left alone, as torchvision's ImageFolder does.
    """
    _shrink(file, image_size)
    image = file
    if file.mode.startswith("I"):
        image = PIL.Image.fromarray((np.asarray(file) >> 8).clip(0, 255).astype(np.uint8))
    elif file.mode == "F":
        raise ValueError("floating-point pixels")
    fitted = PIL.ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (image_size, image_size),
                              PIL.Image.Resampling.BILINEAR)
    array = np.asarray(fitted)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _shrink(file: Image.Image, image_size: int) -> int:
    """Ask for a JPEG at a fraction of its size; returns how many pixels will be decoded. Ask as often as you like."""
    whole = file.width * file.height
    file.draft(None, (2 * image_size, 2 * image_size))
    return whole if file.info.get("progressive") else file.width * file.height


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the images of each part, in memory or, above 1 GiB, in a file that is mapped.

    `content` names what all sources hold, and that file by it: another content is decoded anew. `left_out` counts
    dropped images by reason. Memory stays small whatever the images claim: see `dataset.max_pixels` and IN_FLIGHT.
    """

    sources: Mapping[str, Sequence[Source]]
    channels: int
    options: DatasetOptions
    content: Callable[[], str]
    left_out: Counter[str] = field(default_factory=Counter)

    def __call__(self, selection: Selection, image_size: int, progress: Progress | None
                 ) -> list[tuple[Images, NDArray[np.bool_]]]:
        sources = [self.sources[part][row] for part, rows in selection for row in rows]
        shape = (len(sources), self.channels, image_size, image_size)
        if np.prod(shape) <= IN_MEMORY:
            images = np.empty(shape, np.uint8)
            dropped = self._decode_all(sources, images, progress)
        else:
            chosen = [f"{part} {hashlib.sha256(rows.tobytes()).hexdigest()}" for part, rows in selection]
            key = digest(self.content(), *chosen, self.options.skip_unreadable, self.options.max_pixels, shape)
            images, dropped = self._map_file(key, sources, shape, progress)
        self.left_out.update({reason: len(rows) for reason, rows in dropped.items()})
        kept = np.ones(len(sources), bool)
        kept[[row for rows in dropped.values() for row in rows]] = False
        parts, row, position = [], 0, 0
        for _, rows in selection:
            here = kept[row:row + len(rows)]
            row, start, position = row + len(rows), position, position + int(here.sum())
            parts.append((images[start:position], here))
        return parts

    def _decode_all(self, sources: Sequence[Source], images: Images, progress: Progress | None) -> Dropped:
        """Fill `images` from the front with the images that can be read; returns the rows of the others by reason."""
        dropped: Dropped = {}
        position, gate = 0, _Gate(IN_FLIGHT)
        with _bounded_here(), ThreadPoolExecutor(max(1, len(usable_cores()))) as pool:
            for row, image in enumerate(_keep_order(pool, partial(self._try, gate), sources, images.shape[2])):
                if isinstance(image, str):
                    dropped.setdefault(image, []).append(row)
                else:
                    images[position] = image
                    position += 1
                if progress is not None and ((row + 1) % 100 == 0 or row + 1 == len(sources)):
                    progress(row + 1, len(sources))
        return dropped

    def _try(self, gate: _Gate, source: Source, image_size: int) -> Images | str:
        """The image, or why it is left out."""
        most = self.options.max_pixels
        try:
            with source.open() as image:
                if image.width * image.height > most:
                    raise TooManyPixels(f"{image.width} x {image.height} pixels, more than {most}")
                if self.channels == 1 and self.options.channels is None and image.mode not in GREY:
                    raise DataError(f"{source.name}: a colour image ({image.mode}) among grey ones. Set "
                                    "dataset.channels to 3, or to 1 to drop colour.")  # never dropped in silence
                pixels = _shrink(image, image_size)
                with gate.hold(pixels) if pixels > FREE else nullcontext():
                    return decode(image, image_size, self.channels)
        except _unreadable() as error:
            if self.options.skip_unreadable:
                return TOO_LARGE if isinstance(error, _too_large()) else CANNOT
            raise unreadable(source.name, error) from error

    def _map_file(self, key: str, sources: Sequence[Source], shape: tuple[int, ...], progress: Progress | None
                  ) -> tuple[Images, Dropped]:
        """Images in a file below the user's folder, decoded once; `key` names their content.

        The file of dropped rows is written first, so that a whole .npy always has one beside it.
        """
        path = home() / "cache" / f"images-{key}.npy"
        rows = path.with_suffix(".json")
        if not (path.is_file() and rows.is_file()):
            beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                images: Any = np.lib.format.open_memmap(beside, "w+", np.uint8, shape)
                _reserve(beside, images.offset)
                dropped = self._decode_all(sources, images, progress)
                images.flush()
                del images
                write_atomic(rows, json.dumps({"dropped": dropped}))
                os.replace(beside, path)
            except OSError as error:
                raise DataError(f"cannot write {path}, which needs {np.prod(shape) + 128:,} bytes in {path.parent}: "
                                f"{error.strerror or error}. Free space there or set HWNAS_HOME to a folder on another "
                                "disk.") from error
            finally:
                with suppress(OSError):
                    beside.unlink(missing_ok=True)
        return np.load(path, mmap_mode="r", allow_pickle=False), json.loads(rows.read_text())["dropped"]


def _reserve(path: Path, start: int) -> None:
    """Give the file the space that its size promises, without a change from byte `start` on but zeros; OSError when
    there is less.

    A mapped file is sparse: without this, a full disk is told by a signal that ends the process.
    """
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except (AttributeError, OSError) as error:  # macOS and Windows have no such function, some disks refuse it
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            file.seek(start)
            for position in range(start, size, ZEROS):
                file.write(bytes(min(ZEROS, size - position)))


def _keep_order(pool: ThreadPoolExecutor, work: Callable[[Source, int], Images | str], sources: Iterable[Source],
                image_size: int) -> Iterator[Images | str]:
    """Results in order. Few images are decoded ahead, so that memory stays small and the first error ends it."""
    waiting: list[Future[Images | str]] = []
    todo = iter(sources)
    try:
        for source in islice(todo, 64):
            waiting.append(pool.submit(work, source, image_size))
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(work, source, image_size) for source in islice(todo, 1)]
    finally:
        for future in waiting:
            future.cancel()
