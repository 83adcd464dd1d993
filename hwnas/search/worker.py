"""Joins the search in a run folder as one more worker: python -m hwnas.search.worker run=DIR

It takes the options from the folder's config.yaml, evaluates architectures until the search is done, and leaves the
verification to the search itself, which starts such workers on its own (workers=N).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hwnas.cli.command import as_data, opened_run, refuse_code, run_command
from hwnas.cli.options import Config
from hwnas.cli.progress import Console


def main(config: Config, console: Console) -> None:
    """Work on the search that `run` names until it is done."""
    from omegaconf import OmegaConf

    from hwnas.search.road import make_plan, prepare, search_trials

    folder = opened_run(config)
    options = folder.read_config()
    refuse_code(options, f"{folder.config}: ")
    plan = make_plan(OmegaConf.create(as_data(options)), console)
    search_trials(prepare(plan, folder, console), console)


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.search.worker`."""
    return run_command(main, "worker", __doc__ or "", argv, target=False)


if __name__ == "__main__":
    sys.exit(command())
