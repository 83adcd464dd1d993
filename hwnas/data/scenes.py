"""Scenes drawn from scikit-learn's digits: several in a picture, on clutter and noise. The largest gives the class.

They are harder than the digits, so that a larger network is worth its time. They are drawn anew at each loading, from
raw bits and with whole numbers, so that every host draws the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hwnas.cli.options import option, read_options
from hwnas.data.arrays import array_listing, digit_images
from hwnas.data.contents import digest
from hwnas.data.dataset import DatasetOptions, Images, Labels, Listing

DRAWING = 1  # raise it with any change of the pictures: it is part of the fingerprint
SIZE = 32  # px
SCENES = {"train": 1700, "val": 1000, "test": 2000}  # in all, equally many of each class
SOURCES = {"train": (0, 6), "val": (6, 8), "test": (8, 10)}  # tenths of each class's digits: no digit in two parts
LARGEST = (20, 27)  # px of a side of the largest digit, which gives the class
INK = (170, 255)  # grey of its brightest pixel
OTHERS = 2  # further digits a scene
SHARE = (4, 7)  # their sides, in sixteenths of the largest's
PIECES = 2  # quarters of digits in a scene, as clutter
LESSER_INK = (80, 220)  # grey of further digits and pieces
TURN = 20  # degrees to either side, at most
GROUND = (0, 40)  # grey of the ground
NOISE = 24  # grey to either side, at most

WHOLE = 4  # the quarters are 0..3
ROW = 11  # of a stamp: 8 px, and a margin for interpolation
ONE = 256  # parts of a stamp's pixel: the unit of fixed-point numbers
Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SceneOptions:
    """`dataset.options` of digit_scenes."""

    seed: int = option(0, low=0, high=2**32 - 1, help="which scenes are drawn")


@dataclass(frozen=True, slots=True)
class Layer:
    """A digit, or a quarter of one, in each of n scenes; every field is int64 [n].

    `source`: row of the digits. `quarter`: 0..3 or `WHOLE`. `side`: px of the whole digit. `turn`: degrees. `x`, `y`:
    px of its middle. `ink`: grey of its brightest pixel.
    """

    source: Whole
    quarter: Whole
    side: Whole
    turn: Whole
    x: Whole
    y: Whole
    ink: Whole


@dataclass(frozen=True, slots=True)
class Scenes:
    """The scenes of a part, before they are drawn: `layers` in any order, but the last is the largest digit."""

    labels: Labels
    layers: tuple[Layer, ...]
    ground: Whole


class Dice:
    """A source of whole numbers from raw bits, which numpy keeps in every version; its distributions may change."""

    def __init__(self, *seed: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(seed))

    def roll(self, low: int, high: int | Whole, n: int) -> Whole:
        """Return `n` numbers of `low`..`high`, both included."""
        bits = (self._bits.random_raw(n) >> np.uint64(32)).astype(np.int64)
        numbers: Whole = low + (bits * (np.asarray(high) - low + 1) >> 32)
        return numbers

    def order(self, n: int) -> Whole:
        """Return 0..n-1 in random order."""
        return np.argsort(self._bits.random_raw(n), kind="stable")

    def bytes(self, *shape: int) -> NDArray[np.int32]:
        """Return whole numbers of 0..255."""
        n = int(np.prod(shape))
        return self._bits.random_raw(-(-n // 8)).astype("<u8").view(np.uint8)[:n].reshape(shape).astype(np.int32)


def digit_scenes(options: DatasetOptions) -> Listing:
    """List scenes of digits, 32 px grey, in three parts; the class is that of the largest digit."""
    seed = read_options(SceneOptions, options.options, "dataset.options").seed
    images, classes = digit_images()
    scenes = {part: arrange(part, classes, seed) for part in SCENES}
    label_bytes = b"".join(plan.labels.tobytes() for plan in scenes.values())
    identity = digest("digit_scenes", DRAWING, seed, hashlib.sha256(images.tobytes() + label_bytes).hexdigest())
    return array_listing(options, tuple(map(str, range(10))), {part: plan.labels for part, plan in scenes.items()},
                         lambda part: draw(scenes[part], images[:, 0], Dice(seed, 2, *SOURCES[part])), SIZE, identity,
                         "scenes of scikit-learn's digits")


def arrange(part: str, classes: Labels, seed: int) -> Scenes:
    """Choose the digits in the scenes of a part, and their places; `classes` are the classes of the source digits."""
    # 1. The digits of this part, class by class: no digit is in two parts.
    pools = []
    for label in range(10):
        rows = np.flatnonzero(classes == label)
        first, end = (len(rows) * tenth // 10 for tenth in SOURCES[part])
        pools.append(rows[Dice(seed, 0, label).order(len(rows))][first:end])
    pool, counts = np.concatenate(pools), np.array([len(rows) for rows in pools])
    # 2. Roll clutter and further digits of any class, then the largest digit of the scene's class.
    dice, n, last = Dice(seed, 1, *SOURCES[part]), SCENES[part], len(pool) - 1
    labels = dice.order(n) % 10
    whole, side = np.full(n, WHOLE), dice.roll(*LARGEST, n)
    pieces = [_layer(pool[dice.roll(0, last, n)], dice.roll(0, WHOLE - 1, n), dice.roll(*LARGEST, n), LESSER_INK, dice)
              for _ in range(PIECES)]
    others = [_layer(pool[dice.roll(0, last, n)], whole, side * dice.roll(*SHARE, n) >> 4, LESSER_INK, dice)
              for _ in range(OTHERS)]
    largest = pool[(np.cumsum(counts) - counts)[labels] + dice.roll(0, counts[labels] - 1, n)]
    return Scenes(labels, (*pieces, *others, _layer(largest, whole, side, INK, dice)), dice.roll(*GROUND, n))


def _layer(source: Whole, quarter: Whole, side: Whole, ink: tuple[int, int], dice: Dice) -> Layer:
    """Return a layer at any angle and place, a sixteenth of the side beyond the edge at most (turned corners more)."""
    n, edge = len(source), side * 7 // 16
    x, y = (edge + dice.roll(0, SIZE - 2 * edge, n) for _ in range(2))
    return Layer(source, quarter, side, dice.roll(-TURN, TURN, n), x, y, dice.roll(*ink, n))


def draw(scenes: Scenes, digits: Images, dice: Dice, at_once: int = 250) -> Images:
    """Return the scenes' pixels, uint8 [n, 1, 32, 32], of digits [m, 8, 8]; of layers that meet, the brighter shows."""
    stamps, pictures = _stamps(digits), []
    for start in range(0, len(scenes.labels), at_once):
        rows = slice(start, start + at_once)
        ground = scenes.ground[rows, None, None].astype(np.int32)
        ink = np.max([_inked(layer, rows, stamps) for layer in scenes.layers], axis=0)
        noise = dice.bytes(*ink.shape) + dice.bytes(*ink.shape) - 255
        # Ink moves the ground towards white; noise is a sum of two bytes, so small values are more frequent.
        picture = ground + (ink * (255 - ground) >> 8) + (noise * NOISE >> 8)
        pictures.append(np.clip(picture, 0, 255).astype(np.uint8))
    return np.concatenate(pictures)[:, None]


def _stamps(digits: Images) -> NDArray[np.int32]:
    """Return each digit's four quarters and the whole, with their margins: [5 m, 11, 11]."""
    stamps = np.zeros((len(digits), WHOLE + 1, ROW, ROW), np.int32)
    for quarter in range(WHOLE):
        y, x = quarter // 2 * 4, quarter % 2 * 4
        stamps[:, quarter, 1 + y:5 + y, 1 + x:5 + x] = digits[:, y:y + 4, x:x + 4]
    stamps[:, WHOLE, 1:9, 1:9] = digits
    return stamps.reshape(-1, ROW, ROW)


def _inked(layer: Layer, rows: slice, stamps: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return a layer's grey at every pixel [n, 32, 32]: the stamp is turned and scaled, bilinear."""
    angles = np.deg2rad(np.arange(-TURN, TURN + 1))
    # 1. The stamp's pixels for half a pixel of the scene, along both axes, in 1/32 of a fraction.
    across, along = ((np.rint(wave(angles) * 32 * 4 * ONE).astype(np.int64)[layer.turn[rows] + TURN]
                      // layer.side[rows]).astype(np.int32)[:, None] for wave in (np.cos, np.sin))
    # 2. The place (u, v) in the stamp of each pixel of the scene, in fractions, clipped to the margin.
    x, y = (2 * (np.arange(SIZE) - middle[rows, None]).astype(np.int32) + 1 for middle in (layer.x, layer.y))
    middle = 4 * ONE - ONE // 2
    u = ((across * x)[:, None, :] + (along * y)[:, :, None] >> 5) + middle
    v = ((across * y)[:, :, None] - (along * x)[:, None, :] >> 5) + middle
    u, v = (np.clip(axis, -ONE, 8 * ONE) for axis in (u, v))
    # 3. Mix the four pixels around it by their distances; `at` is the index of the upper left one.
    stamp = layer.source[rows] * (WHOLE + 1) + layer.quarter[rows]
    at = (stamp * ROW * ROW + ROW + 1).astype(np.int32)[:, None, None] + (v >> 8) * ROW + (u >> 8)
    u, v, flat = u & ONE - 1, v & ONE - 1, stamps.ravel()
    upper, lower = (flat[at + row] * (ONE - u) + flat[at + row + 1] * u for row in (0, ROW))
    grey: NDArray[np.int32] = (upper * (ONE - v) + lower * v >> 16) * layer.ink[rows, None, None].astype(np.int32) >> 8
    return grey
