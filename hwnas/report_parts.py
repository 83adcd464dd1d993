"""Pieces of a page: escaped text, sections, tables, definitions."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any


def escape(value: object) -> str:
    """Text from outside as HTML."""
    return html.escape(str(value))


def section(title: str, content: str) -> str:
    """A heading and what is below it; nothing where there is no content."""
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str]) -> str:
    """Rows of cells, each row of a CSS class; all columns but the first and the last are numbers."""
    numeric = range(1, len(columns) - 1)
    head = "".join(f'<th class="{"n" if index in numeric else ""}">{escape(name)}</th>'
                   for index, name in enumerate(columns))
    lines = []
    for cells, css in zip(rows, classes, strict=True):
        tags = "".join(f'<td class="{"id" if index == 0 else "n" if index in numeric else ""}">{escape(cell)}</td>'
                       for index, cell in enumerate(cells))
        lines.append(f'<tr class="{css}">{tags}</tr>')
    return (f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>' + "".join(lines)
            + "</tbody></table></div>")


def percent(value: float | None) -> str:
    """A fraction as per cent, empty where there is none."""
    return "" if value is None else f"{100 * value:.2f}"


def milliseconds(value: float | None) -> str:
    """Four significant digits, empty where there is no value."""
    return "" if value is None else f"{value:#.4g}".rstrip(".")


def between(low: float | None, high: float | None, scale: float, digits: int) -> str:
    """An interval: `digits` are significant ones where the scale is 1, decimals otherwise."""
    if low is None or high is None:
        return ""
    if scale == 1:
        return "–".join(f"{value:#.{digits}g}".rstrip(".") for value in (low, high))
    return f"{scale * low:.{digits}f}–{scale * high:.{digits}f}"


def definitions(values: Mapping[str, Any]) -> str:
    """Keys and values as a list, empty ones left out."""
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(_plain(value))}</dd>" for key, value in values.items()
                    if value not in (None, "", [], {}))
    return f"<dl>{items}</dl>" if items else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
