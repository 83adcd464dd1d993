"""Tables and figures as plain text, for terminals and logs."""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "–"


def text_table(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table whose first row is its head: columns as wide as their entries, two spaces between them.

    Columns in `words` stand to the left, figures to the right. Nothing is cut, folded or coloured, so that a log and a
    pipe hold what a terminal shows.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in range(len(rows[0])):
        table.add_column(justify="left" if column in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    width = sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0])))
    console = Console(width=2 * width, color_system=None)  # some characters are two cells wide
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def number(value: float | None, form: str) -> str:
    """`value` in Python's format `form`, such as `.1%`, `+.2f` or `.4g`; a dash for what is not known."""
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, form)


def interval(low: float | None, high: float | None, form: str) -> str:
    """Two ends; a dash where one is not known."""
    return UNKNOWN if low is None or high is None else f"{low:{form}} to {high:{form}}"
