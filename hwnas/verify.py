"""Scores and times the finalists of a run, here or on a device: hwnas verify run=DIR

Completes the front of a search that was made elsewhere, or times a front again. Everything it needs is in the run
folder and the data set: dataset.root=DIR says where the images are here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hwnas.cli.command import opened_run, run_command, unresolved
from hwnas.cli.options import Config, option, read_command, read_value
from hwnas.cli.progress import Console
from hwnas.data.loading import load_dataset
from hwnas.errors import DataError, StudyError, UnknownName
from hwnas.front.make import BuildSettings
from hwnas.front.rows import load_front, with_networks
from hwnas.front.score import Timing
from hwnas.front.verification import check_verified, summary_lines, verify_front, write_results
from hwnas.latency.deployment import DeviceOptions, open_device
from hwnas.latency.timing import Device
from hwnas.networks.network import Shape
from hwnas.space.architecture import Architecture
from hwnas.study.objective import read_objective
from hwnas.system.run_folder import RunFolder
from hwnas.target import read_targets, target_named
from hwnas.training.recipe import FULL_TRAINING, Recipe


@dataclass(frozen=True)
class VerifyOptions(DeviceOptions):
    """The options of `conf/verify.yaml` beside the run folder."""

    host: str | None
    dataset: dict[str, Any] = option()
    verification: dict[str, Any] = option()
    memory_mb: int = option(2048, low=1)


def run(config: Config, console: Console) -> None:
    """Run the command: `run` names the folder, `host` accepts another machine than the one of the search.

    `dataset` has the options that differ here (its root), `verification.seconds` the most seconds of timing (null: as
    before), `memory_mb` the memory for opening one file.
    """
    options, folder = read_command(VerifyOptions, config), opened_run(config)
    if strange := [key for key in options.verification if key != "seconds"]:
        raise UnknownName("key of verification", strange[0], ["seconds"])
    seconds = read_value(options.verification.get("seconds"), float | None, "verification.seconds", low=1, high=86_400)
    with folder.hold("results", console.say):
        device = open_device(options, console)
        rows = load_front(folder)
        folder.read_trials()  # an unreadable file is refused before anything is measured, not by the report
        environment = folder.read_environment()
        device = device.for_target(read_targets(environment["target"])[0])
        check_host(environment, options.host, device.host.name)
        for target in {target_named(environment["target"], row.target) for row in rows}:
            device.runtime(target.runtime).check(target)  # not after the images are read
        search = folder.read_config()
        making = making_of(folder, search, environment, options.dataset)
        data = making.dataset
        rows = with_networks(rows, folder, Shape(data.channels, data.image_size, len(data.class_names)))
        results = verify_front(
            rows, folder, making, timing_of(environment, seconds, device),
            read_objective(search["objective"], making.target), environment, console, options.memory_mb)
        write_results(folder, results, making)
    for line in summary_lines(results.rows, [asdict(each) for each in results.comparisons], results.pairs,
                              folder.report):
        console.say(line)
    n_verified = sum(row.verified for row in results.rows)
    console.say(f"{n_verified} of {len(results.rows)} networks verified on {device.host.name}.")
    check_verified(results.rows, folder)


def check_host(environment: Mapping[str, Any], accepted: str | None, here: str) -> None:
    """Raise StudyError if `here`, the machine to verify on, is neither the machine of the search nor `accepted`."""
    host = environment.get("searched_for")
    if here not in (host, accepted):
        raise StudyError(f"the search was for {host}; this is {here}. Give the command there, or device=user@host to "
                         f"reach it over ssh, or add host={here} to verify on this machine: latencies were predicted "
                         "for the other.")


def making_of(folder: RunFolder, config: Config, environment: Mapping[str, Any],
              overrides: Mapping[str, Any]) -> BuildSettings:
    """Return data set, recipe and targets of the run. Raises DataError if the data here are not the search's data."""
    if any(not isinstance(config.get(key), dict) for key in ("dataset", "objective")) or type(
            config.get("seed")) is not int or config["seed"] < 0:
        raise StudyError(f"{folder.config} lacks dataset, objective or seed: was it written by hwnas.search?")
    changes = {key: value for key, value in overrides.items() if value is not None}
    if keys := [*unresolved({**config["dataset"], **changes}, "dataset")]:
        raise StudyError(f"{folder.config}: {', '.join(keys[:4])} as it was typed, and nothing in a folder is "
                         "resolved. Add dataset.root=DIR.")
    stored_dataset = environment["dataset"]
    dataset = load_dataset({**config["dataset"], **changes}, stored_dataset["image_size"], config["seed"])
    if dataset.fingerprint != stored_dataset["fingerprint"]:
        raise DataError(f"the data set {dataset.name} here has fingerprint {dataset.fingerprint}, the finalists were "
                        f"trained on {stored_dataset['fingerprint']}. Point dataset.root at the same images.")
    # This machine may lack the GPU and the bf16 of the training. Neither is checked: the recipe is only for the cards.
    recipe_values = {name: value for name, value in environment["recipe"].items()
                     if hasattr(FULL_TRAINING, name) and name != "device"}
    precision = {"precision": recipe_values.pop("precision")} if "precision" in recipe_values else {}
    recipe = replace(Recipe.from_config(recipe_values, FULL_TRAINING, "environment.json: recipe"), **precision)
    targets = read_targets(environment["target"])
    return BuildSettings(dataset, recipe, config["seed"], targets[0], targets=targets if len(targets) > 1 else ())


def timing_of(environment: Mapping[str, Any], seconds: float | None, device: Device) -> Timing:
    """Return the run's settings for timing networks, with `seconds` in place of its own unless None."""
    measuring = environment["measuring"]
    return Timing(Architecture.from_dict(measuring["reference"], "environment.json: reference"),
                  measuring["seconds"] if seconds is None else seconds, measuring["seed"], device)


command = partial(run_command, run, "verify", __doc__ or "", target=False)

if __name__ == "__main__":
    sys.exit(command())
