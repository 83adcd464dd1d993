"""Time that passes only where a test lets it, so that what is measured depends on no machine."""

from __future__ import annotations

import threading
from collections.abc import Callable


class VirtualClock:
    """Stands in for the module `time`. Every thread has a time of its own, as if it had a core of its own."""

    def __init__(self) -> None:
        self._own, self._lock, self._latest, self._lost_ns = threading.local(), threading.Lock(), 0, 0
        self.reading_ns = 0  # what it takes to look at the clock; a busy-wait would never end without it

    def advance(self, ms: float) -> None:
        """Let `ms` pass for this thread, in which it runs."""
        self._pass(round(ms * 1e6))

    def lose(self, ms: float) -> None:
        """Let `ms` pass in which another process has the core."""
        self._lost_ns += round(ms * 1e6)
        self.advance(ms)

    def call(self, ms: float) -> Callable[[], None]:
        """A call that takes exactly `ms`."""
        return lambda: self.advance(ms)

    def _pass(self, ns: int) -> int:
        with self._lock:
            self._own.ns = getattr(self._own, "ns", self._latest) + ns
            self._latest = max(self._latest, self._own.ns)
            return self._own.ns

    def perf_counter_ns(self) -> int:
        return self._pass(self.reading_ns)

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9

    def monotonic(self) -> float:
        """The latest time of any thread: one that waited for others has their time."""
        self._own.ns = self._latest
        return self._latest / 1e9

    def process_time_ns(self) -> int:
        return self._latest - self._lost_ns

    def sleep(self, seconds: float) -> None:
        self.lose(1e3 * seconds)
