"""Seat: the cores that a measurement runs on. The quietest are taken, and left when another process comes and stays."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hwnas.system.cores import allowed_cores, busy_seconds, busy_shares, choose_cores

LOOK_EVERY_S = 1.0  # a hundred ticks of /proc/stat
SHARED = 0.15  # share of a core that others may have: a busy process takes half of it
PATIENCE = 2  # looks in a row at which a core must be shared before it is left
WORTH_MOVING = 0.5  # others must have at most this share there of what they have here


class Seat:
    """The cores of this process' threads, out of those that it may run on. `look` moves it if others share them."""

    def __init__(self, threads: int) -> None:
        self.threads, self.allowed = threads, allowed_cores()
        self.can_choose = 0 < threads < len(self.allowed)
        self.cores = choose_cores(threads, busy_shares(self.allowed) if self.can_choose else {}, self.allowed)
        self._shared = 0  # looks in a row at which the cores were shared
        self._start_look()

    def pin(self) -> None:
        """Keep every thread of this process to the seat's cores."""
        for task in _tasks():
            _pin(task, self.cores)

    def look(self) -> bool:
        """Move if others came to these cores and stay; do nothing within LOOK_EVERY_S. Return whether it moved."""
        took = time.monotonic() - self._looked_s
        if not self.can_choose or took < LOOK_EVERY_S:
            return False
        before, ran = self._busy, time.process_time() - self._ran_s
        self._start_look()
        others = {core: (busy - before.get(core, busy)) / took for core, busy in self._busy.items()}
        here = max(0.0, sum(others.get(core, 0.0) for core in self.cores) - ran / took) / len(self.cores)
        self._shared = self._shared + 1 if here > SHARED else 0
        if self._shared < PATIENCE:
            return False
        self._shared = 0
        others |= dict.fromkeys(self.cores, here)
        chosen = choose_cores(self.threads, others, self.allowed)
        if sum(others.get(core, 1.0) for core in chosen) > WORTH_MOVING * here * len(chosen):
            return False
        self.cores = chosen
        self.pin()
        return True

    def _start_look(self) -> None:
        self._looked_s, self._ran_s = time.monotonic(), time.process_time()
        self._busy = busy_seconds(self.allowed)


@contextmanager
def seated(threads: int = 1) -> Iterator[Seat]:
    """Keep every thread of this process to the quietest cores, and hold the garbage collector back.

    0 threads take as many cores as this process may use.
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
    """Threads of this process: runtimes keep their own, which do not follow the calling thread's affinity."""
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def _pin(task: int, cores: Collection[int]) -> None:
    with suppress(OSError):  # a thread may have ended meanwhile, or a core been taken away: the kernel finds another
        os.sched_setaffinity(task, cores)
