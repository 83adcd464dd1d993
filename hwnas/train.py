"""Command: train one network in full, and export and score it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hwnas.command import run_command
from hwnas.progress import Console

USAGE = """Train one network in full: an architecture that a search found, or a timm network by name.

    python -m hwnas.train architecture=runs/x/models/ID/architecture.yaml dataset=fashion_mnist dataset.root=/data
    python -m hwnas.train model=timm:resnet18 stem_stride=1 dataset.image_size=32 epochs=30 mixup=0.2 out=runs/mine
    python -m hwnas.train architecture=FILE teacher.model=runs/big/model.onnx teacher.alpha=0.7

The same command again resumes after the last whole epoch. --show-config prints every option."""

_PATHS = ("architecture", "model", "weights", "out", "dataset.root", "teacher.model", "teacher.weights")


def main(config: Any, console: Console) -> None:
    """Check, train (or go on), export, score; the result in one line."""
    from hwnas.latency.locks import file_lock
    from hwnas.training_job import make_job
    from hwnas.training_results import read_summary, sentence, write_results
    from hwnas.training_run import train

    job = make_job(config, console)
    folder = job.folder.path
    with file_lock(folder / ".training.lock", lambda: console.say(f"another process trains in {folder}; waiting")):
        summary = read_summary(job)
        if summary is None:
            summary = write_results(job, train(job, console), console)
    console.say(sentence(summary, folder))


def readable_overrides(argv: Sequence[str]) -> list[str]:
    """Let paths and names be taken as they are typed, though Hydra's grammar has uses for some of their characters."""
    found = []
    for text in argv:
        key, equals, value = text.partition("=")
        if key in _PATHS and value and value[0] not in "'\"" and value != "null":
            value = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        found.append(key + equals + value)
    return found


if __name__ == "__main__":
    sys.exit(run_command(main, "train", USAGE, readable_overrides(sys.argv[1:]), target=False))
