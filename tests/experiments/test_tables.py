"""The tables of the pages: they hold what the files give, and a changed figure is told."""

from __future__ import annotations

import re

import pytest

from experiments import tables


def page(name: str) -> str:
    return (tables.ROOT / name).read_text(encoding="utf-8")


def test_the_pages_hold_what_the_files_give() -> None:
    assert tables.problems() == []


def test_every_table_stands_on_a_page() -> None:
    used = {name for path in tables.PAGES for name in re.findall(r"<!-- table: (\w+) -->", page(path))}
    assert used == set(tables.TABLES)


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_changed_figure_is_told_with_its_line(name: str) -> None:
    text = page(name)
    start = text.index("<!-- table: ")
    changed = text[:start] + re.sub(r"(\d)(\.\d| %)", lambda found: f"{(int(found[1]) + 1) % 10}{found[2]}",
                                    text[start:], count=1)
    line = next(number for number, lines in enumerate(zip(text.split("\n"), changed.split("\n"), strict=True), 1)
                if lines[0] != lines[1])
    told = list(tables.differences(name, changed))
    assert len(told) == 1
    assert told[0].startswith(f"{name}:{line}: says ")
    assert tables.written(changed) == text


def test_a_figure_that_no_table_of_its_section_has_is_told() -> None:
    text = "## A\n<!-- table: load -->\n| 1.25 |\n<!-- end -->\nIt is 1.25 times, not 9.75.\n## B\nIt is 1.25.\n"
    assert [line.split(": ")[1] for line in tables.strays("page", text)] == [
        "no table of the section computes 9.75", "no table of the section computes 1.25"]


@pytest.mark.parametrize(("value", "decimals", "text"), [
    (-0.04, 1, "0.0"), (-8.94, 1, "−8.9"), (1.3465, 2, "1.35"), (None, 1, "–"), (float("nan"), 1, "–")])
def test_numbers_are_shown_plainly(value: float | None, decimals: int, text: str) -> None:
    assert tables.shown(value, decimals) == text


def test_bold_is_beyond_chance() -> None:
    assert tables.with_interval({"value": 1.35, "low": 1.19, "high": 1.45}, 2, 1.0) == "**1.35** (1.19 to 1.45)"
    assert tables.with_interval({"value": 1.29, "low": 0.98, "high": 1.75}, 2, 1.0) == "1.29 (0.98 to 1.75)"
