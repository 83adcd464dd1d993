"""Images as a person gives them to be classified: paths, folders, patterns, pictures, arrays, lists of these."""

from __future__ import annotations

import glob
import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.data.decoding import LazyImage
from hwnas.data.folder import EXTENSIONS, Entry, image_files
from hwnas.data.forms import CHANNELS, as_array, as_bytes, is_torch, order_axes
from hwnas.errors import DataError
from hwnas.lazy import PIL

if TYPE_CHECKING:
    from hwnas.data.decoding import Source

_WANTED = ("a path, a folder, a pattern such as 'photos/*.jpg', a PIL image, an array [height, width, 3] or "
           "[height, width] of uint8 or of floats from 0 to 1, or a list of these")
_LEAST_SIDE = 5  # pixels: a last axis that is shorter holds channels


def list_sources(given: Any, left_out: Counter[str] | None = None) -> list[Source]:
    """Return the images that `given` stands for, in its order; those of a folder or a pattern by name.

    Args:
        given: One of _WANTED. A single path, picture or array is one image; an array [n, height, width, channels] is n.
        left_out: Counts what a folder holds beside images, by reason.

    Raises:
        DataError: There is no such file, or it stands for no image.
    """
    left_out = Counter() if left_out is None else left_out
    if isinstance(given, str | os.PathLike):
        return _at_path(os.path.expanduser(os.fspath(given)), left_out)
    if hasattr(given, "convert") and hasattr(given, "size") and hasattr(given, "mode"):
        return [LazyImage("the image", given.copy)]  # as decoding may change it
    if isinstance(given, bytes) or not (hasattr(given, "__iter__") or hasattr(given, "__array__")):
        raise _refused(given)
    if hasattr(given, "shape") and len(given.shape) != 1:  # a row is a column of paths, pictures or arrays
        return _in_array(given)
    sources: list[Source] = []
    for number, each in enumerate(given):
        try:
            own = list_sources(each, left_out)
        except DataError as error:
            raise DataError(f"image {number}: {error}") from None
        sources += [replace(source, name=f"image {number}") if isinstance(source, LazyImage) else source
                    for source in own]
    return sources


def _at_path(path: str, left_out: Counter[str]) -> list[Source]:
    if os.path.isdir(path):
        entries = sorted(image_files(path, 0, left_out), key=lambda entry: entry.name)
        if not entries:
            raise DataError(f"{path} has no images ({', '.join(EXTENSIONS)}).")
        return [*entries]
    files = [path] if os.path.exists(path) else sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not files:
        raise DataError(f"there is no file or folder {path!r}, and as a pattern it fits none.")
    return [Entry(each) for each in files]


def _in_array(given: Any) -> list[Source]:
    """Return the images of an array or tensor; a tensor's channels may come first, as torchvision has them."""
    array = as_array(given, "images")
    is_tensor = is_torch(given)
    has_channels = array.ndim == 4 or (
        array.ndim == 3 and min(array.shape[-1], array.shape[-3 if is_tensor else -1]) < _LEAST_SIDE)
    # Three axes, the first as short as colours are: of an image with its colours first, or of so many grey images.
    is_unclear = array.ndim == 3 and not has_channels and array.shape[0] in CHANNELS
    if not array.size or is_unclear or array.ndim - has_channels not in (2, 3):
        raise _refused(given, f" {array.dtype} {list(array.shape)}")
    is_one = array.ndim - has_channels == 2
    pixels = as_bytes([order_axes(array[None] if is_one else array, is_tensor, "images")], "images")[0]
    names = ["the image"] if is_one else [f"image {number}" for number in range(len(array))]
    return [LazyImage(name, PIL.Image.fromarray(np.ascontiguousarray(image)).copy)
            for name, image in zip(names, pixels, strict=True)]


def _refused(given: Any, more: str = "") -> DataError:
    return DataError(f"images must be {_WANTED}; got {type(given).__name__}{more}.")
