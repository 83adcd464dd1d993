"""Joins the search in a run folder as one more worker: python -m hwnas.worker run=DIR

It takes the options from the folder's config.yaml, evaluates architectures until the search is done, and leaves the
verification to the search itself, which starts such workers on its own (workers=N).
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hwnas.command import refuse_code, run_command
from hwnas.errors import ConfigError
from hwnas.progress import Console

if TYPE_CHECKING:
    from hwnas.run_folder import RunFolder

_PR_SET_PDEATHSIG = 1


def main(config: Any, console: Console) -> None:
    """Work on the search that `run` names until it is done."""
    from omegaconf import OmegaConf

    from hwnas.run_folder import RunFolder
    from hwnas.search import prepare, search_trials

    if not config.get("run"):
        raise ConfigError("which run folder? Add run=DIR.")
    folder = RunFolder.open(str(config.run))
    found = folder.read_config()
    refuse_code(found, f"{folder.config}: ")
    found["out"] = str(folder.path)
    search_trials(prepare(OmegaConf.create(found), console), console)


@contextlib.contextmanager
def extra_workers(n: int, run: RunFolder, console: Console) -> Iterator[None]:
    """`n` workers beside this process while the block runs; they end with the search, or with this process."""
    command = [sys.executable, "-m", "hwnas.worker", "-q", f"run={run.path.absolute()}"]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(n)]
        workers = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    preexec_fn=_die_with_parent) for log in logs]
        try:
            yield
            for worker, log in zip(workers, logs, strict=True):
                if worker.wait() != 0:
                    log.seek(0)
                    console.say(f"a worker ended early: {(log.read().strip().splitlines() or ['no message'])[-1]}")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.send_signal(signal.SIGINT)
                    worker.wait()


def _die_with_parent() -> None:
    """Linux: a killed search takes its workers with it; their trials are taken up again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_command(main, "worker", __doc__ or "", target=False))
