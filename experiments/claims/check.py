"""Hold what a document says against what files in the repository give.

A claim quotes the document with `{}` in place of each figure, and computes these figures. A table's claim names its
first header cell and gives the figures of each row. Both fail when the quotation is gone and when a figure differs
after rounding to the digits that are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

NUMBER = r"(?<![\w.\-/])[−+-]?\d[\d,]*(?:\.\d+)?(?![\w-])"
# Code, addresses, numbers of lists, headings.
_HIDDEN = (r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)", r"(?m)^\d+\. ", r"(?m)^#[^\n]*")
Figures = Sequence[float | None]


@dataclass(frozen=True)
class Claim:
    """`quotation` holds a `{}` for each of `figures()`; one without any is from a file, and stands word by word."""

    quotation: str
    figures: Callable[[], Figures] = tuple


@dataclass(frozen=True)
class Table:
    """The `nth` table below `heading` (a line's beginning).

    `rows()`: by what stands in a row's first `keys` cells, all numbers right of them; None: not held. A bold line
    without numbers heads a group, whose rows are called "group: row".
    """

    heading: str
    rows: Callable[[], Mapping[str, Figures]]
    nth: int = 0
    keys: int = 1


@dataclass(frozen=True)
class Outcome:
    """How many figures were held, and what is wrong, one line each."""

    held: int
    problems: list[str]


def check(name: str, text: str, claims: Sequence[Claim], *, allowed: Mapping[str, str] | None = None) -> Outcome:
    """Hold `claims` against `text`.

    With `allowed` (quotations, and why their numbers are no claims) every number of the prose must be one or the other.
    """
    problems: list[str] = []
    covered: list[tuple[int, int]] = []
    held = 0
    for claim in claims:
        match = re.search(_pattern(claim.quotation), text)
        if match is None:
            problems.append(f"{name}: no longer says: {claim.quotation}")
            continue
        figures = claim.figures()
        written = match.groups()
        held += len(written) or len(re.findall(NUMBER, claim.quotation))
        covered += [match.span(group + 1) for group in range(len(written))]
        where = f"{name}:{_line(text, match.start())}"
        problems += list(_differences(where, claim.quotation, written, figures))
    if allowed is not None:
        for quotation in allowed:
            match = re.search(_pattern(quotation), text)
            if match is None:
                problems.append(f"{name}: allows what it no longer says: {quotation}")
            else:
                covered.append(match.span())
        problems += [f"{name}:{_line(text, start)}: no claim computes {number!r} in: {_around(text, start)}"
                     for number, start in numbers(text) if not any(low <= start < high for low, high in covered)]
    return Outcome(held, problems)


def check_tables(name: str, text: str, tables: Sequence[Table]) -> Outcome:
    """Hold the numbers of every row of `tables` against the computed ones."""
    problems: list[str] = []
    held = 0
    for table in tables:
        places = [match.start() for match in re.finditer(re.escape("\n" + table.heading), text)]
        if len(places) <= table.nth:
            problems.append(f"{name}: has no table {table.nth + 1} that begins: {table.heading}")
            continue
        rows, group = dict(table.rows()), ""
        first = _line(text, places[table.nth]) + 1
        for offset, line in enumerate(text[places[table.nth] + 1:].split("\n")):
            if not line.startswith("|"):
                break
            cells = [re.sub(r"[*`]", "", cell).strip() for cell in line.strip("|").split("|")]
            label, written = " ".join(cells[:table.keys]), re.findall(NUMBER, "|".join(cells[table.keys:]))
            if not written:
                group = f"{label}: " if line.startswith("| **") else group
            elif offset > 1:
                figures = rows.pop(group + label, ())
                held += sum(figure is not None for figure in figures)
                problems += list(_differences(f"{name}:{first + offset}", group + label, written, figures))
        problems += [f"{name}:{first}: the table has no row {label}" for label in rows]
    return Outcome(held, problems)


def numbers(text: str) -> Iterator[tuple[str, int]]:
    """Numbers of the prose with their places: none in code, addresses, headings, names (int8, ResNet-18), lists."""
    for hidden in _HIDDEN:
        text = re.sub(hidden, lambda match: re.sub(r"\S", "#", match.group()), text, flags=re.DOTALL)
    for match in re.finditer(NUMBER, text):
        yield match.group(), match.start()


def _differences(where: str, what: str, written: Sequence[str], figures: Figures) -> Iterator[str]:
    if len(written) != len(figures):
        yield f"{where}: {len(written)} figures where {len(figures)} are computed: {what}"
        return
    for text, figure in zip(written, figures, strict=True):
        decimals = len(text.partition(".")[2])
        value = float(text.replace(",", "").replace("−", "-"))
        if figure is not None and not abs(figure - value) <= 0.5 * 10**-decimals + 1e-9:
            yield f"{where}: says {text}, the files give {figure:.{decimals + 2}f}: {what}"


def _pattern(quotation: str) -> str:
    """Blanks may be line ends."""
    words = [re.escape(part) for part in re.split(r"\s+", quotation)]
    return r"\s+".join(words).replace(re.escape("{}"), r"([−+-]?\d[\d,]*(?:\.\d+)?)")


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _around(text: str, place: int) -> str:
    return " ".join(text[max(0, place - 30):place + 30].split())
