"""Tables and figures as text."""

from __future__ import annotations

import io
import math
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_fixtures import wait_until

from hwnas.cli import progress
from hwnas.cli.progress import Console, Step, _Lines, count, number, text_table
from hwnas.lazy import rich


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
    assert (count(1, "epoch"), count(0, "epoch"), count(2, "epoch")) == ("1 epoch", "0 epochs", "2 epochs")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of steps, in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_step_is_never_silent_for_long_and_says_no_more_than_it_knows(now: list[float]) -> None:
    said = list[str]()
    lines = _Lines(Step("search"), said.append)
    for second in range(1, 46):
        now[0] = second
        if second == 25:
            lines(0.25, "1 of 4 evaluated")
        lines.beat()
    assert said == [
        "search ...", "search: 10 s, nothing has ended yet", "search: 20 s, nothing has ended yet",
        "search:  25%, 30 s, about 70 s left, 1 of 4 evaluated",
        "search:  25%, 40 s, about 60 s left, 1 of 4 evaluated"]


def test_what_is_left_is_known_after_ten_seconds_if_the_length_is_and_the_pace_corrects_it(now: list[float]) -> None:
    said = list[str]()
    lines = _Lines(Step("calibrate", expected_s=400.0), said.append)
    for second, share in ((10, 0.0), (100, 0.5), (180, 0.5), (210, 0.5)):
        now[0] = second
        lines(share, "")
        lines.beat()
    assert said[1:] == ["calibrate:   2%, 10 s, about 6:30 min left", "calibrate:  50%, 1:40 min, about 1:40 min left",
                        "calibrate:  50%, 3:00 min, about 20 s left",
                        "calibrate:  50%, 3:30 min, longer than estimated"]


def test_what_was_done_before_a_step_began_is_none_of_its_pace(now: list[float]) -> None:
    step = Step("search")
    step(0.5)
    now[0] = 20.0
    assert step.left == ""
    step(0.6)
    assert step.left == "about 80 s left"


def test_at_80_columns_a_bar_says_what_is_left_and_the_note_is_what_gives_way(now: list[float]) -> None:
    step = Step("time 7 networks of the latency table again", expected_s=600.0)
    out = io.StringIO()
    console = Console(stream=out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rich.console, "Console", partial(rich.console.Console, width=80, force_terminal=True))
        for report in console._bar(step):
            now[0] = 69.0
            report(0.0, "round 12, 7 of 7 networks open, and other words that find no place")
            wait_until(lambda: "round" in out.getvalue())
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines() if line.strip()]
    assert any("69 s, about 8:51 min left" in line for line in lines)
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_a_daemon_without_standard_error_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    console = Console()
    console.say("nobody reads this")
    with console.step("work") as report:
        report(0.5)
    assert not console.live
