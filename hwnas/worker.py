"""Joins the search in a run folder as one more worker: hwnas worker run=DIR

It takes the options from the folder's config.yaml and evaluates architectures until the search is done. The search
itself does the verification; it also starts such workers on its own (workers=N). A study outside the folder counts
only when it is named (storage=URL); dataset.root=DIR says where the images are here, pretrained.folder=DIR the weights.
"""

from __future__ import annotations

import sys
from functools import partial

from hwnas.cli.command import as_data, opened_run, refuse_code, run_command, unresolved
from hwnas.cli.options import Config, section
from hwnas.cli.progress import Console
from hwnas.errors import StudyError
from hwnas.latency.deployment import DEVICE
from hwnas.lazy import omegaconf
from hwnas.search.plan import make_plan
from hwnas.search.road import explorer_of
from hwnas.study.study import study_url
from hwnas.system.documents import load_yaml
from hwnas.system.run_folder import RunFolder


def main(config: Config, console: Console) -> None:
    """Work on the search that `run` names until it is done."""
    folder = opened_run(config)
    options = load_yaml(config["config"]) if config["config"] else _options(folder, config)
    refuse_code(options, f"{folder.config}: ")
    try:
        values = omegaconf.OmegaConf.create(as_data(options))
    except omegaconf.errors.OmegaConfBaseException as error:
        raise StudyError(f"cannot read {folder.config}: {str(error).splitlines()[0]}.") from None
    plan = make_plan(values, console, trials_only=True)
    explorer_of(plan).prepare(plan, folder, console).work(console)


def _options(folder: RunFolder, config: Config) -> Config:
    """Return the options in the folder. It may be another user's, so nothing in them is resolved. Raises
    StudyError if an option must be resolved."""
    options = {**folder.read_config(), **dict.fromkeys(DEVICE)}  # no folder says where to connect to
    options["storage"] = study_url(folder.path, options.get("storage"), config["storage"])
    if root := config["dataset"]["root"]:
        options["dataset"] = {**section(options, "dataset"), "root": root}
    if weights := config["pretrained"]["folder"]:
        options["pretrained"] = {**section(options, "pretrained"), "folder": weights}
    if device := config["training"]["device"]:
        options["training"] = {**section(options, "training"), "device": device}
    if keys := [*unresolved(options, "")]:
        step = "Add dataset.root=DIR." if keys == ["dataset.root"] else \
            "Give the command of the search instead: it joins as a worker."
        raise StudyError(f"{folder.config} has {', '.join(keys[:4])} as typed, and nothing in a folder is resolved. "
                         f"{step}")
    return options


command = partial(run_command, main, "worker", __doc__ or "", target=False)

if __name__ == "__main__":
    sys.exit(command())
