"""Judges a latency table on networks it has never seen: python -m hwnas.validate +target=xeon_int8"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hwnas.cli.command import run_command
from hwnas.cli.options import Config
from hwnas.cli.progress import Console

USAGE = """Predicted against measured latency, on networks never seen: half random, half from the predicted front.

    python -m hwnas.validate +target=xeon_int8 space=mnasnet n=60 seed=7 out=v.json   # and v.png
    python -m hwnas.validate +target=xeon_int8 space=mnasnet measured=v.json          # the same networks again"""


def main(config: Config, console: Console) -> None:
    """Choose, measure, compare; print the report and write it with its picture."""
    from hwnas.latency.validation import validate

    validate(config, console)


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.validate`."""
    return run_command(main, "validate", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
