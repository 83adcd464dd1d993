"""The main job: find, train, quantise and verify networks for a target.

hwnas search target=xeon_int8
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, section
from hwnas.cli.progress import Console
from hwnas.errors import WorkerError

# Slow imports are inside the functions, so that --help and a wrong option are answered at once.

USAGE = """Search, train, quantise and verify networks for a target. Results are in out=FOLDER
(default runs/<target>-<space>-<dataset>).

    hwnas search target=xeon_int8
    hwnas search target=xeon_int8 dataset=imagefolder dataset.root=/data/parts space=mnasnet \\
        budget.latency_ms=2.5 n_trials=200
    hwnas search target=xeon_int8 dataset=imagefolder dataset.root=/data/parts budget.minutes=60 \\
        around=tf_efficientnet_lite0 pretrained.folder=/weights

The same command again resumes; in another terminal it joins as a worker. --show-config prints every option."""


def all_options(config: Any) -> dict[str, dict[str, Any]]:
    """Return every option, by dotted key, of the sections that hold only the user's in `config`."""
    from hwnas.accuracy import proxy
    from hwnas.samplers.loading import default_options
    from hwnas.training.recipe import FULL_TRAINING, Recipe, all_recipe

    recipe = all_recipe(Recipe.from_config(section(config.finalists, "recipe"), FULL_TRAINING, "finalists.recipe"))
    short = proxy.all_options(section(config, "proxy"))
    return {"proxy": {**short, **_whole(config, config.proxy, short)},
            "finalists.recipe": {**recipe, **_whole(config, config.finalists.recipe, recipe)},
            "sampler_options": default_options(str(config.sampler))}


def _whole(config: Any, given: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `options` of a section that the search has too, with the values of `given`, else of the search."""
    whole = {"threads": config.threads, **config.training}
    return {key: given.get(key, value) for key, value in whole.items() if key in options}


def main(config: Config, console: Console) -> None:
    """Search, and print the result. Raises Unfinished if networks were not verified, WorkerError if a worker failed."""
    _check_names(config)
    from hwnas.front.pairs import load_pairs
    from hwnas.front.verification import check_verified, summary_lines
    from hwnas.search.road import search

    result = search(config, console)
    pairs = load_pairs(result.run) if result.rows else []  # there are none if another process verifies
    for line in summary_lines(result.rows, result.comparisons, pairs, result.run.report):
        console.say(line)
    if result.at_hand:
        check_verified(result.rows, result.run)
    if result.early:
        raise WorkerError(result.early)


def _check_names(config: Config) -> None:
    """Raise UnknownName for a misspelt name, before the search and its imports, which take seconds."""
    from hwnas.accuracy.estimator import check_estimator
    from hwnas.samplers.loading import check_sampler
    from hwnas.space.search_space import find_space

    if config.get("around") is None:
        find_space(str(config["space"]))
    if config.get("accuracy") is not None:
        check_estimator(str(config["accuracy"]), "race")
    check_sampler(str(config["sampler"]))


command = partial(run_command, main, "search", USAGE, sections=all_options)

if __name__ == "__main__":
    sys.exit(command())
