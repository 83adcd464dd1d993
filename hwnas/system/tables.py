"""Tables and JSON as text: what `trials.csv` and the run folder's `.json` files hold, from plain Python values."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_NUMERIC = re.compile(r"number|duplicate_of|epochs|seed|seconds|reward|params|macs|"
                      r"(latency_ms|top1|seconds|n|size_mb|price_per_million)_?.*")


def table_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV text of mappings: None as an empty cell, lists as JSON, floats to six digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_cell(row.get(name)) for name in columns] for row in rows])
    return out.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(finite(value)) if isinstance(value, list | tuple | dict) else str(value)


def read_table(text: str) -> list[dict[str, Any]]:
    """Rows of a table: empty cells are None, `true`/`false` booleans, columns that name a quantity numbers.

    Other columns stay text: an architecture's id may consist of digits, or read like `12e34567`.
    """
    return [{key: _value(key, cell) for key, cell in row.items() if key}
            for row in csv.DictReader(io.StringIO(text, newline=""))]


def _value(column: str, text: str | None) -> Any:
    if not text:
        return None
    if text in ("true", "false"):
        return text == "true"
    if not _NUMERIC.fullmatch(column):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def finite(data: Any) -> Any:
    """Plain values: no NaN, infinity, tuple or numpy scalar left."""
    if isinstance(data, Mapping):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    if isinstance(data, np.generic):
        data = data.item()
    return None if isinstance(data, float) and not np.isfinite(data) else data
