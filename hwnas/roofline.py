"""Command: the roofline picture of a space's blocks on this host."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hwnas.cli.command import run_command
from hwnas.cli.options import Config
from hwnas.cli.progress import Console

USAGE = """Arithmetic intensity of a space's blocks against the GFLOP/s that they reach, under measured roofs.

    python -m hwnas.roofline +target=xeon_int8 space=mnasnet_small against=xeon_fp32 out=runs/roofline.png"""


def main(config: Config, console: Console) -> None:
    """Measure the roofs, place the blocks of the latency tables under them; print, draw and store."""
    from hwnas.latency.roofline import roofline

    roofline(config, console)


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.roofline`."""
    return run_command(main, "roofline", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
