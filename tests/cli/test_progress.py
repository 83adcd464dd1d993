"""Tables and figures as text."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.cli import progress
from hwnas.cli.progress import _Lines, interval, number, text_table


def test_names_stand_left_figures_right_and_nothing_is_cut() -> None:
    long = "x" * 300
    assert text_table([("name", "ms", ""), ("a [bold]b", "1.5", long), ("c", "10.25", "")], words=(0, 2)) == [
        "name          ms", f"a [bold]b    1.5  {long}", "c          10.25"]


def test_wide_characters_keep_columns_in_line() -> None:
    head, row = text_table([("机器", "ms"), ("ab", "1")])
    assert (head, row) == ("机器  ms", "ab     1")


CELL = st.text("ab01[]/ é%±", max_size=8).map(str.strip)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.text("xyz", min_size=1, max_size=5), CELL, CELL), min_size=1, max_size=4))
def test_columns_are_as_wide_as_their_entries(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    assert text_table(rows) == [
        f"{row[0].ljust(widths[0])}  {row[1].rjust(widths[1])}  {row[2].rjust(widths[2])}".rstrip() for row in rows]


def test_what_is_not_known_is_a_dash() -> None:
    assert (number(0.125, ".1%"), number(-1, "+.2f"), number(None, ".1%"), number(math.nan, ".1%")) == (
        "12.5%", "-1.00", "–", "–")
    assert (interval(0.1, 0.25, ".2f"), interval(None, 1.0, ".2f")) == ("0.10 to 0.25", "–")


def test_a_step_is_never_silent_for_long_and_says_no_more_than_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = _Lines("search", said.append)
    for second in range(1, 61):
        now[0] = second
        if second == 40:
            lines(0.5, "2 of 4 evaluated")
        lines.beat()
    assert said == [
        "search ...", "search: 15 s, nothing has ended yet", "search: 30 s, nothing has ended yet",
        "search:  50%, 40 s, about 40 s left, 2 of 4 evaluated",
        "search:  50%, 55 s, about 25 s left, 2 of 4 evaluated"]
