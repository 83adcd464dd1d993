"""Writes the pictures and the report of a run again, from its own files: hwnas report run=DIR"""

from __future__ import annotations

import sys
from functools import partial

from hwnas.cli.command import opened_run, run_command
from hwnas.cli.options import Config
from hwnas.cli.progress import Console
from hwnas.front.report import read_report, write_report


def run(config: Config, console: Console) -> None:
    """Run the command: `run` names the folder."""
    folder = opened_run(config)
    with folder.hold("results", console.say):
        write_report(folder, read_report(folder))
    console.say(f"report: {folder.report}")


command = partial(run_command, run, "report", __doc__ or "", target=False)

if __name__ == "__main__":
    sys.exit(command())
