"""Progress in a notebook: one line of the cell's output, which each step replaces."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any

from hwnas.cli.progress import Console, Report, Step

_EVERY_S = 0.5  # between two changes of the line


def open_console(quiet: bool) -> Console:
    """Return the console of a call from Python: one for notebooks inside of a notebook."""
    # Only a program that runs in IPython has imported it.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return NotebookConsole(quiet) if hasattr(shell, "kernel") else Console(quiet)


class NotebookConsole(Console):
    """A console whose steps are one line, however long they take."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._line: Any = None

    @contextmanager
    def step(self, title: str, expected_s: float | None = None) -> Iterator[Report]:
        """See `Console.step`."""
        step, last = Step(title, expected_s), 0.0

        def report(share: float, note: str = "") -> None:
            nonlocal last
            step(share, note)
            if time.monotonic() - last >= _EVERY_S:
                last = time.monotonic()
                self._show(step.done or 0.0, f"{title}: {step.done or 0:.0%}, {step.times}{step.after}")

        report(0.0)
        yield report
        took_s = time.monotonic() - step.start
        self.spent_s[title] = self.spent_s.get(title, 0.0) + took_s
        self._show(1.0, f"{title}: done in {took_s:.0f} s")

    def _show(self, share: float, text: str) -> None:
        if self.quiet:
            return
        data = {"text/plain": text, "text/html": f'<progress value="{share:.3f}"></progress> {escape(text)}'}
        if self._line is None:
            self._line = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._line.update(data, raw=True)
