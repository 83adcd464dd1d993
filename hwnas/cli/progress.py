"""The output of a command: progress, figures and tables.

Progress is shown as bars on a terminal, as one line in a notebook, as lines elsewhere, and not at all when quiet.
"""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import IO, Protocol

from hwnas.errors import UserError, hidden
from hwnas.lazy import rich

UNKNOWN = "–"
EVERY_S, SILENT_S = 10.0, 10.0  # seconds between two lines about a step: at least, and at most
FIRM = 0.2  # share of a step; from here on its own pace alone says how much time is left
_BAR = 10  # characters
_REPLACE_EVERY_S = 0.5  # between two changes of a notebook's line
_AT_ONCE_S = 1.0  # seconds after the start; a share reported so early was done before


def show(text: str) -> None:
    """Print a result, or several lines of it, on stdout. Nothing happens if its reader is gone (`| head -1`).

    Raises UserError if it cannot be written, such as to a file on a full disk.
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
    """A callable that receives the progress of a step: its share (0 to 1) and a short note."""

    def __call__(self, share: float, note: str = "") -> None:
        """Record the state; cheap enough to be called often."""


class Console:
    """The output of a command: facts as lines, long steps as bars. `quiet` leaves only results and warnings."""

    def __init__(self, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self.quiet, self.stream = quiet, stream or sys.stderr or io.StringIO()  # a daemon may have none
        self.live = not quiet and self.stream.isatty()
        self.spent_s: dict[str, float] = {}  # seconds of each step that has ended, by its title
        self.remarks: list[str] = []  # so far

    def say(self, text: str) -> None:
        """Print one line, also when quiet: results and warnings. The work goes on if nobody reads it any more."""
        try:
            print(f"{hidden(text)}\n", end="", file=self.stream, flush=True)  # one write: a thread writes too
        except OSError:  # a broken pipe, a terminal that was closed
            self.stream = io.StringIO()

    def note(self, text: str) -> None:
        """Print one line about the progress of the work; nothing when quiet."""
        if not self.quiet:
            self.say(text)

    def remark(self, text: str) -> None:
        """Print a line as `say` does, and keep it for the report: what was left out or done otherwise, and why."""
        self.remarks.append(hidden(text))
        self.say(text)

    @contextmanager
    def step(self, title: str, expected_s: float | None = None) -> Iterator[Report]:
        """Show a long step; yield the callable that receives its progress.

        Args:
            title: The work of the step, in a few words.
            expected_s: The seconds that it will take about or at most, if the caller knows. The time left is computed
                from it until the step's own pace says more.
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
                                              ("note", None, 1))]  # it is cut if the line is too short
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
    """The progress of a step, and the time that is left. A call of it is its `Report`."""

    def __init__(self, title: str, expected_s: float | None = None) -> None:
        self.title, self.expected_s, self.share, self.note = title, expected_s, 0.0, ""
        self.start = self.heard = time.monotonic()  # heard: when the share last changed
        self.before = 0.0  # share that another process had done: the step goes on with its work

    def __call__(self, share: float, note: str = "") -> None:
        if share != self.share:
            now = time.monotonic()
            if self.share == 0 and now - self.start < _AT_ONCE_S:
                self.before = share  # too early to be this process' work
            self.heard = now
        self.share, self.note = share, note

    @property
    def done(self) -> float | None:
        """The share that is done, as reported, or else by the expected time; None if neither is known."""
        if self.share > 0 or self.expected_s is None:
            return self.share or None
        return min(0.99, (time.monotonic() - self.start) / max(1e-9, self.expected_s))

    @property
    def left(self) -> str:
        """The time that is left, in words, by the pace so far and by the expected time; empty if neither is known."""
        now = time.monotonic()
        seconds = None if self.expected_s is None else self.expected_s - (now - self.start)
        # The pace counts only the share that this process has done. Until FIRM it is mixed with the expected time.
        if self.share > self.before:
            by_pace = (self.heard - self.start) * (1 - self.share) / (self.share - self.before) - (now - self.heard)
            firm = min(1.0, self.share / FIRM)
            seconds = by_pace if seconds is None else firm * by_pace + (1 - firm) * seconds
        if seconds is None:
            return ""
        return f"about {_lasting(seconds)} left" if seconds > 0 else "longer than estimated" if self.share < 1 else ""

    @property
    def bar(self) -> str:
        """A bar and the share that is done."""
        share = self.done or 0.0
        n = round(_BAR * min(1.0, share))
        return f"{'━' * n}{'╌' * (_BAR - n)} {share:4.0%}"

    @property
    def times(self) -> str:
        """Time that passed and time that is left."""
        return ", ".join(filter(None, (_lasting(time.monotonic() - self.start), self.left)))


class _Lines:
    """A step as lines: at most one in EVERY_S seconds, and one after SILENT_S seconds without a line."""

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
        """Print the state of the step, if the last line was long ago."""
        with self.lock:
            if time.monotonic() - self.last >= SILENT_S:
                self._tell()

    def _tell(self) -> None:
        self.last, step = time.monotonic(), self.step
        percent = "" if step.done is None else f"{step.done:4.0%}, "
        unknown = "" if step.left or step.note or step.share else "nothing has ended yet"
        self.say(f"{step.title}: {percent}{', '.join(filter(None, (step.times, step.note or unknown)))}")


class _NotebookConsole(Console):
    """A console in a notebook: each step replaces one line of the cell's output, however long it takes."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(quiet)
        self.live, self._line = False, None

    def _lines(self, step: Step) -> Iterator[Report]:
        last = 0.0

        def report(share: float, note: str = "") -> None:
            nonlocal last
            step(share, note)
            if time.monotonic() - last >= _REPLACE_EVERY_S:
                last = time.monotonic()
                self._show(step.done or 0.0, f"{step.title}: {step.done or 0:.0%}, {step.times} {step.note}")

        report(0.0)
        yield report
        self._show(1.0, f"{step.title}: done in {time.monotonic() - step.start:.0f} s")

    def _show(self, share: float, text: str) -> None:
        data = {"text/plain": text, "text/html": f'<progress value="{share:.3f}"></progress> {escape(text)}'}
        if self._line is None:
            self._line = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._line.update(data, raw=True)


def open_console(quiet: bool) -> Console:
    """Return the console for a call from Python: inside a notebook the one for notebooks."""
    # Only a program that runs in IPython has imported it.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return _NotebookConsole(quiet) if hasattr(shell, "kernel") else Console(quiet)


def _lasting(seconds: float) -> str:
    """Return a duration in words: seconds below 100, otherwise minutes and seconds."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02d} min"


def text_table(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> list[str]:
    """Return the lines of a table whose first row is its head: columns as wide as their entries, two spaces apart.

    Columns in `words` are aligned to the left, figures to the right. Nothing is cut, folded or coloured, so that a log
    and a pipe have the same text as a terminal.
    """
    lines = [""] * len(rows)
    for column, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(rich.cells.cell_len, cells))  # some characters are two cells wide
        for at, cell in enumerate(cells):
            space = " " * (width - rich.cells.cell_len(cell))
            lines[at] += f"{cell}{space}  " if column in words else f"{space}{cell}  "
    return [line.rstrip() for line in lines]


def number(value: float | None, form: str) -> str:
    """Return `value` in Python's format `form`, such as `.1%`, `+.2f` or `.4g`; a dash for an unknown value."""
    return UNKNOWN if value is None or not math.isfinite(value) else format(value, form)


def count(n: int, noun: str) -> str:
    """Return a number with its noun, such as "1 epoch" or "2 epochs"."""
    return f"{n} {noun}{'s' * (n != 1)}"
