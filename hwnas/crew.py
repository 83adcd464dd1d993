"""Workers that a search starts beside itself; they end with it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence

_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def crew(command: Sequence[str], n: int, say: Callable[[str], None]) -> Iterator[None]:
    """`n` processes of `command` while the block runs, waited for at its end.

    `say` is told the last line of one that fails.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(n)]
        workers = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                    preexec_fn=_die_with_parent) for log in logs]
        try:
            yield
            for worker, log in zip(workers, logs, strict=True):
                if worker.wait() != 0:
                    log.seek(0)
                    say(f"a worker ended early: {(log.read().strip().splitlines() or ['no message'])[-1]}")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.send_signal(signal.SIGINT)
                    worker.wait()


def _die_with_parent() -> None:
    """Linux: a killed search takes its workers with it; their trials are taken up again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
