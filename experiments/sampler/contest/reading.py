"""Columns of a CSV or Parquet file, as they stand there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import read_cells
from hwnas.errors import DataError

Value = str | int | float | bool | None


def read_columns(path: Path, columns: Sequence[str]) -> dict[str, list[Any]]:
    """Each column's values: text from CSV, typed ones from Parquet. UnknownName names a column that is not there."""
    found = read_cells(path, columns, "Give table=FILE.csv or .parquet.")
    if not found[columns[0]]:
        raise DataError(f"{path}: no rows.")
    return found


def numbers(path: Path, name: str, values: Sequence[Any]) -> np.ndarray:
    """A column as floats, NaN where there is none; DataError for text that is no number."""
    found = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if value in (None, ""):
            continue
        try:
            found[index] = float(value)
        except (TypeError, ValueError):
            raise DataError(f"{path}, row {index + 2}: {name} is {value!r}, no number. Mend the row.") from None
    return found


def settings(path: Path, name: str, values: Sequence[Any]) -> list[Value]:
    """A column of parameter values, None where there is none; text is taken for numbers where all of it are."""
    plain = [None if value == "" or (isinstance(value, float) and math.isnan(value)) else value for value in values]
    for index, value in enumerate(plain):
        if not isinstance(value, str | int | float | bool | None):
            raise DataError(f"{path}, row {index + 2}: {name} is a {type(value).__name__}, no parameter's value.")
    for kind in (int, float):
        if all(value is None or _is(kind, value) for value in plain):
            return [None if value is None else kind(value) for value in plain]
    return plain


def digits(path: Path, name: str, values: Sequence[Any]) -> dict[str, list[Value]]:
    """A column of digit strings as one column a digit."""
    texts = ["" if value is None else str(value) for value in values]
    width = len(texts[0])
    for index, text in enumerate(texts):
        if len(text) != width or not text.isdecimal():
            raise DataError(f"{path}, row {index + 2}: {name} is {text!r}; {width} digits were expected, as in the "
                            "first row. Store it as text, with its leading zeros.")
    return {f"digit_{place}": [text[place] for text in texts] for place in range(width)}


def _is(kind: type, value: Any) -> bool:
    """Text that `kind` writes in the same way, so that 01 stays text."""
    if not isinstance(value, str):
        return type(value) is kind
    try:
        return str(kind(value)) == value and (kind is int or math.isfinite(float(value)))
    except ValueError:
        return False
