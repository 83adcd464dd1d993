"""Images and labels, in the forms that people have them in, become uint8 pixels and numbers of classes.

A form is a NumPy array, a torch or TensorFlow tensor, a column or frame of pandas, or a list. The same data in another
form gives the same pixels and numbers, or a DataError that says what to write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.data.dataset import Images, Labels
from hwnas.errors import DataError
from hwnas.system.paths import name_fault, shown_name

CHANNELS = (1, 3, 4)  # grey, RGB, and with alpha
_LEAST_BRIGHT = 128  # floats whose largest is below this are probably not on the scale 0 to 255
_TOLERANCE = 1e-3  # a rounded value may be outside of its range by this
_SAID = "whole numbers, names or booleans, one for each image, or one-hot rows [n, classes]"


def as_array(given: Any, where: str, step: str = "") -> NDArray[Any]:
    """Return the array that `given` holds. DataError if its rows differ in length, or values are masked."""
    try:
        if is_torch(given):
            given = given.detach().cpu()
            given = given.float() if str(given.dtype) == "torch.bfloat16" else given
        if hasattr(given, "toarray"):  # sparse, as of scikit-learn's OneHotEncoder
            given = given.toarray()
        if np.ma.is_masked(given):
            raise ValueError("masked values")
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} cannot be read ({' '.join(str(error).split())[:200]}).{step}") from None


def is_torch(given: Any) -> bool:
    """Return whether `given` is a torch tensor, whose channels come first."""
    return hasattr(given, "detach") and hasattr(given, "cpu")


def number_labels(labels: Mapping[str, Any], counts: Mapping[str, int], where: str, class_names: Any = None
                  ) -> tuple[tuple[str, ...], dict[str, Labels]]:
    """Number the classes of a data set from 0, whatever its labels are.

    A label is a whole number (from 0, from 1, or any others), a name, or a boolean. The labels of a part are a list, an
    array, a tensor or a column. Their shape is [n], [n, 1], or [n, classes] for one-hot rows. Without `class_names` the
    classes are the different labels of all parts in ascending order, and their names are these labels as text.

    Args:
        labels: The labels of each part.
        counts: The number of images of each part.
        where: The place that error messages name.
        class_names: Names in the order of the classes. Labels are then these names, or one number for each of them in
            ascending order, or numbers from 0 that say which name.

    Returns:
        The names, and int64 [n] from 0 for each part.

    Raises:
        DataError: A label is missing, no whole number, of several classes, or has no name.
    """
    # 1. Bring the labels of all parts to one kind: whole numbers, text or booleans.
    values = {part: _read_labels(given, counts[part], f"{where}: labels of the {part} part")
              for part, given in labels.items()}
    kinds = {array.dtype.kind: part for part, array in values.items()}
    if len(kinds) > 1:
        raise DataError(f"{where}: labels of the {' and '.join(kinds.values())} parts are of different kinds. Write "
                        "the same labels in each part.")
    # 2. Find the names, and the label that each of them has; then look up each label's place among these.
    classes = np.unique(np.concatenate([*values.values()]))
    names, keys = _name_classes(classes, class_names, where)
    order = np.argsort(keys)
    return tuple(tell_apart(names, where)), {
        part: order[np.searchsorted(keys, array, sorter=order)].astype(np.int64) for part, array in values.items()}


def tell_apart(names: Iterable[str], where: str) -> dict[str, str]:
    """Return {name as it is shown: name as it is written} of classes. Blanks around a name and its Unicode form do not
    count, as nobody sees them. DataError for names that look the same, or that no text file can hold."""
    spellings: dict[str, str] = {}
    for name in names:
        if fault := name_fault(name):
            raise DataError(f"{where}: the name of class {name!a} {fault}")
        if (first := spellings.setdefault(shown_name(name), name)) != name:
            raise DataError(f"{where}: the classes {first!a} and {name!a} look the same, as only blanks or the Unicode "
                            "form differ. Make them one.")
    return spellings


def _name_classes(classes: NDArray[Any], class_names: Any, where: str) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Return the names of the classes in order, and the label of each."""
    if classes.dtype.kind == "i" and classes[0] < 0 and classes.tolist() != [-1, 1]:
        way = "write names: y.astype(str)" if class_names is None else "count from 0: y - y.min()"
        raise DataError(f"{where}: label {classes[0]} beside {classes[-1]}. If it marks images without a label, "
                        f"leave them, or the part, out: x[y >= 0], y[y >= 0]. If it is a class, {way}.")
    if class_names is None:
        return tuple(map(str, classes.tolist())), classes
    names = np.asarray(class_names)
    if names.ndim != 1 or not names.size:
        raise DataError(f"{where}: class_names must be a list of names, got shape {names.shape}.")
    texts = tuple(map(str, names.tolist()))
    if len({*texts}) < len(texts):
        duplicate = next(text for text in texts if texts.count(text) > 1)
        raise DataError(f"{where}: class_names has {duplicate!r} twice. Give each class a name of its own.")
    if classes.dtype.kind == "U":
        if unknown := sorted({*classes.tolist()} - {*texts}):
            raise DataError(f"{where}: label {unknown[0]!r} is not in class_names ({', '.join(texts[:9])}). Add it.")
        return texts, np.asarray(texts)
    # As many numbers as names belong to them in ascending order. But of 0, 1 and 3 for three names, 3 is an error.
    if len(classes) == len(texts) and not (classes[0] == 0 and classes[-1] == len(texts)):
        return texts, classes
    if classes[0] < 0 or classes[-1] >= len(texts):
        raise DataError(f"{where}: label {classes[-1] if classes[0] >= 0 else classes[0]} where {len(texts)} classes "
                        "are numbered from 0. Correct labels or class_names.")
    return texts, np.arange(len(texts)).astype(classes.dtype)


def _read_labels(given: Any, count: int, where: str) -> NDArray[Any]:
    """Return labels [n]: int64, bool, or text."""
    # 1. One array, of Python objects if labels are a list.
    columns = [*given.columns] if hasattr(given, "columns") and hasattr(given, "shape") else []
    if isinstance(given, list | tuple):
        # As objects, so that NumPy does not turn a 1 beside an "a" into text; the None at the end keeps rows as lists.
        given = np.array([each.tolist() if hasattr(each, "tolist") else each for each in given] + [None],
                         dtype=object)[:-1]
    array = as_array(given, where, f" Give {_SAID}.")
    if array.dtype.kind == "O" and array.ndim == 1 and len(array) and all(
            isinstance(each, list | tuple) for each in array):
        lengths = {len(each) for each in array}
        if len(lengths) > 1:
            raise DataError(f"{where} hold {min(lengths)} to {max(lengths)} classes for an image. Give one: images of "
                            "several classes are not supported.")
        array = np.array(array.tolist(), dtype=object)
    # 2. Rows of several numbers are one-hot; the columns of a frame then name the classes.
    if array.ndim == 2 and len(array) == count and array.shape[1] > 1:
        numbers = _read_one_hot(array, where)
        return np.asarray(list(map(str, columns)))[numbers] if columns else numbers
    if array.ndim == 0 or array.size != count:
        raise DataError(f"{where} have shape {[*array.shape]}, for {count} images. Give {_SAID}.")
    return _plain_labels(array.reshape(-1), where)


def _read_one_hot(array: NDArray[Any], where: str) -> NDArray[np.int64]:
    try:
        rows = array.astype(np.float64)
    except (TypeError, ValueError):
        raise DataError(f"{where} have shape {[*array.shape]}, and are not numbers. Give {_SAID}.") from None
    classes: Labels = rows.argmax(1)
    wrong = np.flatnonzero(((rows == 1).sum(1) != 1) | ((rows != 0).sum(1) != 1))
    if not len(wrong):
        return classes
    row = rows[wrong[0]]
    if np.isfinite(rows).all() and len(np.unique(row)) > 1 and (row == row.max()).sum() == 1:
        raise DataError(f"{where} are shares or scores of {len(row)} classes (image {wrong[0]}). Write the class of "
                        "each image: y.argmax(1).")
    raise DataError(f"{where} name {int((row == 1).sum())} classes for image {wrong[0]}. Give one class for each "
                    "image: images of several classes or none are not supported.")


def _plain_labels(array: NDArray[Any], where: str) -> NDArray[Any]:
    """Return labels [n] of any dtype as int64, bool or text. DataError for missing labels, fractions, or a mixture."""
    kind = array.dtype.kind
    # 1. Python objects: all must be of one type, which then is the array's.
    if kind in "OT":
        values = [each.tolist() if hasattr(each, "tolist") else each for each in array.tolist()]
        if missing_rows := [row for row, each in enumerate(values)
                            if each is None or type(each).__name__ in ("NAType", "NaTType") or each != each]:
            raise _missing(missing_rows, where)
        kinds = [*dict.fromkeys(next((kind for kind in (str, bytes, bool, int, float) if isinstance(each, kind)),
                                     type(each)) for each in values)]
        if {*kinds} & {int, float}:  # booleans beside numbers are 0 and 1
            kinds = [kind for kind in kinds if kind is not bool]
        if {*kinds} != {int, float} and kinds not in ([str], [bytes], [bool], [int], [float]):
            raise DataError(f"{where} are {' and '.join(each.__name__ for each in kinds[:3])}. Give {_SAID}.")
        array = np.array(values, dtype=None if float in kinds or int in kinds else kinds[0])
        kind = array.dtype.kind
    # 2. Text and booleans stay. Numbers must be whole, and exact as int64.
    if kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{where} are bytes that are no UTF-8. Decode them to text.") from None
        kind = "U"
    if kind == "U":
        if len(empty := np.flatnonzero(np.char.str_len(np.char.strip(array)) == 0)):
            raise _missing(empty.tolist(), where)
        return array
    if kind == "b":
        return array
    if kind == "f":
        if len(missing_rows := np.flatnonzero(np.isnan(array)).tolist()):
            raise _missing(missing_rows, where)
        with np.errstate(invalid="ignore"):
            fractions = np.flatnonzero(~np.isfinite(array) | (array != np.rint(array)) | (abs(array) >= 2**53))
        if len(fractions):
            raise DataError(f"{where}: {array[fractions[0]]} (image {fractions[0]}) is no class. Give {_SAID}.")
    elif kind not in "iu" or (array.size and int(array.max()) >= 2**63):
        raise DataError(f"{where} are {array.dtype}. Give {_SAID}.")
    return array.astype(np.int64)


def _missing(rows: Sequence[int], where: str) -> DataError:
    return DataError(f"{where}: {len(rows)} missing, the first of image {rows[0]}. Label these images, or leave them "
                     "out.")


def read_pixels(given: Any, where: str) -> Images:
    """Return the pixels of n images: uint8 [n, h, w], or [n, h, w, c] with 3 or 4 channels.

    Axes are [n, h, w], [n, h, w, c] or [n, c, h, w] with 1, 3 or 4 channels. Values are whole numbers or floats from 0
    to 255, floats from 0 to 1, or booleans.

    Args:
        given: An array, a tensor, or a list of numbers.
        where: The place that error messages name.

    Raises:
        DataError: The axes or the range make no sense, values are missing, or all are alike; it says what to write.
    """
    array = as_array(given, where, " Give an array [n, height, width, 3].")
    pixels, = as_bytes([order_axes(array, is_torch(given), where)], where)
    low, high = int(pixels.min()), int(pixels.max())
    if low == high or high <= 1:  # floats from 0 to 1 that were cast to uint8, or classes of pixels
        raise DataError(f"{where} have values from {low} to {high}: {'all alike' if low == high else 'nearly black'}. "
                        "Write (x * 255).astype('uint8') of the floats from 0 to 1, or check how they were read.")
    return pixels


def order_axes(array: NDArray[Any], is_tensor: bool, where: str) -> NDArray[Any]:
    """Return images as [n, h, w] or [n, h, w, c]. `is_tensor`: if both axes could be the channels, the first is."""
    if array.ndim == 2 and len(array):
        side = math.isqrt(array.shape[1])
        rows = f"reshape(-1, {side}, {side})" if side * side == array.shape[1] else "reshape(-1, height, width)"
        raise DataError(f"{where} of shape {[*array.shape]} are rows of numbers. Write x.{rows}, with 3 as one more "
                        "axis for colours.")
    if array.ndim == 1 and len(array):
        raise DataError(f"{where} are a row of {len(array)} numbers. Images come first: (images, labels).")
    if array.ndim not in (3, 4) or not array.size:
        raise DataError(f"{where} must be [n, h, w], [n, h, w, c] or [n, c, h, w], got shape {[*array.shape]}. Sets "
                        "held apart are pairs: ((x, y), (x_test, y_test)).")
    if array.ndim == 3:
        return array
    is_last, is_first = array.shape[3] in CHANNELS, array.shape[1] in CHANNELS
    if is_first and is_tensor:
        is_last = False
    if is_last == is_first:
        raise DataError(f"{where} of shape {[*array.shape]}: which axis holds the channels? One of the second and the "
                        "last must be 1, 3 or 4, and not both. Reorder with x.transpose, or take x[..., :3].")
    array = array if is_last else np.moveaxis(array, 1, 3)
    return array[..., 0] if array.shape[3] == 1 else array


def as_bytes(arrays: Sequence[NDArray[Any]], where: str) -> list[Images]:
    """Return pixels of any range as uint8. The range of all arrays together decides what a value means."""
    kinds = {"b" if array.dtype.kind == "b" else "i" if array.dtype.kind in "iu" else array.dtype.kind
             for array in arrays}
    if len(kinds) > 1 or not kinds <= {*"bif"}:
        types = ", ".join(sorted({str(array.dtype) for array in arrays}))
        raise DataError(f"{where} are {types}. Give numbers of one kind: numpy.uint8 from 0 to 255.")
    if all(array.dtype == np.uint8 for array in arrays):
        return list(arrays)
    if kinds == {"b"}:
        return [array.astype(np.uint8) * np.uint8(255) for array in arrays]
    # Floats that are not finite would spoil the range: name the first image that has one.
    low, high = (float(extreme([extreme(array) for array in arrays])) for extreme in (np.min, np.max))
    if not math.isfinite(low) or not math.isfinite(high):
        images = arrays[0] if len(arrays) == 1 else arrays  # all of them in one array, or each in its own
        row = next(row for row, image in enumerate(images) if not np.isfinite(image).all())
        raise DataError(f"{where}: image {row} has NaN or infinite pixels. Leave it out, or mend it: "
                        "numpy.nan_to_num(x).")
    scale = _scale(low, high, kinds == {"f"}, where)
    return [np.rint(array * array.dtype.type(scale)).clip(0, 255).astype(np.uint8) if kinds == {"f"}
            else array.astype(np.uint8) for array in arrays]


def _scale(low: float, high: float, is_float: bool, where: str) -> int:
    """Return the factor that brings values to 0 to 255; DataError for a range that makes no sense."""
    fact = f"{where} have values from {low:.4g} to {high:.4g}"
    if low < -_TOLERANCE:  # normalised by mean and std, or to the range -1 to 1
        way = ("(x + 1) / 2" if low >= -1 - _TOLERANCE and high <= 1 + _TOLERANCE else "x * std + mean")
        raise DataError(f"{fact}: they are normalised already, which hwnas does itself. Give them as they were before, "
                        f"uint8 or floats from 0 to 1: {way}.")
    if is_float and high <= 1 + _TOLERANCE:
        return 255
    if high <= 1:
        raise DataError(f"{fact}, nearly black. Write x * 255.")
    if high > 255 + _TOLERANCE:
        raise DataError(f"{fact}, where uint8 ends at 255. Write (x / {high:.6g} * 255).round().astype('uint8').")
    if is_float and high < _LEAST_BRIGHT:
        raise DataError(f"{fact}, neither 0 to 1 nor 0 to 255. Write x / {high:.6g}, or x.astype('uint8') if they are "
                        "dark.")
    return 1
