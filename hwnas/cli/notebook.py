"""Progress in a notebook: one line of the cell's output, which each step replaces."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from html import escape
from importlib import import_module

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
        self.live, self._line = False, None

    def _lines(self, step: Step) -> Iterator[Report]:
        last = 0.0

        def report(share: float, note: str = "") -> None:
            nonlocal last
            step(share, note)
            if time.monotonic() - last >= _EVERY_S:
                last = time.monotonic()
                self._show(step.done or 0.0, f"{step.title}: {step.done or 0:.0%}, {step.times}{step.after}")

        report(0.0)
        yield report
        self._show(1.0, f"{step.title}: done in {time.monotonic() - step.start:.0f} s")

    def _show(self, share: float, text: str) -> None:
        data = {"text/plain": text, "text/html": f'<progress value="{share:.3f}"></progress> {escape(text)}'}
        if self._line is None:
            self._line = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self._line.update(data, raw=True)
