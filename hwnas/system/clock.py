"""The deadlines that processes share, also when a clock is set, and the time that a run has taken."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hwnas.errors import BudgetError, DataError, UserError
from hwnas.system.paths import write_atomic
from hwnas.system.processes import machine_name

NOTE_EVERY_S = 10.0  # between two notes of the time that a run has taken: a kill loses no more


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment in the future, which is stored and read by other processes.

    A process of the same machine and boot uses the clock that never goes back (`at_s`, of time.monotonic). A process
    of another machine, or after a restart, uses the wall clock (`unix_s`).
    """

    machine: str
    at_s: float
    unix_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the moment that is `seconds` from now."""
        return cls(machine_name(), time.monotonic() + seconds, time.time() + seconds)

    @property
    def left_s(self) -> float:
        """The seconds until the moment; below 0 after it."""
        return self.at_s - time.monotonic() if self.machine == machine_name() else self.unix_s - time.time()

    @classmethod
    def of(cls, values: object) -> Deadline | None:
        """Return the deadline of which `asdict` made `values`, for a study or a file; None if it is no mapping."""
        if not isinstance(values, Mapping):
            return None
        return cls(str(values["machine"]), float(values["at_s"]), float(values["unix_s"]))


def read_spent_s(path: Path) -> float:
    """Return the seconds that earlier commands took, from a file of `spending`; 0 if there is none, or a torn one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return max(0.0, float(json.loads(path.read_text())["seconds"]))
    return 0.0


@contextmanager
def spending(path: Path, began_s: float) -> Iterator[None]:
    """Keep in a file, during the block, the seconds that all commands which wrote to it have taken. A command that
    ends in a BudgetError or DataError has done nothing that another one could continue: its seconds do not count.

    Args:
        path: The file; the seconds in it count as spent before.
        began_s: The start of this command, by time.monotonic.
    """
    before_s, is_over, is_refused = read_spent_s(path), threading.Event(), False

    def note() -> None:
        seconds = before_s + (0.0 if is_refused else time.monotonic() - began_s)
        with suppress(UserError):  # a full disk: the writers of results report it
            write_atomic(path, json.dumps({"seconds": round(seconds, 1)}))

    def keep() -> None:
        while not is_over.wait(NOTE_EVERY_S):
            note()

    # A thread stores the time every NOTE_EVERY_S, so that a kill loses little.
    note()
    thread = threading.Thread(target=keep, name="spent", daemon=True)
    thread.start()
    try:
        yield
    except (BudgetError, DataError):
        is_refused = True
        raise
    finally:
        is_over.set()
        thread.join()
        note()
