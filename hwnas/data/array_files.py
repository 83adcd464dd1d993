"""Images in arrays: an .npz file, or a folder of .npy files, of uint8 images with labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import DatasetInfo, Images, Listing
from hwnas.data.decoding import Decoder, look
from hwnas.data.splits import DatasetOptions, Labels
from hwnas.errors import DataError
from hwnas.system.arrays import map_npy, read_npz
from hwnas.system.paths import is_utf8

if TYPE_CHECKING:
    from PIL import Image

LAYOUT = ("images (uint8: [n, h, w], [n, h, w, c] or [n, c, h, w], c 1 or 3) and labels (whole numbers or names, [n]); "
          "for sets held apart train_images, train_labels, test_images, test_labels and val_images, val_labels; "
          "class_names if labels are numbers")
PARTS = ("train", "val", "test")


@dataclass(frozen=True, slots=True)
class ArrayImage:
    """One image of an array, uint8 [h, w] or [h, w, 3]."""

    pixels: Images
    name: str

    def open(self) -> Image.Image:
        from PIL import Image

        return Image.fromarray(self.pixels)


def array_files(options: DatasetOptions) -> Listing:
    """List `root`: an .npz file, or a folder of .npy files, with the arrays of LAYOUT; DataError names what is wrong.

    Images are resized as those in folders are, so that one data set in either form trains the same networks.
    """
    root = options.root
    if root is None or not root.exists():
        place = "dataset.root is not set" if root is None else f"{root}: no such file or folder"
        raise DataError(f"{place}. Give dataset.root=FILE.npz, or a folder of .npy files, that holds {LAYOUT}.")
    arrays = _load(root)
    pairs = {part: pair for part in PARTS if (pair := _pair(arrays, part, root)) is not None}
    if "train" not in pairs:
        raise DataError(f"{root}: no images and labels; there is {', '.join(sorted(arrays)) or 'nothing'}. "
                        f"It must hold {LAYOUT}.")
    names, labels = _number_labels({part: pair[1] for part, pair in pairs.items()}, arrays.get("class_names"), root)
    identity = _identity({**{f"{part}_images": pair[0] for part, pair in pairs.items()},
                          **{f"{part}_labels": pair[1] for part, pair in pairs.items()}}, names)
    sources = {part: [ArrayImage(image, f"{root}: {part} image {row}") for row, image in enumerate(pair[0])]
               for part, pair in pairs.items()}
    channels, native_size = look(sources["train"], options, str(root))
    return Listing(DatasetInfo(options.name, channels, len(names), native_size), names, labels, identity, str(root),
                   Decoder(sources, channels, options, lambda: identity), pictures=True)


def _load(root: Path) -> dict[str, NDArray[Any]]:
    """Arrays by name; those in .npy files are mapped, not read. Nothing is unpickled."""
    files = sorted(root.glob("*.npy")) if root.is_dir() else [root]
    arrays: dict[str, NDArray[Any]] = {}
    for path in files:
        try:
            if path.suffix == ".npy":
                arrays[path.stem] = map_npy(path)
            else:
                arrays |= read_npz(path, path.stat().st_size)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read as an array ({error}). Save it with numpy.save or numpy.savez, "
                            "without objects.") from None
    return arrays


def _pair(arrays: Mapping[str, NDArray[Any]], part: str, root: Path) -> tuple[Images, NDArray[Any]] | None:
    """Images [n, h, w] or [n, h, w, 3] and labels [n] of a part; None where it has neither."""
    names = (f"{part}_images", f"{part}_labels")
    if part == "train" and not {*names} & {*arrays}:
        names = ("images", "labels")
    present = [name for name in names if name in arrays]
    if not present:
        return None
    if len(present) == 1:
        raise DataError(f"{root}: {present[0]} without {({*names} - {*present}).pop()}. Give both.")
    images, labels = (arrays[name] for name in names)
    if labels.ndim != 1 or len(labels) != len(images) or labels.dtype.kind not in "iuU":
        raise DataError(f"{root}: {names[1]} must be whole numbers or names, one for each of {len(images)} images, got "
                        f"{labels.dtype} of shape {labels.shape}.")
    return _pictures(images, f"{root}: {names[0]}"), labels


def _pictures(images: NDArray[Any], where: str) -> Images:
    """Images as [n, h, w] or [n, h, w, 3]."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
        raise DataError(f"{where} must be uint8 [n, h, w], [n, h, w, c] or [n, c, h, w], got {images.dtype} of shape "
                        f"{images.shape}. Convert it: numpy.uint8 from 0 to 255.")
    if images.ndim == 3:
        return images
    last, second = images.shape[3] in (1, 3), images.shape[1] in (1, 3)
    if last == second:
        raise DataError(f"{where} of shape {images.shape}: which axis holds the channels? One of the second and the "
                        "last must be 1 or 3, and not both.")
    images = images if last else np.moveaxis(images, 1, 3)
    return images[..., 0] if images.shape[3] == 1 else images


def _number_labels(labels: Mapping[str, NDArray[Any]], class_names: NDArray[Any] | None, root: Path
              ) -> tuple[tuple[str, ...], dict[str, Labels]]:
    """Class names in order, and labels as their numbers."""
    values = np.unique(np.concatenate([np.asarray(part) for part in labels.values()]))
    if values.dtype.kind == "U":
        names = tuple(map(str, values))
        _check_names(names, root)
        return names, {part: np.searchsorted(values, array).astype(np.int64) for part, array in labels.items()}
    n, last = sum(map(len, labels.values())), int(values.max(initial=-1))
    if class_names is None and last >= n:
        raise DataError(f"{root}: label {last} where there are {n} images: classes are numbered from 0. Correct "
                        "labels, or give names.")
    if class_names is not None and class_names.ndim != 1:
        raise DataError(f"{root}: class_names must be a list of names, got shape {class_names.shape}.")
    names = tuple(map(str, class_names if class_names is not None else range(last + 1)))
    _check_names(names, root)
    if len(values) and (values[0] < 0 or values[-1] >= len(names)):
        raise DataError(f"{root}: label {values[-1] if values[0] >= 0 else values[0]} where {len(names)} classes are "
                        "numbered from 0. Correct labels or class_names.")
    return names, {part: np.asarray(array, np.int64) for part, array in labels.items()}


def _check_names(names: tuple[str, ...], root: Path) -> None:
    """DataError for a name that no text file can hold."""
    if wrong := next((name for name in names if not is_utf8(name)), None):
        raise DataError(f"{root}: the name of class {wrong!a} is no text. Rename the class.")


def _identity(arrays: Mapping[str, NDArray[Any]], names: tuple[str, ...]) -> str:
    """Twelve digits that change with any pixel, label or name."""
    text = hashlib.sha256("\n".join(names).encode())
    for name, array in sorted(arrays.items()):
        text.update(f"{name}{array.shape}{array.dtype}".encode())
        for start in range(0, len(array), 4096):
            text.update(np.ascontiguousarray(array[start:start + 4096]).tobytes())
    return text.hexdigest()[:12]
