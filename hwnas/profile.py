"""Command: measure this host for a target and a search space, and store the latency table."""

from __future__ import annotations

import sys
from typing import Any

from hwnas.command import number, run_command
from hwnas.progress import Console

USAGE = """Measure this host for a target and a search space (a latency table in $HWNAS_HOME/latency_tables).

    python -m hwnas.profile +target=xeon_int8 space=mnasnet calibration.networks=100"""


def main(config: Any, console: Console) -> None:
    """Calibrate, print the held-out error and where the table lies."""
    from omegaconf import OmegaConf

    from hwnas.accuracy.data import inspect_dataset
    from hwnas.deployment import Deployment, calibration_options, error_line
    from hwnas.latency.calibrate import calibrate
    from hwnas.latency.table import TableKey, find_table
    from hwnas.runtimes import load_runtime
    from hwnas.space import SearchSpace

    deployment = Deployment.from_config(config, console)
    options = calibration_options(config)
    channels = number(config, "channels", 1, 4, whole=True, optional=True)
    classes = number(config, "classes", 2, 1_000_000, whole=True, optional=True)
    if channels is None or classes is None:
        info = inspect_dataset(OmegaConf.to_container(config.dataset, resolve=True))  # type: ignore[arg-type]
        channels, classes = channels or info.channels, classes or info.classes
    space = SearchSpace.load(config.space, channels=channels, classes=classes, image_size=config.dataset.image_size)
    runtime = load_runtime(deployment.target.runtime)
    key = TableKey.of(deployment.target, space.image_sizes, channels, classes)
    table = None if config.fresh else find_table(deployment.host_name, key)
    if table is not None:
        table.check(key, deployment.host_name, runtime.version())
    table = calibrate(deployment.target, space, runtime, options, console, table)
    console.say(f"{table.path}: {len(table.networks)} networks")
    console.say(error_line(table, space))


if __name__ == "__main__":
    sys.exit(run_command(main, "profile", USAGE))
