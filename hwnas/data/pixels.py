"""Each kind of pixel is converted so that a network sees what a person sees.

| the file has | the network gets |
|---|---|
| 1 or 8 bits, a palette | its colours |
| CMYK, YCbCr, LAB | Pillow's RGB of it |
| 16 or 32 bits, fractions | `levels`, the range of the whole data set, as 0 to 255 |
| 16 bits a colour | the upper 8; refused if a data set uses none of them |
| transparent pixels, by alpha, palette or one colour | what is seen on white |
| several frames or pages | the first |
| an EXIF orientation | the picture as it is stored, or with `upright` as a viewer shows it |

The third row is of deep images. Data sets, `hwnas predict` and the code in a card all call `as_seen`.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import DataError
from hwnas.lazy import PIL
from hwnas.system.documents import WRONG

# Pillow raises these for a file that is torn or says nonsense, besides DecompressionBombError.
TORN = (OSError, ValueError, SyntaxError, EOFError, AssertionError, LookupError, RuntimeError, struct.error)

if TYPE_CHECKING:
    from PIL import Image

Levels = tuple[float, float]  # of 16-bit, 32-bit and float pixels: the value of black, and the first beyond white
ALL_16_BITS: Levels = (0, 65536)
GREY = ("1", "L", "LA", "I;16", "I;16B", "I;16L", "I;16N", "I", "F")
ROTATED, TRANSPARENT, FRAMED = "rotated", "transparent", "framed"  # of several frames
WIDE, NARROW = "wide", "narrow"  # of 16 bits a colour, and those that use none of the upper ones
_ORIENTATION = 274  # of EXIF
_FEW_BITS = 64  # upper halves of 16-bit colours below this: at most 14 bits are used
_BRIGHT_SHARE = 0.001  # of the pixels: fewer may be defects of a camera
_NO_BRIGHTNESS = 1e30  # fractions from here on, and infinite ones, say that there is no value


# A card prints the source of the next two functions: they use numpy and Pillow alone.
def deep_values(image: PIL.Image.Image) -> np.ndarray:
    """Return the pixels of an image of 16 or 32 bits, whole numbers or fractions; what is none is 0."""
    values = np.nan_to_num(np.asarray(image, np.float64))
    if image.mode == "I" and getattr(image, "tag_v2", {339: (2,)}).get(339, (1,))[0] == 1:  # TIFF files without a sign
        values %= 2**32  # which Pillow gives one
    return values


def as_seen(image: PIL.Image.Image, mode: str, levels: tuple[float, float], upright: bool) -> PIL.Image.Image:
    """Return a picture as a person sees it, in 8 bits: `mode` is L or RGB."""
    if upright:
        PIL.ImageOps.exif_transpose(image, in_place=True)
    if image.mode[0] in "IF":
        values = deep_values(image)
        pixels = ((values.clip(*levels) - levels[0]) * 256 / (levels[1] - levels[0])).clip(0, 255).astype(np.uint8)
        if getattr(image, "tag_v2", {}).get(262) == 0:  # TIFF files in which 0 is white
            pixels = 255 - pixels
        if "transparency" in image.info:
            pixels[values == image.info["transparency"]] = 255
        image = PIL.Image.fromarray(pixels)
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    if image.mode not in ("1", "L", "RGB"):  # some kinds become grey only by way of RGB
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def is_deep(image: Image.Image) -> bool:
    """Return whether `as_seen` needs levels for an image, which need not be decoded yet."""
    return image.mode[0] in "IF"


def check_bright(image: Image.Image, name: str) -> None:
    """Raise DataError if an image of more than 8 bits would be nearly black with 65,535 as white."""
    most = float(deep_values(image).max())
    if most < _FEW_BITS * 256:
        raise DataError(f"{name}: its values end at {most:,g}, where white is 65,535 for a network that learnt from "
                        "images of 8 bits: nearly black. Convert it to 8 bits.")


@dataclass(slots=True)
class Range:
    """The values of all deep pixels of a data set: counts by octave, least and largest value. NaN counts as 0."""

    least: float = 0.0
    most: float = 0.0
    modes: set[str] = field(default_factory=set)
    octaves: Counter[int] = field(default_factory=Counter)  # number of bits: pixels that need them
    below: Counter[int] = field(default_factory=Counter)  # the same of pixels below 0

    def add(self, image: Image.Image) -> None:
        """Count the pixels of one deep image."""
        values = deep_values(image)
        values = np.where(np.abs(values) < _NO_BRIGHTNESS, values, 0)
        self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))
        self.modes.add(image.mode[0])
        for octaves, side in (self.octaves, values), (self.below, -values[values <= -1]):
            # The exponent of frexp is the number of bits that a whole number needs.
            counts = np.bincount(np.frexp(side.clip(0))[1].clip(0).ravel())
            octaves.update({bits: int(n) for bits, n in enumerate(counts) if n})

    @property
    def _least_bits(self) -> int:
        """The least number of bits of a range: fractions may end at 1, whole numbers are of 8 bits or more."""
        return 0 if self.modes == {"F"} else 8

    def levels(self) -> Levels:
        """Return the range as whole bits: of fractions it may end at 1 and begin at -1. DataError for a mixture."""
        if len(self.modes) > 1:
            raise DataError("some images hold whole numbers of 16 or 32 bits, others fractions. Say which range "
                            "becomes 0 to 255: dataset.levels=[0,65536].")
        bits = self._least_bits
        end = 1 if bits == 0 and self.most <= 1 else _power(np.floor(self.most) + 1, bits)
        return -_power(-self.least, bits) if self.least < 0 else 0, end

    def remark(self) -> str:
        """Return a remark if odd pixels spoil the range, otherwise an empty text. A few large ones, maybe defects, make
        all others dark. Ones below 0 that are alike, maybe a mark of missing values, make all others bright."""
        (first, end), least = self.levels(), self._least_bits
        # 1. All values below 0 need the same number of bits, more than 8: probably a mark.
        if len(self.below) == 1 and max(self.below) > 8:
            return (f"{sum(self.below.values()):,} pixels of more than 8 bits are near {self.least:,g}, and no others "
                    f"below 0. If that marks missing values, set dataset.levels=[0,{end}]")
        # 2. Find the least number of bits that holds nearly all pixels; 8 times brighter is worth a remark.
        bits, beyond = max(self.octaves, default=0), 0
        while bits > least and beyond + self.octaves[bits] <= _BRIGHT_SHARE * sum(self.octaves.values()):
            beyond += self.octaves[bits]
            bits -= 1
        if end < 8 << max(bits, least):
            return ""
        return (f"all but {beyond:,} pixels of more than 8 bits are below {1 << bits:,}, and those make the others "
                f"dark. dataset.levels=[{first},{1 << bits}] makes them bright")


def _power(value: float, bits: int) -> int:
    """Return the least power of two that is at least `value` and 2 to the power of `bits`."""
    return 1 << max(bits, int(np.ceil(np.log2(max(value, 1)))))


@dataclass(slots=True)
class Survey:
    """A summary of the pictures of a data set, counted while they are decoded."""

    levels: Levels | None = None  # None: no image needs any
    remark: str = ""  # about deep pixels
    modes: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    smallest: tuple[int, int] = (0, 0)  # px
    largest: tuple[int, int] = (0, 0)

    def add(self, facts: ImageFacts) -> None:
        """Count one image."""
        if not self.modes:
            self.smallest = self.largest = facts.size
        self.modes[facts.mode] = self.modes.get(facts.mode, 0) + 1
        for mark in facts.marks:
            self.marks[mark] = self.marks.get(mark, 0) + 1
        self.smallest, self.largest = min(self.smallest, facts.size, key=min), max(self.largest, facts.size, key=max)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Survey:
        """Return a survey from its `asdict`, as JSON gives it back."""
        return cls(**{**facts, "levels": facts["levels"] and tuple(facts["levels"])})

    def take(self, other: Survey) -> None:
        """Take over the values of the other survey, so that whoever holds this one sees them."""
        for name in self.__slots__:
            setattr(self, name, getattr(other, name))

    def check(self, where: str) -> None:
        """Raise DataError if 16-bit colours use so few bits that their upper 8 are nearly black."""
        if (n := self.marks.get(WIDE)) and n == self.marks.get(NARROW):
            raise DataError(f"{where}: the {n} images of 16 bits a colour have no value above "
                            f"{_FEW_BITS * 256 - 1:,}, and Pillow keeps their upper 8 bits: nearly black. Convert them "
                            "to 8 bits a colour.")

    def lines(self, upright: bool) -> list[str]:
        """Return sizes and bits, and what was done with kinds that can be shown in two ways."""
        n = sum(self.modes.values())
        if not n:
            return []
        sizes = dict.fromkeys(f"{width} x {height}" for width, height in (self.smallest, self.largest))
        modes = Counter(self.modes).most_common(4)
        kinds = ", ".join(mode if count == n else f"{count} {mode}" for mode, count in modes)
        lines = [f"{' to '.join(sizes)} px, {kinds}"]
        if self.levels is not None and any(mode[0] in "IF" for mode in self.modes):
            first, end = self.levels
            is_fine = end - first < 256  # of fractions
            scale = "" if is_fine else f", scaled by 1/{(end - first) / 256:g}"
            last = end if is_fine or end <= 1 else end - 1
            lines.append(f"files of more than 8 bits use values from {first:,g} to {last:,g}{scale}")
        texts = {ROTATED: f"images carry a rotation; {'turned upright' if upright else 'used as stored'}",
                 TRANSPARENT: "images can be transparent: seen on white",
                 FRAMED: "files have several frames: the first is used"}
        return [*lines, *(f"{self.marks[mark]} of {n} {text}" for mark, text in texts.items() if mark in self.marks)]


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The facts of an image for a `Survey`; `marks` has the words of ROTATED to NARROW that apply to it."""

    mode: str
    size: tuple[int, int]
    marks: tuple[str, ...]

    @classmethod
    def of(cls, image: Image.Image) -> ImageFacts:
        """Return the facts of an image that is not decoded yet."""
        marks = {ROTATED: _is_rotated(image), TRANSPARENT: image.has_transparency_data,
                 FRAMED: getattr(image, "is_animated", False),
                 WIDE: not is_deep(image) and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))}
        return cls(image.mode, image.size, tuple(mark for mark, is_there in marks.items() if is_there))

    def of_decoded(self, image: Image.Image) -> ImageFacts:
        """Return the same facts, with the mark NARROW if the decoded image uses no upper bits."""
        is_narrow = WIDE in self.marks and np.max(image.convert("RGB").getextrema()) < _FEW_BITS
        return replace(self, marks=(*self.marks, NARROW)) if is_narrow else self


def _is_rotated(image: Image.Image) -> bool:
    """Return whether an EXIF orientation turns the image; an entry that cannot be read does not."""
    # PNG would be decoded whole to look for an orientation that comes last, and Pillow turns TIFF files itself.
    if "exif" not in image.info and image.format in ("PNG", "TIFF"):
        return False
    try:
        return image.getexif().get(_ORIENTATION, 1) in range(2, 9)
    except (*WRONG, *TORN):
        return False
