"""The tables as CSV text, with a type for each column, and plain values for JSON.

Arrays in .npy and .npz files are read without pickles, and compared with the file's size before memory is taken.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import types
import unicodedata
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, get_args

from hwnas.errors import one_line
from hwnas.lazy import numpy as np
from hwnas.lazy import pandas
from hwnas.system.documents import read_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray


Columns = Mapping[str, Any]  # type of each column: str, int, float or bool, or one of these or None
_DTYPES = {str: "string", int: "Int64", float: "Float64", bool: "boolean"}
_BOOLEANS = {"true": True, "false": False}
_BOUNDS = {int: 2**63, float: 1e300}  # pandas has no larger whole numbers, no axis larger floats
_SHOWN = 40  # characters of a cell that an error shows
MOST_TEXT = 32 << 20  # bytes of a table
_MOST_CELLS = 8_000_000  # a line takes as much memory as 20 cells
_LINE = 20


_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")  # a number to a spreadsheet, too

def table_csv(rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = ()) -> str:
    """Return mappings as CSV text: None as an empty cell, `true` and `false`, lists as JSON, floats to six digits.

    Columns are `columns`, then others in the order in which they first appear.
    """
    names = list(dict.fromkeys([*columns, *(key for row in rows for key in row)]))
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    return str(pandas.DataFrame(cells, columns=names, dtype=object).to_csv(index=False, lineterminator="\n"))


def shown_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return `table_csv` of names that anybody may have chosen, safe to open. A text that begins as a formula, and is
    no number, gets an apostrophe before it, so that a spreadsheet does not run it. Control characters become escapes,
    so that a terminal does not obey them."""
    return table_csv([{key: _harmless(value) if isinstance(value, str) else value for key, value in row.items()}
                      for row in rows])


def _harmless(text: str) -> str:
    text = "".join(char.encode("unicode_escape").decode() if unicodedata.category(char) in ("Cc", "Cs") else char
                   for char in text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) and not _NUMBER.fullmatch(text) else text


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(finite(value)) if isinstance(value, list | tuple | dict) else str(value)


def table_text(path: Path) -> str:
    """Return the text of a CSV file. Raises OSError, or ValueError if it is not UTF-8 or larger than MOST_TEXT."""
    return read_bytes(path, MOST_TEXT).decode()


def read_table(text: str, columns: Columns) -> list[dict[str, Any]]:
    """Return the rows of a table by column, with the types that `columns` gives; other columns are text or None.

    An empty cell is None, or "" if the type is `str`. Raises ValueError with the line and column of a wrong cell.
    """
    values = _values(text, columns)
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def read_frame(text: str, columns: Columns) -> pandas.DataFrame:
    """Return the table of `read_table` as a frame of pandas' nullable types."""
    return pandas.DataFrame({name: pandas.array(values, dtype=_DTYPES[_base(columns.get(name, str))])
                             for name, values in _values(text, columns).items()})


def _values(text: str, columns: Columns) -> dict[str, list[Any]]:
    """Return the values by column. Raises ValueError for text that is no table, and for a cell of another type."""
    lines, numbers, cells = list[list[str]](), list[int](), 0
    try:
        reader, start = csv.reader(io.StringIO(text, newline="")), 1  # the first line of a row in the text
        for line in reader:
            if line:
                lines.append(line)
                numbers.append(start)
                cells += len(line) + _LINE
            start = reader.line_num + 1
            if cells > _MOST_CELLS:
                raise ValueError(f"more than {_MOST_CELLS // _LINE} lines, or as much in cells.")
    except csv.Error as error:
        raise ValueError(f"not a table ({error}).") from None
    for number, line in zip(numbers, lines, strict=True):
        if len(line) != len(lines[0]):
            raise ValueError(f"line {number}: {len(line)} cells where the first line has {len(lines[0])}.")
    return {name: [_value(line[column], columns.get(name, str | None), f"line {number}: {name}")
                   for number, line in zip(numbers[1:], lines[1:], strict=True)]
            for column, name in enumerate(lines[0] if lines else ())}


def _base(kind: Any) -> Any:
    """Return the type of a value beside None: `int` for `int | None`."""
    return next(part for part in get_args(kind) if part is not types.NoneType) if get_args(kind) else kind


def _value(cell: str, kind: Any, where: str) -> Any:
    if cell == "" and kind is not str and types.NoneType in get_args(kind):
        return None
    base = _base(kind)
    try:
        value = _BOOLEANS[cell] if base is bool else base(cell)
        if value != value and types.NoneType in get_args(kind):  # NaN: there is no value
            return None
        if base not in _BOUNDS or not abs(value) >= _BOUNDS[base]:
            return value
    except (KeyError, ValueError):
        pass
    raise ValueError(f"{where} cannot be {cell[:_SHOWN]!r}.")


def finite(data: Any) -> Any:
    """Return plain values for JSON: no NaN, infinity, tuple or numpy scalar is left."""
    if isinstance(data, Mapping):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    if isinstance(data, np.generic):
        data = data.item()
    return None if isinstance(data, float) and not np.isfinite(data) else data


_FREE = 512 << 20  # bytes that an archive may unpack to, whatever its size
_MOST_PACKED = 100  # beyond that, at most so many times the file's size: images and labels shrink to a tenth at best
_MOST_LETTER = 0x10FFFF  # the last one of Unicode
Arrays: TypeAlias = "dict[str, NDArray[Any]]"


def read_npz(file: Path | IO[bytes], size: int) -> Arrays:
    """Return the arrays of an .npz file of `size` bytes, by name. Raises OSError, or ValueError if it is no such file,
    holds objects, or claims more than it has."""
    arrays: Arrays = {}
    try:
        with zipfile.ZipFile(file) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
            if sum(member.file_size for member in members) > max(_FREE, _MOST_PACKED * size):
                raise ValueError("packed far too small for what it unpacks to")
            for member in members:
                with archive.open(member) as part:  # before NumPy takes the memory that the header asks for
                    _check_header(part, member.file_size)
                with archive.open(member) as part:
                    array = np.lib.format.read_array(part, allow_pickle=False)
                arrays[member.filename.removesuffix(".npy")] = _checked(array)
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for what is no archive
        raise ValueError(one_line(error)) from error
    return arrays


def map_npy(path: Path) -> NDArray[Any]:
    """Return the array of an .npy file, mapped into memory. Raises the errors of `read_npz`."""
    try:
        with open(path, "rb") as file:
            _check_header(file, path.stat().st_size)
        return _checked(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError:
        raise
    except Exception as error:  # as above
        raise ValueError(one_line(error)) from error


def _check_header(file: IO[bytes], size: int) -> None:
    """Raise ValueError unless the array of the header's shape and type fills the rest of the `size` bytes."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise ValueError(f"version {version} of the format")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a header that Python 2 wrote
        shape, _, kind = readers[version](file)
    if kind.hasobject or min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != size - file.tell():
        raise ValueError(f"{kind} of shape {shape} is not what the file holds"[:200])


def _checked(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array. Raises ValueError if it has letters that Unicode does not have."""
    if array.dtype.kind == "U" and array.nbytes:
        codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if codes.max() > _MOST_LETTER:
            raise ValueError("letters that there are not")
    return array
