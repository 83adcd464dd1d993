"""Command: how well each accuracy estimator ranks the networks of a space on a data set, and what it costs."""

from __future__ import annotations

import sys
from typing import Any

from hwnas.command import run_command
from hwnas.progress import Console

USAGE = """How well does each accuracy estimator rank here, and what does it cost? Trains n networks of a space in full
with several seeds, and holds every estimator against them.

    python -m hwnas.certify dataset=fashion_mnist dataset.root=/data space=mnasnet_small n=16 seeds=2 +target=xeon_int8
    python -m hwnas.certify dataset=imagefolder dataset.root=/data/parts 'estimators=[proxy,supernet]' only=estimators

The same command again goes on; in another terminal it helps. --show-config prints every option."""


def main(config: Any, console: Console) -> None:
    """Choose networks, train them, ask the estimators, write the certificate."""
    from hwnas.certify_options import prepare
    from hwnas.certify_truth import train_all

    job = prepare(config, console)
    if job.only != "estimators":
        train_all(job.plan, job.workers, console)


if __name__ == "__main__":
    sys.exit(run_command(main, "certify", USAGE, target=False))
