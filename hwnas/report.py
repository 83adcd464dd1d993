"""Writes the pictures and the report of a run again, from its own files; or compares devices.

    python -m hwnas.report run=DIR
    python -m hwnas.report compare=[runs/a,latency_tables] out=devices.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.cli.command import opened_run
from hwnas.cli.options import Config, given, read_value
from hwnas.errors import ConfigError
from hwnas.front.report import read_report, write_report

if TYPE_CHECKING:
    from hwnas.cli.progress import Console


def run(config: Config, console: Console) -> None:
    """The command: `run` names the folder; or `compare` what tells the times of several devices."""
    if config.get("compare"):
        return _compare(config, console)
    folder = opened_run(config)
    with folder.hold("results", console.say):
        write_report(folder, read_report(folder))
    console.say(f"report: {folder.report}")


def _compare(config: Config, console: Console) -> None:
    from hwnas.cli.progress import show
    from hwnas.front.devices import compare

    if config.get("run"):
        raise ConfigError("run and compare are two commands: give one of them.")
    sources = read_value(given(config)["compare"], tuple[str, ...], "compare")
    out = Path(read_value(config["out"], str, "out"))
    text, files = compare([Path(source) for source in sources], out)
    for line in text:
        show(line)
    for file in files:
        console.say(f"written: {file}")


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.report`."""
    from hwnas.cli.command import run_command

    return run_command(run, "report", __doc__ or "", argv, target=False)


if __name__ == "__main__":
    raise SystemExit(command())
