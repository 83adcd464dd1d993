"""Command: make an int8 file of a network that loses no more accuracy than allowed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hwnas.cli.command import run_command
from hwnas.cli.options import Config
from hwnas.cli.progress import Console, show
from hwnas.compress.compression import printed, sentence, taken, timed, write_results
from hwnas.compress.job import check_folder, make_job
from hwnas.compress.steps import Steps
from hwnas.system.run_folder import WorkFolder

USAGE = """int8 under an accuracy limit: quantise, leave sensitive nodes in fp32, fine-tune, as far as it takes.

    hwnas compress model=runs/x/models/ID target=xeon_int8 dataset=fashion_mnist dataset.root=/data
    hwnas compress model=runs/mine target=ort_int8 max_drop=0.2 all=true out=runs/mine-int8
    hwnas compress model=network.onnx target=xeon_int8 dataset=imagefolder dataset.root=/images

Validation images decide; the file chosen is then asked about the test images once. The same command again goes on
after the last finished step. --show-config prints every option."""


def main(config: Config, console: Console) -> None:
    """Check, take the steps (or go on), time them, write; the result in one line, also where the limit is not kept."""
    job = make_job(config, console)
    with WorkFolder(job.folder.path, "compress").hold("compress", console.say):
        check_folder(job)
        steps = Steps(job, console)
        finished = taken(steps)
        summary = write_results(steps, finished, timed(steps, finished))
    for text in printed(summary["steps"]):
        show(text)
    console.say(sentence(summary, job))


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas compress`."""
    return run_command(main, "compress", USAGE, argv, apart=("model", "target"))


if __name__ == "__main__":
    sys.exit(command())
