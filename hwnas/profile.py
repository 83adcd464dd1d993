"""Command: measure this host for a target and a search space, and store the latency table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console

USAGE = """Measure this host for a target and a search space (a latency table in $HWNAS_HOME/latency_tables).

    python -m hwnas.profile +target=xeon_int8 space=mnasnet image_size=128 channels=3 budget.minutes=10"""


def main(config: Any, console: Console) -> None:
    """Calibrate, print the held-out error and where the table lies."""
    from hwnas.latency.calibrate import calibrate
    from hwnas.latency.deployment import Deployment, calibration_lock, calibration_options, error_line, key_of, space_of
    from hwnas.latency.table import find_table
    from hwnas.runtimes.runtime import load_runtime

    deployment = Deployment.from_config(config, console)
    options = calibration_options(config)
    space = space_of(config)
    runtime = load_runtime(deployment.target.runtime)
    key = key_of(deployment, space)
    with calibration_lock(deployment.host_name, key, console):
        table = None if config.fresh else find_table(deployment.host_name, key)
        if table is not None:
            table.check(key, deployment.host_name, runtime.version())
        table = calibrate(deployment.target, space, runtime, options, console, table, fresh=bool(config.fresh))
    console.say(f"{table.path}: {len(table.networks)} networks")
    console.say(error_line(table, space))


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.profile`."""
    return run_command(main, "profile", USAGE, argv, paths=("space",))


if __name__ == "__main__":
    sys.exit(command())
