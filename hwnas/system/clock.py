"""Deadlines between processes that no clock which is set back or forth moves, and the time that a run has taken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hwnas.errors import BudgetError, UserError
from hwnas.system.paths import write_atomic
from hwnas.system.processes import machine_name

NOTE_EVERY_S = 10.0  # of the time that a run has taken: so much a kill may lose


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment to come, which is stored and read by other processes.

    Those of the same machine and boot go by the clock that only runs forth (`at_s`, of time.monotonic). Others, and
    those after a restart, go by the clock on the wall (`unix_s`).
    """

    machine: str
    at_s: float
    unix_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the moment in so many seconds."""
        return cls(machine_name(), time.monotonic() + seconds, time.time() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; below 0 after it."""
        return self.at_s - time.monotonic() if self.machine == machine_name() else self.unix_s - time.time()

    @classmethod
    def of(cls, values: object) -> Deadline | None:
        """Read what `asdict` makes of a deadline, for a study or a file; None for anything else."""
        if not isinstance(values, Mapping):
            return None
        return cls(str(values["machine"]), float(values["at_s"]), float(values["unix_s"]))


def read_spent_s(path: Path) -> float:
    """Return the seconds that earlier commands took, as a file of `spending` says; 0 for no file, or a torn one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return max(0.0, float(json.loads(path.read_text())["seconds"]))
    return 0.0


@contextmanager
def spending(path: Path, began_s: float) -> Iterator[None]:
    """Keep in a file, during the block, how many seconds all commands have taken that wrote to it. One that ends in a
    BudgetError has done nothing that another one goes on with, so its seconds do not count.

    Args:
        path: The file; what it holds counts as spent before.
        began_s: When this command began, of time.monotonic.
    """
    before_s, over, refused = read_spent_s(path), threading.Event(), False

    def note() -> None:
        seconds = before_s + (0.0 if refused else time.monotonic() - began_s)
        with suppress(UserError):  # a full disk: who writes what matters says so
            write_atomic(path, json.dumps({"seconds": round(seconds, 1)}))

    def keep() -> None:
        while not over.wait(NOTE_EVERY_S):
            note()

    note()
    thread = threading.Thread(target=keep, name="spent", daemon=True)
    thread.start()
    try:
        yield
    except BudgetError:
        refused = True
        raise
    finally:
        over.set()
        thread.join()
        note()
