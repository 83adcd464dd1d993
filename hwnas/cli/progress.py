"""What a command shows: progress (bars on a terminal, lines elsewhere, nothing when quiet), figures and tables."""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Protocol

from hwnas.errors import UserError, hidden
from hwnas.lazy import rich

UNKNOWN = "–"
EVERY_S, SILENT_S = 10.0, 15.0  # of lines about a step: at least so long between two, at most so long in silence


def show(text: str) -> None:
    """Print a result, or several lines of it, on stdout. Nothing happens if its reader is gone (`| head -1`).

    UserError if it cannot be written, such as to a file on a full disk.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # Python flushes it once more at its end
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"cannot write the result to standard output: {error.strerror or error}. Send it to "
                            "another file, then give the same command again.") from None


class Report(Protocol):
    """Hears how far a step is (share from 0 to 1) and a short note."""

    def __call__(self, share: float, note: str = "") -> None:
        """Record the state; cheap enough to be called often."""


class Console:
    """Where a command says what it does: facts as lines, long steps as bars. `quiet` leaves only results."""

    def __init__(self, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self.quiet, self.stream = quiet, stream or sys.stderr
        self.live = not quiet and self.stream.isatty()
        self.spent_s: dict[str, float] = {}  # seconds of each step that has ended, by its title
        self.remarks: list[str] = []  # so far

    def say(self, text: str) -> None:
        """One line, also when quiet: results and warnings. The work goes on where nobody reads it any more."""
        try:
            print(f"{hidden(text)}\n", end="", file=self.stream, flush=True)  # one write: a thread speaks too
        except OSError:  # a broken pipe, a terminal that was closed
            self.stream = io.StringIO()

    def note(self, text: str) -> None:
        """One line about how the work goes; nothing when quiet."""
        if not self.quiet:
            self.say(text)

    def remark(self, text: str) -> None:
        """As `say`, a line that belongs in the report too: what was left out or done otherwise, and why."""
        self.remarks.append(hidden(text))
        self.say(text)

    @contextmanager
    def step(self, title: str) -> Iterator[Report]:
        """A long step: yields the callable that hears its progress."""
        began = time.monotonic()
        if self.quiet:
            yield lambda share, note="": None
        elif self.live:
            yield from self._bar(title)
        else:
            yield from self._lines(title)
        self.spent_s[title] = self.spent_s.get(title, 0.0) + time.monotonic() - began

    def _bar(self, title: str) -> Iterator[Report]:
        parts = rich.progress
        columns = (parts.TextColumn("{task.description:<22}"), parts.BarColumn(24),
                   parts.TextColumn("{task.percentage:>3.0f} %"), parts.TimeElapsedColumn(), parts.TextColumn("left"),
                   parts.TimeRemainingColumn(), parts.TextColumn("{task.fields[note]}"))
        with parts.Progress(*columns, console=rich.console.Console(file=self.stream), refresh_per_second=4) as bars:
            task = bars.add_task(title, total=1.0, note="")

            def report(share: float, note: str = "") -> None:
                bars.update(task, completed=share, note=note)

            yield report
            bars.update(task, completed=1.0)

    def _lines(self, title: str) -> Iterator[Report]:
        lines = _Lines(title, self.say)
        over = threading.Event()

        def beat() -> None:
            while not over.wait(1.0):
                lines.beat()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield lines
        finally:
            over.set()
        self.say(f"{title}: done in {time.monotonic() - lines.start:.0f} s")


class _Lines:
    """A step as lines: at most one in EVERY_S seconds, and one after SILENT_S in which nothing was heard."""

    def __init__(self, title: str, say: Callable[[str], None]) -> None:
        self.title, self.say, self.share, self.text = title, say, 0.0, ""
        self.start = self.last = self.heard = time.monotonic()
        self.lock = threading.Lock()
        say(f"{title} ...")

    def __call__(self, share: float, note: str = "") -> None:
        with self.lock:
            if share != self.share:
                self.heard = time.monotonic()
            self.share, self.text = share, f", {note}" if note else ""
            if share > 0 and time.monotonic() - self.last >= EVERY_S:
                self._tell()

    def beat(self) -> None:
        """Say how it stands, if the last line was long ago."""
        with self.lock:
            if time.monotonic() - self.last >= SILENT_S:
                self._tell()

    def _tell(self) -> None:
        self.last = time.monotonic()
        share, left, text = "", "", self.text
        if self.share > 0:  # what is left goes by when something ended last
            left_s = (self.heard - self.start) * (1 - self.share) / self.share - (self.last - self.heard)
            share, left = f"{self.share:4.0%}, ", f", about {left_s:.0f} s left" if left_s > 0 else ""
        elif not text:
            text = ", nothing has ended yet"
        self.say(f"{self.title}: {share}{self.last - self.start:.0f} s{left}{text}")


def text_table(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> list[str]:
    """Lines of a table whose first row is its head: columns as wide as their entries, two spaces between them.

    Columns in `words` stand to the left, figures to the right. Nothing is cut, folded or coloured, so that a log and a
    pipe hold what a terminal shows.
    """
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for column in range(len(rows[0])):
        table.add_column(justify="left" if column in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(rich.text.Text, row))
    width = sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0])))
    console = rich.console.Console(width=2 * width, color_system=None)  # some characters are two cells wide
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def number(value: float | None, form: str) -> str:
    """`value` in Python's format `form`, such as `.1%`, `+.2f` or `.4g`; a dash for what is not known."""
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, form)


def interval(low: float | None, high: float | None, form: str) -> str:
    """Two ends; a dash where one is not known."""
    return UNKNOWN if low is None or high is None else f"{low:{form}} to {high:{form}}"
