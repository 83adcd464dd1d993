"""The command that trains one network in full, and exports and scores it."""

from __future__ import annotations

import sys
from functools import partial
from textwrap import shorten
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config
from hwnas.cli.progress import Console, count
from hwnas.front.card import training_card
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import WorkFolder
from hwnas.tasks.task import load_task
from hwnas.training.job import make_job, read_summary, train, write_results
from hwnas.training.recipe import all_recipe, recipe_of

USAGE = """Train one network in full: an architecture that a search found, or a timm network by name.

    hwnas train run=runs/x architecture=ID dataset=fashion_mnist dataset.root=/data
    hwnas train architecture="stem16s1 ds_r1_k3_s1_c16 … head256 relu@32" dataset=… out=runs/mine
    hwnas train model=timm:resnet18 dataset.image_size=32 epochs=30 mixup=0.2 out=runs/mine
    hwnas train model=timm:mobilenetv2_100 pretrained=true pretrained.folder=/weights dataset=… out=runs/tuned

The same command again resumes after the last whole epoch. --show-config prints every option."""


def all_options(config: Config) -> dict[str, Any]:
    """Return the recipe's options that were not given; their values depend on the weights at the start."""
    return {key: value for key, value in all_recipe(recipe_of(config)).items() if config[key] is None}


def main(config: Config, console: Console) -> None:
    """Check the options, train (or continue), export and score; print the result in one line."""
    job = make_job(config, console)
    folder = job.folder.path
    with WorkFolder(folder, "train").hold("training", console.say):
        summary = read_summary(job, console) or write_results(job, train(job, console), console)
        write_atomic(job.folder.card, training_card(job, summary))
    name = shorten(summary["network"], 100, placeholder=" …")  # the name of a cut has all of its layers
    metric = load_task(job.dataset.task).metric
    console.say(f"{name}: test {metric} {summary['top1_test']:.2%} (95 %: {summary['top1_test_low']:.2%} to "
                f"{summary['top1_test_high']:.2%}) on {summary['n_test']} images, validation "
                f"{summary['top1_validation']:.2%}, {count(summary['epochs'], 'epoch')} in "
                f"{summary['seconds_training']:.0f} s: {folder}")


command = partial(run_command, main, "train", USAGE, target=False, sections=all_options)

if __name__ == "__main__":
    sys.exit(command())
