"""Writes the pictures and the report of a run again, from its own files: hwnas report run=DIR"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hwnas.cli.command import opened_run, run_command
from hwnas.cli.options import Config
from hwnas.front.report import read_report, write_report

if TYPE_CHECKING:
    from hwnas.cli.progress import Console


def run(config: Config, console: Console) -> None:
    """The command: `run` names the folder."""
    folder = opened_run(config)
    with folder.hold("results", console.say):
        write_report(folder, read_report(folder))
    console.say(f"report: {folder.report}")


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas report`."""
    return run_command(run, "report", __doc__ or "", argv, target=False)


if __name__ == "__main__":
    raise SystemExit(command())
