"""Show what a command does: progress (bars on a terminal, lines elsewhere, nothing when quiet), figures and tables."""

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
EVERY_S, SILENT_S = 10.0, 10.0  # of lines about a step: at least so long between two, at most so long in silence
FIRM = 0.2  # share of a step from which on its own pace alone tells what is left
_BAR = 10  # characters
_AT_ONCE_S = 1.0  # after the start: what is done by then was done before


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
    """The place where a command says what it does: facts as lines, long steps as bars. `quiet` leaves only results."""

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
    def step(self, title: str, expected_s: float | None = None) -> Iterator[Report]:
        """A long step: yields the callable that hears its progress.

        Args:
            title: What it does, in a few words.
            expected_s: Seconds that it will take about or at most, if the caller knows. What is left is counted from
                it until the step's own pace says more.
        """
        step = Step(title, expected_s)
        if self.quiet:
            yield step
        elif self.live:
            yield from self._bar(step)
        else:
            yield from self._lines(step)
        self.spent_s[title] = self.spent_s.get(title, 0.0) + time.monotonic() - step.start

    def _bar(self, step: Step) -> Iterator[Report]:
        parts, column = rich.progress, rich.table.Column
        columns = [parts.TextColumn(f"{{task.fields[step].{name}}}", markup=False, table_column=column(
                       no_wrap=True, overflow="ellipsis", max_width=width, ratio=ratio))
                   for name, width, ratio in (("title", 24, None), ("bar", None, None), ("times", None, None),
                                              ("after", None, 1))]  # the note is cut where the line is too short
        with parts.Progress(*columns, console=rich.console.Console(file=self.stream), refresh_per_second=4,
                            expand=True) as bars:
            bars.add_task("", total=None, step=step)
            yield step
            step(1.0)

    def _lines(self, step: Step) -> Iterator[Report]:
        lines, over = _Lines(step, self.say), threading.Event()

        def beat() -> None:
            while not over.wait(1.0):
                lines.beat()

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield lines
        finally:
            over.set()
        self.say(f"{step.title}: done in {_lasting(time.monotonic() - step.start)}")


class Step:
    """The progress of a step, and what is left of it. Calling it is its `Report`."""

    def __init__(self, title: str, expected_s: float | None = None) -> None:
        self.title, self.expected_s, self.share, self.note = title, expected_s, 0.0, ""
        self.start = self.heard = time.monotonic()  # heard: when the share last grew
        self.before = 0.0  # share that was done before: the step goes on with what another process began

    def __call__(self, share: float, note: str = "") -> None:
        if share != self.share:
            now = time.monotonic()
            if self.share == 0 and now - self.start < _AT_ONCE_S:
                self.before = share
            self.heard = now
        self.share, self.note = share, note

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, by the pace so far and by what was expected; None if neither tells."""
        now = time.monotonic()
        by_plan = None if self.expected_s is None else self.expected_s - (now - self.start)
        if self.share <= self.before:
            return by_plan
        by_pace = (self.heard - self.start) * (1 - self.share) / (self.share - self.before) - (now - self.heard)
        firm = min(1.0, self.share / FIRM)
        return by_pace if by_plan is None else firm * by_pace + (1 - firm) * by_plan

    @property
    def done(self) -> float | None:
        """The share that is done, by what was heard or by the time that was expected; None if neither tells."""
        if self.share > 0 or self.expected_s is None:
            return self.share or None
        return min(0.99, (time.monotonic() - self.start) / max(1e-9, self.expected_s))

    @property
    def left(self) -> str:
        """The time that is left, in words; empty if nothing tells."""
        seconds = self.left_s
        if seconds is None:
            return ""
        return f"about {_lasting(seconds)} left" if seconds > 0 else "longer than estimated" if self.share < 1 else ""

    @property
    def bar(self) -> str:
        """A bar and the share that is done."""
        done = self.done or 0.0
        n = round(_BAR * min(1.0, done))
        return f"{'━' * n}{'╌' * (_BAR - n)} {done:4.0%}"

    @property
    def times(self) -> str:
        """Time that passed and time that is left."""
        return ", ".join(filter(None, (_lasting(time.monotonic() - self.start), self.left)))

    @property
    def after(self) -> str:
        """The note, apart from what stands before it."""
        return f" {self.note}" if self.note else ""


class _Lines:
    """A step as lines: at most one in EVERY_S seconds, and one after SILENT_S in which nothing was heard."""

    def __init__(self, step: Step, say: Callable[[str], None]) -> None:
        self.step, self.say, self.last = step, say, step.start
        self.lock = threading.Lock()
        say(f"{step.title} ...")

    def __call__(self, share: float, note: str = "") -> None:
        with self.lock:
            self.step(share, note)
            if share > 0 and time.monotonic() - self.last >= EVERY_S:
                self._tell()

    def beat(self) -> None:
        """Say how it stands, if the last line was long ago."""
        with self.lock:
            if time.monotonic() - self.last >= SILENT_S:
                self._tell()

    def _tell(self) -> None:
        self.last, step = time.monotonic(), self.step
        done = "" if step.done is None else f"{step.done:4.0%}, "
        unknown = "" if step.left or step.note or step.share else "nothing has ended yet"
        self.say(f"{step.title}: {done}{', '.join(filter(None, (step.times, step.note or unknown)))}")


def _lasting(seconds: float) -> str:
    """A duration: seconds below 100, otherwise minutes and seconds."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02d} min"


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


def count(n: int, noun: str) -> str:
    """"1 epoch", "2 epochs"."""
    return f"{n} {noun}{'s' * (n != 1)}"


def interval(low: float | None, high: float | None, form: str) -> str:
    """Two ends; a dash where one is not known."""
    return UNKNOWN if low is None or high is None else f"{low:{form}} to {high:{form}}"
