"""Images are decoded once, to uint8 at one size, and kept in a file for the next command."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hwnas.data.contents import digest, remove_oldest
from hwnas.data.dataset import DatasetOptions, Images, Progress, Selection
from hwnas.data.file_kinds import WrongKind
from hwnas.data.pixels import ALL_16_BITS, GREY, TORN, ImageFacts, Levels, Range, Survey, as_seen, check_bright, is_deep
from hwnas.errors import DataError
from hwnas.lazy import PIL
from hwnas.system.cores import usable_cores
from hwnas.system.documents import WRONG
from hwnas.system.paths import home, write_atomic

if TYPE_CHECKING:
    from PIL import Image

Dropped = dict[str, list[int]]  # rows left out, by reason
IN_MEMORY = 1 << 30  # bytes; more stays in its file, which is mapped
KEPT = 1 << 24  # bytes from which decoded images are kept in a file
MOST_FILES = 16  # files of decoded images that are kept
ZEROS = 1 << 20  # bytes that are written at a time
IN_FLIGHT = 64_000_000  # pixels that all threads decode at a time: up to 8 bytes each while an image is converted
FREE = 1_000_000  # pixels of an image that passes without the gate, whose lock would cost more than it saves
CANNOT, TOO_LARGE = "cannot be decoded", "too many pixels"  # reasons to leave an image out
LOOKED_AT = 64  # images whose headers are read, to learn what the others are
AHEAD = 64  # images that threads decode before the first of them is taken
_SHOWN = 3  # files that an error names


class Source(Protocol):
    """An encoded image."""

    @property
    def name(self) -> str:
        """The name of the image in messages: a path, or a place in an array."""
        ...

    def open(self) -> Image.Image:
        """Open the image without decoding it; raises what Pillow does."""
        ...


@dataclass(frozen=True, slots=True)
class LazyImage:
    """An image that is no file of its own: in an array, a table, an archive, or in memory."""

    name: str
    open: Callable[[], PIL.Image.Image]


def look(sources: Sequence[Source], options: DatasetOptions, where: str) -> tuple[int, int]:
    """Return channels and usual shorter side in pixels, from the headers of LOOKED_AT images spread over the classes.
    DataError if none of them can be read, or if one cannot and `skip_unreadable` is off."""
    rows = np.unique(np.linspace(0, len(sources) - 1, min(LOOKED_AT, len(sources))).round().astype(int))
    grey, sides = True, []
    for row in rows:
        try:
            with _bounded_here(), sources[row].open() as image:
                grey &= image.mode in GREY
                sides.append(min(image.size))
        except _unreadable() as error:
            if not options.skip_unreadable:
                raise unreadable(sources[row], error, sources) from error
    if not sides:
        raise DataError(f"{where}: none of {len(rows)} images looked at can be read. Check the files.")
    return options.channels or (1 if grey else 3), int(np.median(sides))


def _unreadable() -> tuple[type[Exception], ...]:
    return (*TORN, PIL.Image.DecompressionBombError)


@contextmanager
def _bounded_here() -> Iterator[None]:
    """Silence Pillow's warnings in this block, for all threads: `max_pixels` decides, and torn EXIF does not matter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Possibly c|C)orrupt EXIF", UserWarning)
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
        yield


def _too_large() -> tuple[type[Exception], ...]:
    return TooManyPixels, PIL.Image.DecompressionBombError


def unreadable(source: Source, error: Exception, sources: Sequence[Source]) -> DataError:
    """Return the error for an image that cannot be decoded, with others of its wrong kind and the next step."""
    # A file of another kind is rarely alone: name some of the others too.
    if isinstance(error, WrongKind):
        same_kind = [each.name for each in sources if each is not source and kind_of(each) == error.kind]
        names = ", ".join(same_kind[:_SHOWN - 1]) + (" …" if len(same_kind) >= _SHOWN else "")
        more = f", and so are {len(same_kind):,} more ({names})" if same_kind else ""
        return DataError(f"{source.name}: unreadable image: it is {error.kind}{more}. {error.step}, or set "
                         "dataset.skip_unreadable=true.")
    reason = " ".join(str(error).replace(source.name, "").split()) or type(error).__name__
    fault = "image too large" if isinstance(error, _too_large()) else "unreadable image"
    step = "Set dataset.max_pixels higher" if isinstance(error, TooManyPixels) else "Remove it"
    if isinstance(error, PIL.UnidentifiedImageError):
        reason, step = "torn, or of a kind that is not read", "Convert or remove it"
    return DataError(f"{source.name}: {fault} ({reason}). {step}, or set dataset.skip_unreadable=true.")


def kind_of(source: Source) -> str:
    """Return the kind of file of an image that cannot be opened; empty if that is unknown."""
    try:
        with _bounded_here(), source.open():
            return ""
    except _unreadable() as error:
        return error.kind if isinstance(error, WrongKind) else ""


class TooManyPixels(ValueError):
    """An image is larger than `dataset.max_pixels`."""


class _Gate:
    """A gate for threads. Images that are inside together have at most `most` pixels; an image of more passes alone."""

    def __init__(self, most: int) -> None:
        self._most, self._free, self._changed = most, most, Condition()

    @contextmanager
    def hold(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for the pixels, and occupy it during the block."""
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


class _NeedsLevels(Exception):
    """An image has more than 8 bits, and the range of the data set is not known yet."""


def decode(file: PIL.Image.Image, image_size: int, channels: int, levels: Levels = ALL_16_BITS, upright: bool = False,
           whole: bool = False) -> Images:
    """Return one image [c, size, size]: shorter side resized (bilinear, anti-aliased) and centre kept, or with `whole`
    stretched to a square. Raises what Pillow does. `levels` and `upright` are arguments of `as_seen`."""
    _shrink(file, image_size)
    picture, square = as_seen(file, "L" if channels == 1 else "RGB", levels, upright), (image_size, image_size)
    array = np.asarray(picture.resize(square, PIL.Image.Resampling.BILINEAR) if whole else
                       PIL.ImageOps.fit(picture, square, PIL.Image.Resampling.BILINEAR))
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _shrink(file: Image.Image, image_size: int) -> int:
    """Ask for a JPEG at a fraction of its size, and return how many pixels will be decoded. May be called again."""
    whole = file.width * file.height
    file.draft(None, (2 * image_size, 2 * image_size))
    # Pillow holds a progressive JPEG in memory at its full size, whatever fraction it then gives.
    return whole if file.info.get("progressive") else file.width * file.height


@dataclass(slots=True)
class Decoder:
    """A decoder of the images of each part. It keeps them in a file if they are many, and maps that above 1 GiB.

    `content` names what all sources hold, and so the file: other content is decoded anew. Without it there is no file.
    `left_out` counts dropped images by reason, and `survey` describes the others. With `refuses_dark` an image of more
    than 8 bits that uses none of the upper ones is an error: nobody has said which value is white. `whole`: as of
    `decode`. Memory stays small whatever size images claim: see `dataset.max_pixels` and IN_FLIGHT.
    """

    sources: Mapping[str, Sequence[Source]]
    channels: int
    options: DatasetOptions
    content: Callable[[], str] | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    survey: Survey = field(default_factory=Survey)
    refuses_dark: bool = False
    whole: bool = False

    def __call__(self, selection: Selection, image_size: int, progress: Progress | None
                 ) -> list[tuple[Images, NDArray[np.bool_]]]:
        # 1. Decode the images of all parts into one array, or take it from the file of an earlier command.
        sources = [self.sources[part][row] for part, rows in selection for row in rows]
        shape = (len(sources), self.channels, image_size, image_size)
        if self.content is None or np.prod(shape) <= min(KEPT, IN_MEMORY):
            images: Images = np.empty(shape, np.uint8)
            dropped = self._decode_all(sources, images, progress)
        else:
            row_digests = [f"{part} {hashlib.sha256(rows.tobytes()).hexdigest()}" for part, rows in selection]
            options = self.options
            key = digest(self.content(), *row_digests, options.skip_unreadable, options.max_pixels, options.levels,
                         options.upright, options.channels, PIL.__version__, shape, *["whole"] * self.whole)
            images, dropped = self._keep_file(key, sources, shape, progress)
        self.left_out.update({reason: len(rows) for reason, rows in dropped.items()})
        # 2. Divide the array by parts: it has no rows for dropped images.
        is_decoded = np.ones(len(sources), bool)
        is_decoded[[row for rows in dropped.values() for row in rows]] = False
        parts, row, position = [], 0, 0
        for _, rows in selection:
            in_part = is_decoded[row:row + len(rows)]
            row, start, position = row + len(rows), position, position + int(in_part.sum())
            parts.append((images[start:position], in_part))
        return parts

    def _decode_all(self, sources: Sequence[Source], images: Images, progress: Progress | None,
                    survey: Survey | None = None) -> Dropped:
        """Fill `images` from the front with the images that can be read. Return the rows of the others by reason. If an
        image needs levels, start again with levels from the range of all images."""
        dropped: Dropped = {}
        position, gate, survey = 0, _Gate(IN_FLIGHT), survey or Survey(self.options.levels)
        work = partial(self._try, gate, survey.levels, images.shape[2])
        try:
            with _bounded_here(), ThreadPoolExecutor(max(1, len(usable_cores()))) as pool:
                for row, result in enumerate(_keep_order(pool, work, sources)):
                    if isinstance(result, str):
                        dropped.setdefault(result, []).append(row)
                    else:
                        images[position], facts = result
                        survey.add(facts)
                        position += 1
                    if progress is not None and ((row + 1) % 100 == 0 or row + 1 == len(sources)):
                        progress(row + 1, len(sources))
        except _NeedsLevels:
            values = self._measure_range()
            return self._decode_all(sources, images, progress, Survey(values.levels(), values.remark()))
        self.survey.take(survey)
        return dropped

    def _try(self, gate: _Gate, levels: Levels | None, image_size: int, source: Source
             ) -> tuple[Images, ImageFacts] | str:
        """Return the image and its facts, or the reason why it is left out."""
        try:
            with self._open(source) as image:
                if self.channels == 1 and self.options.channels is None and image.mode not in GREY:
                    raise DataError(f"{source.name}: a colour image ({image.mode}) among grey ones. Set "
                                    "dataset.channels to 3, or to 1 to drop colour.")  # never dropped in silence
                if levels is None and is_deep(image):
                    raise _NeedsLevels
                if self.refuses_dark and is_deep(image):
                    check_bright(image, source.name)
                facts, pixels = ImageFacts.of(image), _shrink(image, image_size)
                with gate.hold(pixels) if pixels > FREE else nullcontext():
                    array = decode(image, image_size, self.channels, levels or ALL_16_BITS, self.options.upright,
                                   self.whole)
                    return array, facts.of_decoded(image)
        except _unreadable() as error:
            if self.options.skip_unreadable:
                kind = error.kind if isinstance(error, WrongKind) else CANNOT
                return TOO_LARGE if isinstance(error, _too_large()) else kind
            raise unreadable(source, error, [each for part in self.sources.values() for each in part]) from error

    @contextmanager
    def _open(self, source: Source) -> Iterator[Image.Image]:
        """Open an image. TooManyPixels if it has more than the options allow."""
        most = self.options.max_pixels
        with source.open() as image:
            if image.width * image.height > most:
                raise TooManyPixels(f"{image.width} x {image.height} pixels, more than {most}")
            yield image

    def _measure_range(self) -> Range:
        """Return the range of the values of all deep images of the data set."""
        values = Range()
        with _bounded_here():
            for source in (each for part in self.sources.values() for each in part):
                # An image that cannot be read is named, or counted, when it is decoded.
                with suppress(*_unreadable()), self._open(source) as image:
                    if is_deep(image):
                        values.add(image)
        return values

    def _keep_file(self, key: str, sources: Sequence[Source], shape: tuple[int, ...], progress: Progress | None
                   ) -> tuple[Images, Dropped]:
        """Return images that are decoded once, into a file below the user's folder; `key` names their content. The file
        of dropped rows is written first, so that each whole .npy has one beside it."""
        path = home() / "cache" / f"images-{key}.npy"
        facts, is_large = path.with_suffix(".json"), bool(np.prod(shape) > IN_MEMORY)
        mmap_mode: Literal["r"] | None = "r" if is_large else None
        # 1. An earlier command may have decoded them.
        stored = _read_kept(path, facts, shape, mmap_mode)
        if stored is not None:
            images, dropped, survey = stored
            self.survey.take(survey)
            return images, dropped
        # 2. Decode into a file of another name, and rename it when it is whole: a kill leaves no torn file.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file_images = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
            _reserve(temporary, file_images.offset)
            dropped = self._decode_all(sources, file_images, progress)
            file_images.flush()
            del file_images
            write_atomic(facts, json.dumps({"dropped": dropped, "survey": asdict(self.survey)}))
            os.replace(temporary, path)
            remove_oldest(path.parent, "images-*.npy", MOST_FILES)  # a process that has mapped one keeps it
            return np.load(path, mmap_mode), dropped
        except OSError as error:
            if not is_large:  # the images fit into memory, and the next command decodes them again
                images = np.empty(shape, np.uint8)
                return images, self._decode_all(sources, images, progress)
            raise DataError(f"cannot write {path}, which needs {np.prod(shape) + 128:,} bytes in {path.parent}: "
                            f"{error.strerror or error}. Free space there or set HWNAS_HOME to a folder on another "
                            "disk.") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _read_kept(path: Path, facts: Path, shape: tuple[int, ...], mapped: Literal["r"] | None
               ) -> tuple[Images, Dropped, Survey] | None:
    """Return the images that an earlier command kept, with their facts; None if the file is missing or torn."""
    try:
        document = json.loads(facts.read_text())
        images: Images = np.load(path, mapped, allow_pickle=False)
        stored = images, dict(document["dropped"]), Survey.of(document["survey"])
    except (*WRONG, OSError, EOFError):
        return None
    return stored if images.shape == shape and images.dtype == np.uint8 else None


def _reserve(path: Path, start: int) -> None:
    """Reserve the disk space of a file's size; it may write zeros from byte `start` on. OSError if there is too little.
    A mapped file is sparse: without this, a full disk ends the process by a signal."""
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


Result = TypeVar("Result")


def _keep_order(pool: ThreadPoolExecutor, work: Callable[[Source], Result], sources: Iterable[Source]
                ) -> Iterator[Result]:
    """Yield results in order. Few images are decoded ahead: memory stays small, and the first error ends the work."""
    futures: deque[Future[Result]] = deque()
    try:
        for source in sources:
            futures.append(pool.submit(work, source))
            if len(futures) == AHEAD:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()
