"""Seat: the cores on which a measurement runs. It takes the quietest, and leaves them if another process stays."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hwnas.system.cores import allowed_cores, busy_seconds, busy_shares, choose_cores, describe_cores

LOOK_EVERY_S = 1.0  # a hundred ticks of /proc/stat
SHARED = 0.15  # most of a core that others may use: a busy process takes half of it
PATIENCE = 2  # looks in a row at which a core must be shared before it is left
WORTH_MOVING = 0.5  # it moves if others use at most this share there of what they use here


class Seat:
    """The cores of this process' threads, among the cores that it may run on. `look` moves it if others share them."""

    def __init__(self, threads: int) -> None:
        self.threads, self.allowed = threads, allowed_cores()
        self.can_choose = 0 < threads < len(self.allowed)
        self.cores = choose_cores(threads, busy_shares(self.allowed) if self.can_choose else {}, self.allowed)
        self.words = describe_cores(self.cores, self.allowed)
        self._shared = 0  # looks in a row at which the cores were shared
        self._start_look()

    def pin(self) -> None:
        """Keep every thread of this process to the seat's cores."""
        for task in _tasks():
            _pin(task, self.cores)

    def look(self) -> bool:
        """Move if others came to these cores and stay, and return whether it moved. Within LOOK_EVERY_S do nothing."""
        passed_s = time.monotonic() - self._looked_s
        if not self.can_choose or passed_s < LOOK_EVERY_S:
            return False
        before, ran = self._busy, time.process_time() - self._ran_s
        self._start_look()
        # Seconds a second that each core was busy; on the own cores this process' time is no work of others.
        others = {core: (busy - before.get(core, busy)) / passed_s for core, busy in self._busy.items()}
        here = max(0.0, sum(others.get(core, 0.0) for core in self.cores) - ran / passed_s) / len(self.cores)
        self._shared = self._shared + 1 if here > SHARED else 0
        if self._shared < PATIENCE:
            return False
        # They are shared for the PATIENCE-th time. Move only if other cores are much quieter.
        self._shared = 0
        others |= dict.fromkeys(self.cores, here)
        chosen = choose_cores(self.threads, others, self.allowed)
        if sum(others.get(core, 1.0) for core in chosen) > WORTH_MOVING * here * len(chosen):
            return False
        self.cores, self.words = chosen, describe_cores(chosen, self.allowed)
        self.pin()
        return True

    def _start_look(self) -> None:
        self._looked_s, self._ran_s = time.monotonic(), time.process_time()
        self._busy = busy_seconds(self.allowed)


@contextmanager
def seated(threads: int = 1) -> Iterator[Seat]:
    """Keep every thread of this process to the quietest cores, and switch the garbage collector off.

    With `threads` 0 it takes as many cores as this process may use.
    """
    before = {task: os.sched_getaffinity(task) for task in _tasks()}
    collecting, seat = gc.isenabled(), Seat(threads)
    gc.collect()
    gc.disable()
    try:
        seat.pin()
        yield seat
    finally:
        for task in _tasks():
            _pin(task, before.get(task, seat.allowed))
        if collecting:
            gc.enable()


def _tasks() -> list[int]:
    """List the threads of this process: a runtime's own threads do not follow the calling thread's affinity."""
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def _pin(task: int, cores: Collection[int]) -> None:
    with suppress(OSError):  # a thread may have ended, or a core may be gone: then the kernel finds another
        os.sched_setaffinity(task, cores)
