"""The types of a data set, which is three disjoint sets of uint8 images with labels, seeded and stratified by class."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.options import Config, option, read_options
from hwnas.data.contents import Contents, digest
from hwnas.data.pixels import ALL_16_BITS, Levels, Survey, as_seen, deep_values
from hwnas.errors import ConfigError, DataError
from hwnas.lazy import PIL

Labels = NDArray[np.int64]
Selection = list[tuple[str, NDArray[np.int64]]]  # (part, rows of that part) of each set
LEAST = {"train": 2, "validation": 1, "test": 1}  # images of each class in a set that is drawn
MOST_PIXELS = 178_956_970  # of an image: Pillow opens none that is larger
# Names of tasks: one class an image, boxes in it, and the classes of these boxes.
CLASSIFICATION, DETECTION, MULTILABEL = "classification", "detection", "multilabel"


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """The options that find and split a data set. `options` holds further keys, which the data set itself reads.

    `validation_fraction` and `test_fraction` are shares of the part `train`, which holds all images if no other part is
    held out. `image_size` overrides the search space's; `channels` 1 or 3 overrides what the files hold.
    """

    name: str = option(help="of conf/dataset, or of a package that offers one")
    root: Path | None = option(None, what="a folder", help="the folder (null: the data folder of hwnas)")
    image_size: int | None = option(None, low=8, high=1024, help="px (null: the search space's, around a network the "
                                                                 "images' own, at most 224)")
    channels: int | None = option(None, choices=(1, 3), help="null: as the files are")
    skip_unreadable: bool = option(False, help="leave unreadable and too large images out and count them")
    validation_fraction: float = option(0.15, above=0, below=0.8, help="of the training part, or of all images")
    test_fraction: float = option(0.2, above=0, below=0.8, help="of all images, where no test part is given")
    flip: bool = option(False, help="whether a mirrored image is still one of its class")
    download: bool = option(False, help="fetch it where it is missing")
    max_pixels: int = option(50_000_000, low=64, high=MOST_PIXELS,
                             help="width times height of an image at most; known before it is decoded")
    levels: tuple[float, float] | None = option(
        None, check=lambda pair: pair[0] < pair[1], what="two ascending numbers",
        help="of 16-bit, 32-bit and float files: black, and the first value beyond white (null: by their range)")
    upright: bool = option(False, help="turn images as their EXIF orientation says")
    task: str | None = option(None, help="what networks shall do with the images (null: what they are annotated for)")
    options: Mapping[str, Any] = option({}, help="handed on to a data set of another package")

    @classmethod
    def from_config(cls, config: Config) -> DatasetOptions:
        """Read and check `conf/dataset/*.yaml`. ConfigError names key, rule and value."""
        options = read_options(cls, config, "dataset")
        if options.validation_fraction + options.test_fraction > 0.8:
            raise ConfigError("dataset.validation_fraction and dataset.test_fraction must leave at least 0.2 of the "
                              f"images to train on, got {options.validation_fraction} and {options.test_fraction}.")
        return options

    def find_root(self, remedy: str, may_be_file: bool = False) -> Path:
        """Return `root`. DataError, which ends with `remedy`, if there is no such folder (or file, if allowed)."""
        if self.root is None:
            raise DataError(f"dataset.root is not set. {remedy}")
        if not (self.root.exists() if may_be_file else self.root.is_dir()):
            raise DataError(f"{self.root}: no such {'file or ' * may_be_file}folder. {remedy}")
        return self.root


def split(parts: Mapping[str, Labels], class_names: Sequence[str], options: DatasetOptions, seed: int,
          where: str, keys: Sequence[str] | None = None) -> dict[str, tuple[str, NDArray[np.int64]]]:
    """Choose the rows of `train`, `validation` and `test`: {set: (part, ascending rows of that part)}.

    `parts` holds the labels of `train`, and of `val` and `test` if the data set has them. Without `test`, `val` is the
    test set. A set that is still missing is a seeded, stratified share of `train`. `keys` name the content of the
    images of `train`: images with equal keys go to the same set. A class may be missing in a part that the makers hold
    out. DataError if a class has too few images in a set from `train`.
    """
    # 1. The parts that the makers hold out become sets as they are.
    rows_of_set = {name: (name, np.arange(len(labels))) for name, labels in parts.items()}
    if "test" not in rows_of_set and "val" in rows_of_set:
        rows_of_set["test"] = rows_of_set.pop("val")
    if "val" in rows_of_set:
        rows_of_set["validation"] = rows_of_set.pop("val")
    # 2. Draw the missing sets from `train`, by one row for each key: so copies of an image stay in one set.
    fractions = {"test": options.test_fraction, "validation": options.validation_fraction}
    if shares_to_draw := {name: fraction for name, fraction in fractions.items() if name not in rows_of_set}:
        labels, rule, number_of_key = parts["train"], "to be split, a class needs", dict[Any, int]()
        row_keys = range(len(labels)) if keys is None else keys
        key_numbers = np.asarray([number_of_key.setdefault(key, len(number_of_key)) for key in row_keys], np.int64)
        first_rows = np.unique(key_numbers, return_index=True)[1]  # the first row of each key
        check_counts(labels[first_rows], class_names, 2 + len(shares_to_draw),
                     f"{where}: {rule}" if len(first_rows) == len(labels) else f"{where}: without copies, {rule}")
        for name, rows in _carve(labels[first_rows], shares_to_draw, seed).items():
            rows_of_set[name] = "train", np.flatnonzero(np.isin(key_numbers, rows))
    # 3. Check that no class got too few images.
    for name, (part, rows) in rows_of_set.items():
        if part == "train":
            check_counts(parts[part][rows], class_names, LEAST[name], f"{where}: in the {name} set a class needs")
    return rows_of_set


def _carve(labels: Labels, fractions: Mapping[str, float], seed: int) -> dict[str, NDArray[np.int64]]:
    """Return rows of `labels` for each of `fractions` (at least one per class), and all other rows for `train`."""
    rng = np.random.default_rng([seed, 0x5EED])
    parts: dict[str, list[NDArray[np.int64]]] = {name: [] for name in ("train", *fractions)}
    for label in range(int(labels.max()) + 1):
        rows = rng.permutation(np.flatnonzero(labels == label))
        start = 0
        for name, fraction in fractions.items():
            end = start + max(1, round(fraction * len(rows)))
            parts[name].append(rows[start:end])
            start = end
        parts["train"].append(rows[start:])
    return {name: np.sort(np.concatenate(rows)) for name, rows in parts.items()}


def subset(labels: Labels, size: int, seed: int) -> NDArray[np.int64]:
    """Return ascending rows of a stratified subset of about `size`, at least one a class; at most all rows."""
    if size >= len(labels):
        return np.arange(len(labels))
    return _carve(labels, {"chosen": size / len(labels)}, seed)["chosen"]


def check_counts(labels: Labels, class_names: Sequence[str], least: int, rule: str) -> None:
    """Raise DataError, which names the class that has fewest images, unless every class has `least`."""
    counts = np.bincount(labels, minlength=len(class_names))
    worst = int(counts.argmin())
    if counts[worst] < least:
        raise DataError(f"{rule} at least {least} image{'s' if least > 1 else ''}; {class_names[worst]!r} has "
                        f"{counts[worst]}. Add images of that class or remove it.")


Images = NDArray[np.uint8]
MOST_RESIZED = 1 << 30  # bytes; larger sets are resized anew each time their rows are read
Progress = Callable[[int, int], None]  # called with the number of decoded images, and of all


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """One of the three sets.

    Attributes:
        images: uint8 [n, c, h, w], in memory or mapped from a file.
        labels: int64 [n], the class of each image, or 0 if it has boxes. Sets are drawn by them.
        boxes: float32 [n, most, 5], the objects of each image: class, left, top, right and bottom, the last four as
            shares of the side. A row of class -1 is empty. None if the images have one class each.
    """

    images: Images
    labels: NDArray[np.int64]
    boxes: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def targets(self) -> NDArray[Any]:
        """The right answers: boxes if there are any, otherwise labels."""
        return self.labels if self.boxes is None else self.boxes

    def take(self, rows: NDArray[np.int64]) -> Split:
        """Return the split with these rows only, copied into memory."""
        return Split(np.ascontiguousarray(self.images[rows]), self.labels[rows],
                     None if self.boxes is None else self.boxes[rows])

    def resize(self, image_size: int, later: bool = False) -> Split:
        """Return the split at `image_size`; with `later`, or above MOST_RESIZED, rows are resized when read."""
        later = later or len(self) * self.images.shape[1] * image_size**2 > MOST_RESIZED
        images: Any = ResizedImages(self.images, image_size) if later else resize(self.images, image_size)
        return replace(self, images=images)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """The facts that are known before an image is decoded. `native_size` is the usual shorter side in pixels, `task`
    the name of what networks shall do with the images, among `hwnas.tasks`."""

    name: str
    channels: int
    classes: int
    native_size: int
    task: str = CLASSIFICATION


# Decodes a selection at a size. For each of its entries: images uint8 [k, c, size, size], and bool [rows], which is
# False for an image that could not be read, if the options allow that. Such rows are not among the k images.
ReadRows = Callable[[Selection, int, Progress | None], list[tuple[Images, NDArray[np.bool_]]]]


@dataclass(frozen=True, slots=True)
class Listing:
    """A data set that is listed but not decoded.

    `parts` holds the labels of `train`, and of `val` and `test` if its makers hold them out. `identity` names the
    content; it is empty if `contents`, the hashes of the files, do so. `where` is the place for error messages.
    `left_out` counts files that are no part of it, by reason; `read` adds the images that it drops. `pictures` is True
    if images become square by `decode`, False if they are arrays that `resize` takes, otherwise None. `name_of` names
    an image of a part in messages. `remarks` are sentences about the parts, and `survey` describes the pictures that
    `read` has decoded. `keys` gives each image a text that equal images share. `boxes`: of each part as in a `Split`.
    """

    info: DatasetInfo
    class_names: tuple[str, ...]
    parts: Mapping[str, NDArray[np.int64]]
    identity: str
    where: str
    read: ReadRows
    contents: Contents | None = None
    left_out: Counter[str] = field(default_factory=Counter)
    pictures: bool | None = None
    name_of: Callable[[str, int], str] = "{} image {}".format
    survey: Survey = field(default_factory=Survey)
    remarks: Sequence[str] = ()
    keys: Callable[[], Mapping[str, Sequence[str]]] | None = None
    boxes: Mapping[str, NDArray[np.float32]] | None = None


# The texts that `Preparation.facts` writes as "resize".
_RESIZING = re.compile("(?P<pictures>(shorter side|both sides) to [0-9]{1,5}, bilinear, anti-aliased)?"
                       "(?(pictures)|[0-9]{1,5} given)(, then [0-9]{1,5}){0,9}")
_MOST_PX = 4096  # of a side, in a model file


@dataclass(frozen=True, slots=True)
class Preparation:
    """The way from an image to the square pixels that a network receives, by way of all `sizes` in their order.

    `pictures`: `hwnas.data.decoding.decode` makes the first size from a picture; otherwise images are arrays of that
    size. `resize` makes the further sizes. `levels` and `upright` are arguments of `hwnas.data.pixels.as_seen`, and
    `remarks` say what it did with the training images. `levels` is None if these had 8 bits. `whole`: a picture is
    stretched to a square, and nothing is cut off.
    """

    pictures: bool
    sizes: tuple[int, ...]
    channels: int
    levels: Levels | None = None
    upright: bool = False
    remarks: tuple[str, ...] = ()
    whole: bool = False

    def at(self, image_size: int) -> Preparation:
        """Return the same preparation with a last step to `image_size`."""
        return self if image_size == self.sizes[-1] else replace(self, sizes=(*self.sizes, image_size))

    def facts(self) -> dict[str, Any]:
        """Return plain words for a model file: colours, size, resizing, crop, and levels and `upright` if set."""
        side = "both sides" if self.whole else "shorter side"
        first_step = f"{side} to {self.sizes[0]}, bilinear, anti-aliased" if self.pictures else f"{self.sizes[0]} given"
        return {"channels": "grey" if self.channels == 1 else "RGB", "size": self.sizes[-1],
                "resize": ", then ".join([first_step, *map(str, self.sizes[1:])]),
                "crop": "centre" if self.pictures and not self.whole else "none",
                **({"levels": list(self.levels)} if self.levels else {}),
                **({"upright": True} if self.upright else {})}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Preparation:
        """Return the preparation that `facts` describe; KeyError, TypeError or ValueError for foreign words."""
        resizing = _RESIZING.fullmatch(facts["resize"])
        if resizing is None:
            raise ValueError(f"resize {str(facts['resize'])[:100]!r} is not known")
        sizes = tuple(int(text) for text in re.findall("[0-9]+", resizing[0]))
        if not all(0 < size <= _MOST_PX for size in sizes):
            raise ValueError(f"an image of {max(sizes)} px")
        levels = None
        if "levels" in facts:
            first, end = map(float, facts["levels"])
            if not first < end:
                raise ValueError(f"levels {first:g} to {end:g}")
            levels = first, end
        return cls(bool(resizing["pictures"]), sizes, 1 if facts["channels"] == "grey" else 3, levels,
                   bool(facts.get("upright")), whole=resizing[0].startswith("both"))

    def code(self) -> str:
        """Return Python code of Pillow and numpy alone. Its function `prepared` turns a file's path (pictures) or uint8
        pixels into float32 [c, h, w] of levels 0 to 255."""
        mode, size = ("L" if self.channels == 1 else "RGB"), self.sizes[0]
        lines = ["import numpy as np", "import PIL.Image", "import PIL.ImageOps", ""]
        if self.pictures:
            lines += [inspect.getsource(deep_values), inspect.getsource(as_seen),
                      *(f"# {' '.join(remark.split())}" for remark in self.remarks),
                      "def prepared(path):", "    image = PIL.Image.open(path)",
                      f"    image.draft(None, ({2 * size}, {2 * size}))  # JPEG files are decoded at a fraction",
                      f'    image = as_seen(image, "{mode}", {self.levels or ALL_16_BITS}, {self.upright})',
                      f"    image = image.resize(({size}, {size}), PIL.Image.Resampling.BILINEAR)" if self.whole else
                      f"    image = PIL.ImageOps.fit(image, ({size}, {size}), PIL.Image.Resampling.BILINEAR)"]
        else:
            lines += [f"def prepared(pixels):  # uint8 [{size}, {size}{', 3' if self.channels > 1 else ''}]",
                      "    image = PIL.Image.fromarray(pixels)"]
        for before, after in pairwise(self.sizes):
            step = (f"PIL.ImageOps.expand(image, {(after - before) // 2})" if is_padded(before, after) else
                    f"image.resize(({after}, {after}), PIL.Image.Resampling.BILINEAR)")
            lines.append(f"    image = {step}")
        array = "np.asarray(image, np.float32)"
        return "\n".join([*lines, f"    return {array}{'[None]' if self.channels == 1 else '.transpose(2, 0, 1)'}"])


@dataclass(frozen=True, eq=False, slots=True)
class Dataset:
    """Three sets of one size. `mean` and `std` are of the training images, per channel, on 0..1.

    `skipped` counts images of the sets that were not decoded, `left_out` all files left out, by reason. The search sees
    training and validation images only; the test set is for the report. `fingerprint` changes with any byte of a file,
    label, row of the split, or the size. `preparation` is None if a data set of another package does not give one.
    `title` is the name of the folder if `name` is that of a reader. `remarks` are sentences about the sets for a
    report, `kinds` say what the pictures are. `task`: as of a `DatasetInfo`.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    flip: bool = False
    skipped: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)
    preparation: Preparation | None = None
    title: str = ""
    remarks: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    task: str = CLASSIFICATION

    def constant_answer(self) -> tuple[str, float] | None:
        """Return the most frequent training class, and the share of test images that have it; None with boxes."""
        if self.train.boxes is not None:
            return None
        label = int(np.bincount(self.train.labels).argmax())
        return self.class_names[label], float((self.test.labels == label).mean())

    def describe(self) -> list[str]:
        """Return at most four lines: classes and images of each set, the kinds of pictures, and what was left out."""
        first = (f"{self.title or self.name}: {len(self.class_names)} classes; {len(self.train):,} training, "
                 f"{len(self.validation):,} validation and {len(self.test):,} test images at {self.image_size} px")
        if (constant := self.constant_answer()) is not None:
            first += f"; always answering {constant[0]!r} is right for {constant[1]:.1%} of the test images"
        else:
            n, n_test = (int((part.targets[..., 0] >= 0).sum()) for part in (self.train, self.test))
            first += f"; {n:,} objects to learn from, {n_test:,} in the test images"
        return [line for line in (first, *self.kinds[:1], "; ".join(self.kinds[1:]), left_out_text(self.left_out))
                if line]

    def normalise(self, images: Images) -> NDArray[np.float32]:
        """Return the pixels that a network receives, see the function `normalise`."""
        return normalise(images, self.mean, self.std)

    def fingerprint_at(self, image_size: int) -> str:
        """Return the fingerprint of `at_size`, without resizing anything."""
        return self.fingerprint if image_size == self.image_size else digest(self.fingerprint, image_size)

    def at_size(self, image_size: int, later: bool = False) -> Dataset:
        """Return the data set with its images resized (anti-aliased). `mean` and `std` stay, so that figures stay
        comparable. `later`: resize when rows are read, for a caller that needs few of them, or each once."""
        if image_size == self.image_size:
            return self
        preparation = self.preparation and self.preparation.at(image_size)
        train, validation, test = (part.resize(image_size, later) for part in (self.train, self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test, image_size=image_size,
                       fingerprint=self.fingerprint_at(image_size), preparation=preparation)


def normalise(images: Images, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return pixels [n, c, h, w] as float32, (images / 255 - mean) / std per channel. The last bit counts: with mean
    and std 0.5 every level is half way between two of int8, and that bit decides."""
    # One multiplication and one subtraction for each pixel: images * scale - shift.
    scale = np.asarray([1 / (255 * each) for each in std], np.float32)
    shift = np.asarray([each / spread for each, spread in zip(mean, std, strict=True)], np.float32)
    result = np.asarray(images, np.float32) * scale[:, None, None]
    result -= shift[:, None, None]
    return result


def is_padded(before: int, after: int) -> bool:
    """Return whether `resize` pads from one size to the other: by an even number, at most a quarter in all."""
    return 0 < after - before <= before // 4 and (after - before) % 2 == 0


class ResizedImages:
    """An array of images [n, c, px, px] that resizes rows when they are read, see `resize`."""

    def __init__(self, images: Images, image_size: int) -> None:
        self._images, self._px = images, image_size
        self.shape = (*images.shape[:2], image_size, image_size)
        self.nbytes = math.prod(self.shape)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, rows: int | slice | NDArray[np.int64]) -> Images:
        images = np.asarray(self._images[rows])
        return resize(images, self._px) if images.ndim > 3 else resize(images[None], self._px)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Images:
        return np.asarray(self[:], dtype)


def resize(images: Images, image_size: int) -> Images:
    """Return images [n, c, h, w] at `image_size`. They are padded with 0 if that adds an eighth at most on each side
    (28 to 32). Otherwise Pillow resizes them, bilinear with anti-aliasing, as the code of a card does."""
    height, width = images.shape[2:]
    if (height, width) == (image_size, image_size):
        return images
    if height == width and is_padded(height, image_size):
        spare = image_size - height
        return np.pad(images, ((0, 0), (0, 0), (spare // 2, spare // 2), (spare // 2, spare // 2)))
    result = np.empty((*images.shape[:2], image_size, image_size), np.uint8)
    for place in np.ndindex(*images.shape[:2]):
        channel = PIL.Image.fromarray(np.ascontiguousarray(images[place]))
        result[place] = channel.resize((image_size, image_size), PIL.Image.Resampling.BILINEAR)
    return result


def left_out_text(left_out: Mapping[str, int], most: int = 6) -> str:
    """Return "left out: 12 (ending .heic), …" with the most frequent reasons first; empty if nothing was left out."""
    order = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    rest = f" and {sum(n for _, n in order[most:])} for other reasons" if len(order) > most else ""
    return f"left out: {', '.join(f'{n} ({reason})' for reason, n in order[:most])}{rest}" if order else ""


class Subsets:
    """The parts of `dataset` with `train_images` and `validation_images` (0: all), the same for every network."""

    def __init__(self, dataset: Dataset, train_images: int, validation_images: int) -> None:
        self.train, self.validation = (
            part.take(subset(part.labels, n, 0)) if 0 < n < len(part) else part
            for part, n in ((dataset.train, train_images), (dataset.validation, validation_images)))
        self._sized: dict[int, tuple[Split, Split]] = {}

    def at(self, image_size: int) -> tuple[Split, Split]:
        """Return training and validation images at `image_size`; each size is made once."""
        if image_size not in self._sized:
            self._sized[image_size] = self.train.resize(image_size), self.validation.resize(image_size)
        return self._sized[image_size]
