"""Data sets and images that are objects of a Python program.

Arrays, tensors, frames, and data sets of torch and Hugging Face become arrays of `hwnas.data.arrays` below the user's
folder, for other processes. Equal data are written alike in any form. Images to predict are read in place.
"""

from __future__ import annotations

import glob
import io
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.arrays import LAYOUT, NAMES, identity_of, name_arrays, read_parts
from hwnas.data.decoding import LazyImage, Source
from hwnas.data.folder import ALIASES, EXTENSIONS, PART_OF, Entry, image_files, open_image
from hwnas.data.forms import CHANNELS, as_array, as_bytes, is_torch, number_labels, order_axes, read_pixels
from hwnas.data.pixels import ROTATED, TORN, WIDE, ImageFacts, is_deep
from hwnas.errors import DataError, did_you_mean, kind_of, one_line
from hwnas.lazy import PIL
from hwnas.system.paths import home, shown_name

WANTED = ("a data set's name, a folder, (images, labels), ((images, labels), (test_images, test_labels)), three such "
          "pairs (train, validation, test), a data set of torch or Hugging Face, or a frame with columns of paths and "
          "labels")
_IMAGE_FORMS = ("a path, a folder, a pattern such as 'photos/*.jpg', a PIL image, an array [height, width, 3] or "
                "[height, width] of uint8 or of floats from 0 to 1, or a list of these")
_LEAST_SIDE = 5  # pixels: a last axis that is shorter holds channels
_WHERE = "data"
_IMAGE_COLUMNS = ("image", "images", "img", "picture", "path", "paths", "file", "filename", "file_name", "filepath",
                  "image_path", "pixel_values", "x")
_LABEL_COLUMNS = ("label", "labels", "class", "target", "fine_label", "category", "y")
_SPLIT_COLUMNS = ("split", "subset", "partition")
_MAYBE_SPLIT = ("set", "fold", "usage", "data_split", "dataset", "part", "phase")  # if it names parts
_FLAGS = ("is_valid", "is_val", "is_test", "is_train", "is_training", "is_training_image", "train")
_SAME_PIXELS = ("PNG", "BMP", "PPM")  # formats whose pixels are the same however large they are decoded
_AS_PIXELS = 1 << 30  # bytes of images that are stored as pixels, rather than as their files
_READ_TWICE = 4  # images that are read a second time, to find random transforms


@dataclass(frozen=True, slots=True)
class Pairs:
    """The images and labels of a part, as they were given. `class_names` are the names of the labels 0, 1 …"""

    images: Any
    labels: Any
    class_names: tuple[str, ...] = ()


def store_objects(data: Any) -> Path:
    """Write a data set of objects below the user's folder, and return its folder.

    Args:
        data: One of the forms in WANTED; also a mapping of parts, such as a DatasetDict or {"train": …, "test": …}, a
            mapping of arrays as in LAYOUT, and a list of (image, label).

    Raises:
        DataError: It is something else, or its images or labels make no sense. The error says what to write.
    """
    arrays = read_parts(_find_arrays(data), _WHERE)
    folder = home() / "cache" / f"arrays-{identity_of(arrays)}"
    if not folder.is_dir():
        # Write under another name and rename: a folder of the right name is always whole.
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            temporary.mkdir(parents=True, exist_ok=True)
            for name, array in arrays.items():
                np.save(temporary / f"{name}.npy", array, allow_pickle=False)
            os.replace(temporary, folder)
        except OSError as error:
            if not folder.is_dir():  # another process may have written the same
                raise DataError(f"cannot write {folder} ({error.strerror}). Free space there, or set HWNAS_HOME to a "
                                "folder on another disk.") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _find_arrays(data: Any) -> dict[str, Any]:
    """Return arrays as `read_parts` takes them."""
    # 1. A mapping of arrays, as an .npz file has them.
    if isinstance(data, Mapping) and not {*data} <= {*PART_OF} and not _is_set(data):
        if unknown := sorted((name for name in data if name not in {*NAMES, *NAMES.values(), "class_names"}),
                             key=lambda name: name in PART_OF):
            raise DataError(f"data has no part called {unknown[0]!r}.{did_you_mean(str(unknown[0]), PART_OF)} Write "
                            f"{{'train': …, 'validation': …, 'test': …}}, or arrays: {LAYOUT}.")
        arrays: dict[str, Any] = {}
        for name, value in name_arrays(data, _WHERE).items():
            arrays |= _read_images(value, name.removesuffix("_images")) if name.endswith("_images") else {name: value}
        return arrays
    # 2. All other forms are divided into parts first.
    parts = _find_parts(data)
    arrays = {}
    for part, pairs in parts.items():
        arrays |= _read_images(pairs.images, part)
    return arrays | _name_labels(parts, arrays)


def _name_labels(parts: Mapping[str, Pairs], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return each part's labels, as names if it has class names. If all parts have the same ones, add `class_names`,
    the names that occur."""
    labels: dict[str, Any] = {}
    for part, pairs in parts.items():
        labels[f"{part}_labels"] = pairs.labels
        if pairs.class_names:
            count = len(arrays.get(f"{part}_images", arrays.get(f"{part}_ends", ())))
            names, numbers = number_labels({part: pairs.labels}, {part: count}, _WHERE, pairs.class_names)
            labels[f"{part}_labels"] = np.asarray(names)[numbers[part]]
    orders = {pairs.class_names for pairs in parts.values()}
    if orders == {()} or len(orders) > 1:
        return labels
    present = {*np.concatenate([*labels.values()]).tolist()}
    return {**labels, "class_names": [name for name in map(shown_name, orders.pop()) if name in present]}


def _find_parts(data: Any) -> dict[str, Pairs]:
    if isinstance(data, Mapping) and not _is_set(data):
        if len({PART_OF[name] for name in data}) < len(data):
            raise DataError(f"data has two names of one part: {', '.join(map(repr, data))}. Give each part once.")
        return {PART_OF[name]: _read_set(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        if len(data) in (2, 3) and all(map(_is_set, data)):
            names = ("train", "test") if len(data) == 2 else ("train", "val", "test")
            return {name: _read_set(value) for name, value in zip(names, data, strict=True)}
        if len(data) != 2 and not all(isinstance(each, list | tuple | Mapping) and len(each) == 2 for each in data):
            raise DataError(f"data is {kind_of(data)} of {len(data)} values. Write ((x_train, y_train), "
                            "(x_test, y_test)), or (images, labels).")
        return {"train": Pairs(*data) if len(data) == 2 else _read_items(data)}
    return _split_column(data)


def _is_set(value: Any) -> bool:
    """Return whether a value holds images and labels, and is not one of the two alone."""
    if isinstance(value, list | tuple):
        return len(value) == 2 and all(hasattr(each, "__len__") and not isinstance(each, str) for each in value) and (
            len(value[0]) == len(value[1]))
    if columns := {str(name).lower() for name in _columns(value)}:
        if isinstance(value, Mapping):  # not of arrays of a whole data set, such as images and labels
            return bool(columns & {*_IMAGE_COLUMNS}) and bool(columns & {*_LABEL_COLUMNS}) and not columns & {*NAMES}
        return bool(columns & {*_IMAGE_COLUMNS, *_LABEL_COLUMNS})
    return (_has_items(value) or hasattr(value, "dataset")) and not (
        hasattr(value, "shape") or hasattr(value, "dtype") or isinstance(value, str | bytes))


def _has_items(value: Any) -> bool:
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")


def _columns(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value]
    names = getattr(value, "column_names", None)
    names = getattr(value, "columns", None) if names is None else names
    return [*names] if names is not None and hasattr(value, "__getitem__") else []


def _split_column(data: Any) -> dict[str, Pairs]:
    """Return the parts that a column of a frame names; all rows are `train` if there is no such column."""
    pairs = _read_set(data)
    column = _find_split(data)
    if column is None:
        return {"train": pairs}
    names = [str(value).lower() for value in _read_column(data, column)]
    if unknown := next((name for name in names if name not in PART_OF), None):
        raise DataError(f"data: column {column!r} says {unknown!r}. Write train, validation or test there, or leave "
                        "the column out.")
    rows = {part: [row for row, name in enumerate(names) if PART_OF[name] == part] for part in ALIASES}
    return {part: Pairs([pairs.images[row] for row in part_rows], [pairs.labels[row] for row in part_rows],
                        pairs.class_names) for part, part_rows in rows.items() if part_rows}


def _find_split(data: Any) -> Any:
    """Return the name of the column with each row's part, or None. DataError for flags such as is_valid."""
    names = {str(name).lower(): name for name in reversed(_columns(data))}
    if words := [word for word in names if word in _SPLIT_COLUMNS]:
        return names[words[-1]]
    # A column of an ambiguous name counts only if all of its values are names of parts.
    for word in (word for word in names if word in _MAYBE_SPLIT):
        values = {str(value).lower() for value in _read_column(data, names[word])}
        if len(values) > 1 and values <= {*PART_OF}:
            return names[word]
    if flag := next((word for word in _FLAGS if word in names), None):
        raise DataError(f"data: column {names[flag]!r} seems to divide the rows. Write a column split that says train, "
                        "validation or test, or leave it out.")
    return None


def _read_set(data: Any) -> Pairs:
    if isinstance(data, list | tuple) and len(data) == 2:
        return Pairs(*data)
    if isinstance(data, list):
        return _read_items(data)
    if hasattr(type(data), "__iter__") and not hasattr(type(data), "__len__"):
        raise DataError(f"data is {kind_of(data)}, which has no length. Write a list of its (image, label) "
                        "pairs: data=[*data].")
    if columns := _columns(data):
        return _read_columns(data, columns)
    if hasattr(data, "dataset") and not hasattr(data, "__getitem__"):
        raise DataError(f"data is {kind_of(data)}. Write its data set, without augmentation: data.dataset.")
    if _has_items(data) and not hasattr(data, "dtype"):
        return _read_items(data)
    raise DataError(f"data is {kind_of(data)}. Write {WANTED}.")


def _read_columns(data: Any, columns: list[Any]) -> Pairs:
    features = getattr(data, "features", None) or {}
    # The types that Hugging Face declares come first, then the usual names of columns.
    kinds = {name: type(features[name]).__name__ for name in columns if name in features}
    columns = [name for name in columns if str(name).lower() not in _SPLIT_COLUMNS]
    images = [name for name in columns if kinds.get(name) == "Image"] or [
        name for name in columns if str(name).lower() in _IMAGE_COLUMNS]
    labels = [name for name in columns if kinds.get(name) == "ClassLabel"] or [
        name for name in columns if str(name).lower() in _LABEL_COLUMNS]
    if len(columns) == 2:  # the other column is the other thing
        images = images or [name for name in columns if [name] != labels]
        labels = labels or [name for name in columns if [name] != images]
    if len(images) != 1 or len(labels) != 1:
        way = ("data.rename_columns({'IMAGE': 'image', 'LABEL': 'label'}).select_columns(['image', 'label'])"
               if features else "(data['IMAGE'], data['LABEL'])")
        raise DataError(f"data: which columns hold images and labels? There are {', '.join(map(str, columns[:9]))}"
                        f"{f' and {len(columns) - 9} more' if len(columns) > 9 else ''}. Write {way} with their names.")
    names = getattr(features[labels[0]], "names", None) if labels[0] in features else None
    return Pairs(_read_column(data, images[0]), _read_column(data, labels[0]), tuple(names or ()))


def _read_column(data: Any, name: Any) -> list[Any]:
    """Return the values of a column; images of Hugging Face as files, unless the user's function changes them."""
    if hasattr(data, "features"):
        is_changed = (getattr(data, "format", None) or {}).get("type") == "custom"  # by a function of the user
        if not hasattr(data, "with_format") or is_changed:
            values = [data[row][name] for row in range(len(data))]
            _check_same(values, lambda row: data[row][name])
            return values
        data = data.with_format("arrow")[:]
    values = data[name]
    return [*(values.to_pylist() if hasattr(values, "to_pylist") else values)]


def _read_items(data: Any) -> Pairs:
    """Return images and labels of a data set of torch, or of a list of (image, label)."""
    if type(data).__module__ == "torchvision.datasets.folder" and data.samples and not (
            data.transform or data.target_transform) and getattr(data.loader, "__name__", "") == "default_loader":
        paths, labels = zip(*data.samples, strict=True)  # as files, whose pixels would fill the memory
        return Pairs([*paths], [*labels], _class_names(data))
    items = [_read_item(data, row) for row in range(len(data))]
    if not items:
        raise DataError("data is empty. Give images and labels.")
    if all(isinstance(item, Mapping) for item in items):
        columns = {name: [item.get(name) for item in items] for name in items[0]}
        pairs = _read_columns(columns, [*columns])
        key = next(name for name in items[0] if items[0][name] is pairs.images[0])
        _check_same(pairs.images, lambda row: data[row][key])
        return pairs
    if odd_rows := [row for row, item in enumerate(items) if not isinstance(item, list | tuple) or len(item) != 2]:
        item = items[odd_rows[0]]
        fact = f"{len(item)} values" if isinstance(item, list | tuple) else kind_of(item)
        raise DataError(f"data: item {odd_rows[0]} is {fact}. Let each item be (image, label): [(item[0], item[1]) for "
                        "item in data].")
    images = [item[0] for item in items]
    _check_same(images, lambda row: data[row][0])
    return Pairs(images, [item[1] for item in items], _class_names(data))


def _check_same(images: Any, read_again: Callable[[int], Any]) -> None:
    """Raise DataError if one of the first images is another when it is read again."""
    for row, image in enumerate(images[:_READ_TWICE]):
        first, again = np.asarray(image), np.asarray(read_again(row))
        if not np.array_equal(first, again, equal_nan=first.dtype.kind == "f"):
            raise DataError(f"data: image {row} is another each time it is read. Give the data set without random "
                            "transforms; training augments by itself.")


def _read_item(data: Any, row: int) -> Any:
    try:
        return data[row]
    except OSError as error:  # an image that cannot be opened; other errors are the program's own
        raise DataError(f"data: item {row} cannot be read ({one_line(error)}). Leave it out.") from error


def _class_names(data: Any) -> tuple[str, ...]:
    """Return the names of the classes of a torch data set or of a part of one; empty if it has none."""
    while not hasattr(data, "classes"):
        if hasattr(data, "datasets") and data.datasets:
            data = data.datasets[0]
        elif hasattr(data, "dataset"):
            data = data.dataset
        else:
            return ()
    is_names = isinstance(data.classes, list | tuple) and all(isinstance(name, str) for name in data.classes)
    return tuple(data.classes) if is_names else ()


def _read_images(given: Any, part: str) -> dict[str, Any]:
    """Return the images of a part as arrays of `hwnas.data.arrays`: their pixels, or their files end to end."""
    where = f"data: images of the {part} part"
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__"):
        raise DataError(f"{where} are {kind_of(given)}. Write {WANTED}.")
    # 1. One array of all images.
    shape = getattr(given, "shape", (0,))
    if len(shape) > 1 or (hasattr(given, "dtype") and getattr(given.dtype, "kind", "O") in "biufc"):
        return {f"{part}_images": read_pixels(given, where)}
    # 2. A list: pixels in one array, if all images have the same size and the array is not too large.
    items = [_read_image(each, f"data: image {row} of the {part} part") for row, each in enumerate(given)]
    if not items:
        raise DataError(f"{where}: there are none. Give images and labels.")
    names = [str(each) if isinstance(each, str | os.PathLike) else "" for each in given]
    pixels = _decode_alike(items)
    if pixels is not None:
        return {f"{part}_images": read_pixels(pixels, where)}
    # 3. Otherwise files, end to end. Images that were arrays are encoded as PNG.
    arrays = [item for item in items if not isinstance(item, bytes)]
    png_files = iter([_encode(PIL.Image.fromarray(np.ascontiguousarray(array))) for array in as_bytes(arrays, where)]
                     if arrays else ())
    files = [item if isinstance(item, bytes) else next(png_files) for item in items]
    return {f"{part}_files": np.frombuffer(b"".join(files), np.uint8), f"{part}_names": np.asarray(names),
            f"{part}_ends": np.cumsum([len(file) for file in files], dtype=np.int64)}


def _read_image(given: Any, where: str) -> bytes | NDArray[Any]:
    """Return one image as its file's bytes, or as pixels [h, w] or [h, w, c] of any range."""
    if isinstance(given, Mapping) and {"bytes", "path"} & {*given}:  # of Hugging Face, not decoded
        given = given.get("bytes") or given.get("path")
    if given is None or (isinstance(given, float) and given != given):
        raise DataError(f"{where} is missing. Leave it out.")
    if isinstance(given, str | os.PathLike):
        path = Path(given).expanduser()
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{where}: {path} cannot be read ({error.strerror}). Correct the path, or leave it "
                            "out.") from None
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    if hasattr(given, "convert") and hasattr(given, "mode"):
        return _picture_pixels(given, where)
    array = as_array(given, where)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where} is {kind_of(given)}. Give paths, pictures of Pillow, arrays or "
                        "tensors.")
    pixels: NDArray[Any] = order_axes(array[None], is_torch(given), where)[0]
    return pixels


def _picture_pixels(image: PIL.Image.Image, where: str) -> bytes | NDArray[Any]:
    """Return a Pillow picture's pixels: grey, RGB, RGBA or deep. If EXIF turns it, return a PNG file that says so."""
    try:
        exif = image.getexif() if ROTATED in ImageFacts.of(image).marks else None
        if image.has_transparency_data and not is_deep(image):
            image = image.convert("RGBA")
        elif image.mode == "1":
            image = image.convert("L")
        elif image.mode not in ("L", "RGB", "RGBA") and not is_deep(image):
            image = image.convert("RGB")
        return np.asarray(image) if exif is None else _encode(image, exif=exif)
    except TORN as error:
        raise DataError(f"{where} cannot be read ({one_line(error)}). Leave it out.") from None


def _decode_alike(items: list[bytes | NDArray[Any]]) -> NDArray[Any] | None:
    """Return all images as one array; None if they differ in size or type, or are better stored as files."""
    arrays = [item for item in items if not isinstance(item, bytes)]
    if not arrays:
        files = [item for item in items if isinstance(item, bytes)]
        # Compare the headers before any file is decoded.
        head, *others = {_head(file) for file in files}
        if head is None or others:
            return None
        form, mode, (width, height) = head
        if form not in _SAME_PIXELS or mode not in ("L", "RGB", "RGBA") or (
                width * height * len(mode) * len(files) > _AS_PIXELS):
            return None
        try:
            arrays = [np.asarray(open_image(io.BytesIO(file))) for file in files]
        except TORN:  # as a file, it is named by the data set that reads it
            return None
    if len(arrays) < len(items) or len({(array.shape, array.dtype) for array in arrays}) > 1:
        return None
    return np.stack(arrays)


def _head(file: bytes) -> tuple[str, str, tuple[int, int]] | None:
    """Return format, mode and size of an image file; None if it is unreadable, or pixels do not say how it is seen."""
    try:
        with open_image(io.BytesIO(file)) as image:
            facts = ImageFacts.of(image)
            is_plain = not ({*facts.marks} & {ROTATED, WIDE} or "transparency" in image.info)
            return (str(image.format), image.mode, image.size) if is_plain else None
    except (*TORN, PIL.Image.DecompressionBombError):
        return None


def _encode(image: PIL.Image.Image, **more: Any) -> bytes:
    image.save(file := io.BytesIO(), "PNG", compress_level=1, **more)
    return file.getvalue()


def list_sources(given: Any, left_out: Counter[str] | None = None) -> list[Source]:
    """Return the images that `given` holds or names, in its order; images of a folder or a pattern are sorted by name.

    Args:
        given: One of _IMAGE_FORMS. A single path, picture or array is one image; an array [n, height, width, channels]
            is n.
        left_out: Counts what a folder holds beside images, by reason.

    Raises:
        DataError: There is no such file, a folder has no images, or `given` is of another form.
    """
    left_out = Counter() if left_out is None else left_out
    if isinstance(given, str | os.PathLike):
        return _at_path(os.path.expanduser(os.fspath(given)), left_out)
    if hasattr(given, "convert") and hasattr(given, "size") and hasattr(given, "mode"):
        return [LazyImage("the image", given.copy)]  # a copy, as decoding may change it
    if isinstance(given, bytes) or not (hasattr(given, "__iter__") or hasattr(given, "__array__")):
        raise _refused(given)
    if hasattr(given, "shape") and len(given.shape) != 1:  # one axis: a column of paths, pictures or arrays
        return _in_array(given)
    sources: list[Source] = []
    for number, each in enumerate(given):
        try:
            item_sources = list_sources(each, left_out)
        except DataError as error:
            raise DataError(f"image {number}: {error}") from None
        sources += [replace(source, name=f"image {number}") if isinstance(source, LazyImage) else source
                    for source in item_sources]
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
    # Three axes, the first as short as colours are: one image with its colours first, or so many grey images?
    is_unclear = array.ndim == 3 and not has_channels and array.shape[0] in CHANNELS
    if not array.size or is_unclear or array.ndim - has_channels not in (2, 3):
        raise _refused(given, f" {array.dtype} {list(array.shape)}")
    is_one = array.ndim - has_channels == 2
    pixels = as_bytes([order_axes(array[None] if is_one else array, is_tensor, "images")], "images")[0]
    names = ["the image"] if is_one else [f"image {number}" for number in range(len(array))]
    return [LazyImage(name, PIL.Image.fromarray(np.ascontiguousarray(image)).copy)
            for name, image in zip(names, pixels, strict=True)]


def _refused(given: Any, more: str = "") -> DataError:
    return DataError(f"images must be {_IMAGE_FORMS}; got {type(given).__name__}{more}.")
