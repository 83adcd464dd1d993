"""Copies: the same image in two sets, or in two classes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hwnas.data.contents import UNREADABLE
from hwnas.data.dataset import Images, Labels

_SHOWN = 2  # names of copies


@dataclass(frozen=True, slots=True)
class ImageIndex:
    """The images of a set: a key that equal images share, the label of each, and its part and row there."""

    keys: Sequence[str]
    labels: Labels
    places: Sequence[tuple[str, int]]


def hash_images(images: Images) -> list[str]:
    """Keys of images that are in memory; of those that are mapped from a file none, as all of it would be read."""
    if isinstance(images, np.memmap):
        return [UNREADABLE] * len(images)
    return [hash_image(image.tobytes()) for image in images]


def hash_image(content: bytes) -> str:
    """The key of an image with these pixels, or in this file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def name_copies(sets: Mapping[str, ImageIndex], name_of: Callable[[str, int], str]) -> list[str]:
    """Return a sentence for each set that shares images with those before it, and for images in two classes.

    Args:
        sets: The training, validation and test set, in this order.
        name_of: What messages call an image, by its part and row.
    """
    remarks: list[str] = []
    present: set[str] = set()  # keys of the sets before
    for number, (name, content) in enumerate(sets.items()):
        rows = [row for row, key in enumerate(content.keys) if key in present]
        if number and rows:
            names = " and ".join(name_of(*content.places[row]) for row in rows[:_SHOWN])
            remarks.append(f"{len(rows):,} of {len(content.keys):,} {name} images are also in "
                           f"{' or '.join(list(sets)[:number])}, such as {names}")
        present |= {*content.keys} - {UNREADABLE}
    originals: dict[str, tuple[int, tuple[str, int]]] = {}
    contrary = []
    for content in sets.values():
        for key, label, place in zip(content.keys, content.labels.tolist(), content.places, strict=True):
            if key != UNREADABLE and originals.setdefault(key, (label, place))[0] != label:
                contrary.append((place, originals[key][1]))
    if contrary:
        copy, original = contrary[0]
        remarks.append(f"{len(contrary):,} images are copies of images of another class, such as {name_of(*copy)} of "
                       f"{name_of(*original)}")
    return remarks
