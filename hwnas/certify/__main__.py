"""Command: how well each accuracy estimator ranks the networks of a space on a data set, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console

if TYPE_CHECKING:
    from hwnas.certify.job import CertifyJob
    from hwnas.data.dataset import Dataset

USAGE = """How well does each accuracy estimator rank here, and what does it cost? Trains n networks of a space in full
with several seeds, and holds every estimator against them.

    python -m hwnas.certify dataset=fashion_mnist dataset.root=/data space=mnasnet_small n=16 seeds=2 +target=xeon_int8
    python -m hwnas.certify dataset=imagefolder dataset.root=/data/parts 'estimators=[proxy,supernet]' only=estimators

The same command again goes on; in another terminal it helps. --show-config prints every option."""


def main(config: Any, console: Console) -> None:
    """Choose networks, train them, ask the estimators, write the certificate."""
    from hwnas.certify.estimates import check_estimators
    from hwnas.certify.job import prepare
    from hwnas.certify.truth import train_all

    job = prepare(config, console)
    if job.only is None:  # hours before they are asked
        check_estimators(job.plan, job.judged, _images(job, console), job.space)
    if job.only != "estimators":
        train_all(job.plan, job.workers, console)
    if job.only != "truth":
        judge(job, console)


def all_options(config: Any) -> dict[str, dict[str, Any]]:
    """Every option of the section that holds just what was given."""
    from hwnas.certify.plan import all_training
    from hwnas.cli.options import section

    return {"training": all_training(section(config, "training"))}


def judge(job: CertifyJob, console: Console) -> None:
    """Ask every estimator, and write what came of it and of those that were asked before."""
    from hwnas.certify.estimates import estimate_all, judged_before
    from hwnas.certify.results import write_certificate

    dataset = _images(job, console)
    estimate_all(job.plan, job.judged, job.estimator_seeds, dataset, job.space, console)
    judged = [*job.judged, *judged_before(job.plan, job.judged, dataset, job.space, console)]
    write_certificate(job.plan, judged, dataset, job.space, console)


def _images(job: CertifyJob, console: Console) -> Dataset:
    from hwnas.data.loading import load_dataset

    with console.step("read images") as report:
        return load_dataset(job.plan.dataset, max(job.space.image_sizes), job.plan.seed,
                            lambda done, total: report(done / max(total, 1)))


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.certify`."""
    return run_command(main, "certify", USAGE, argv, target=False, paths=("space",), apart=("space", "dataset"),
                       sections=all_options)


if __name__ == "__main__":
    sys.exit(command())
