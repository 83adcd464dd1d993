"""Judges a latency table on networks it has never seen: python -m hwnas.validate +target=xeon_int8"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.options import number
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError
from hwnas.latency.judge import job_of, judge_again, measure_and_judge, out_path

if TYPE_CHECKING:
    pass


USAGE = """Predicted against measured latency, on networks never seen: half random, half from the predicted front.

    python -m hwnas.validate +target=xeon_int8 space=mnasnet n=60 seed=7 out=v.json   # and v.png
    python -m hwnas.validate +target=xeon_int8 space=mnasnet measured=v.json          # the same networks again"""


def main(config: Any, console: Console) -> None:
    """Choose, measure, compare; print the report and write it with its picture."""
    from hwnas.latency.deployment import Deployment

    measured = str(config.measured) if config.measured else ""
    out = out_path(config, measured)
    n, seed = number(config, "n", 4, 5000, whole=True), number(config, "seed", 0, 2**31, whole=True)
    n_anchors = number(config, "anchors", 0, 500, whole=True)
    seconds = float(number(config, "seconds", 1, 86_400))
    deployment = Deployment.from_config(config, console)
    if not measured and not deployment.here:
        raise ConfigError(f"host={deployment.host_name} is not this machine, and a validation measures. Give the "
                          "command over there, or judge its report here: measured=FILE.")
    if measured:
        judge_again(config, deployment, Path(measured), out, console)
    else:
        job = job_of(config, deployment, console)
        measure_and_judge(job, (n, n_anchors), seed, seconds, out, console)


if __name__ == "__main__":
    sys.exit(run_command(main, "validate", USAGE))
