"""Joins the search in a run folder as one more worker: python -m hwnas.search.worker run=DIR

It takes the options from the folder's config.yaml, evaluates architectures until the search is done, and leaves the
verification to the search itself, which starts such workers on its own (workers=N).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import refuse_code, run_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError
from hwnas.system.processes import crew

if TYPE_CHECKING:
    from hwnas.system.run_folder import RunFolder


@contextlib.contextmanager
def extra_workers(n: int, run: RunFolder, console: Console) -> Iterator[None]:
    """`n` workers beside this process while the block runs; they end with the search, or with this process."""
    with crew([sys.executable, "-m", "hwnas.search.worker", "-q", f"run={run.path.absolute()}"], n, console.say):
        yield


def main(config: Any, console: Console) -> None:
    """Work on the search that `run` names until it is done."""
    from omegaconf import OmegaConf

    from hwnas.search.prepare import prepare, search_trials
    from hwnas.system.run_folder import RunFolder

    if not config.get("run"):
        raise ConfigError("which run folder? Add run=DIR.")
    folder = RunFolder.open(str(config.run))
    found = folder.read_config()
    refuse_code(found, f"{folder.config}: ")
    found["out"] = str(folder.path)
    search_trials(prepare(OmegaConf.create(found), console), console)


if __name__ == "__main__":
    sys.exit(run_command(main, "worker", __doc__ or "", target=False))
