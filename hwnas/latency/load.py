"""Throughput: several requests in flight at once, each from a thread of its own, over repeated windows of time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.latency.harness import Call, Progress, stolen_seconds, throttle_count, time_calls, undisturbed
from hwnas.latency.measurement import Measurement, Protocol, Turn, robust_error
from hwnas.target import measuring_lock, usable_cores

LEAST_WINDOW_S, CALLS_A_WINDOW = 1.0, 20  # a window is long enough for this many calls of each thread
MIN_WINDOWS, MAX_WINDOWS = 8, 40
_REFERENCE_TURNS = 5
_BUSY = (1, 2, 3, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq
_ROUNDED_S = 0.02  # two ticks of /proc/stat, at the window's ends


@dataclass(frozen=True)
class Throughput:
    """Windows of one network under load: images/s of each, and the calls in it as turns of a measurement.

    `images_per_s` is the median over windows beside which the machine was quiet.
    """

    rates: tuple[float, ...]
    windows: Measurement

    @cached_property
    def values(self) -> np.ndarray:
        """Images/s of the good windows."""
        return np.array(self.rates)[self.windows.good] if self.rates else np.empty(0)

    @property
    def images_per_s(self) -> float:
        """The estimate; NaN when INVALID."""
        return float(np.median(self.values)) if self.windows.valid else float("nan")

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval, as a share of the estimate."""
        from scipy.stats import t

        if not self.windows.valid:
            return float("inf")
        return float(t.ppf(0.95, len(self.values) - 1)) * robust_error(self.values) / self.images_per_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values, raw samples among them."""
        return {"images_per_s_windows": [round(rate, 3) for rate in self.rates], "windows": self.windows.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], protocol: Protocol) -> Throughput:
        """Inverse of `to_dict`."""
        return cls(tuple(data["images_per_s_windows"]), Measurement.from_dict(data["windows"], protocol, "windows"))


def measure_load(calls: Sequence[Call], images: int, cores: int, reference: Call, protocol: Protocol, *,
                 quiet_ms: float | None, progress: Progress) -> Throughput:
    """Run `calls` (each of `images` images) side by side, one thread each, in windows until the interval is narrow.

    The process keeps to `cores` cores. The reference is timed alone before and after every window; `quiet_ms` is its
    quiet time of an earlier run. Within a window other processes can come and go unseen by the reference. What they ran
    on these cores meanwhile counts as stolen. `protocol.max_seconds` caps the time.
    """
    typical_s = float(np.median(time_calls(calls[0], 5))) / 1e3
    window_s = max(LEAST_WINDOW_S, CALLS_A_WINDOW * typical_s * len(calls))
    turns: list[Turn] = []
    rates: list[float] = []

    def queued(who: str) -> None:
        progress(0.0, f"waiting for another measurement on this host: {who}")

    with measuring_lock(usable_cores(), queued), undisturbed(cores):
        clocked = _Reference(reference, protocol)
        _window(calls, min(window_s, 1.0))  # warm-up, thrown away
        deadline, before = time.monotonic() + protocol.max_seconds, clocked.time()
        pinned = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(usable_cores())
        while True:
            lost, hot, clock = _lost_seconds(pinned), throttle_count(), time.monotonic()
            samples, rate = _window(calls, window_s)
            lost = max(0.0, _lost_seconds(pinned) - lost - _ROUNDED_S * len(pinned))
            stolen = lost / ((time.monotonic() - clock) * len(pinned))
            after = clocked.time()
            turns.append(Turn(samples, max(before, after), stolen, throttle_count() > hot))
            rates.append(images * rate)
            throughput = Throughput(tuple(rates), Measurement(tuple(turns), clocked.quiet(quiet_ms), protocol))
            good, before = len(throughput.values), after
            done = good >= MIN_WINDOWS and (throughput.half_width <= protocol.half_width or good >= MAX_WINDOWS)
            left = deadline - time.monotonic()
            progress(1.0 if done else max(0.0, 1 - left / protocol.max_seconds), f"window {len(turns)}, {good} quiet")
            if done or left < window_s:
                return throughput


def _lost_seconds(cores: Collection[int]) -> float:
    """Time on `cores` since boot that was not this process's: stolen by the hypervisor or run by others."""
    ran = _busy_seconds(cores)
    return stolen_seconds(cores) + (0.0 if ran is None else ran - time.process_time())


def _busy_seconds(cores: Collection[int]) -> float | None:
    """Time since boot that `cores` were not idle, to a hundredth (None where /proc does not say)."""
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        ticks = sum(int(line[field]) for line in lines if line and line[0] in names for field in _BUSY)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


class _Reference:
    """The reference network's turns in this run."""

    def __init__(self, call: Call, protocol: Protocol) -> None:
        self._call, self._protocol = call, protocol
        typical = float(np.median(time_calls(call, protocol.warmup_calls)))
        self._calls = int(np.clip(protocol.round_ms / typical, protocol.min_calls, protocol.max_calls))
        self._turns_ms: list[float] = []
        for _ in range(5):
            self.time()

    def time(self) -> float:
        """Its low quantile now, over several turns: it stands for the whole window beside it."""
        self._call()  # brings its weights back into the caches; thrown away
        value = float(np.quantile(time_calls(self._call, _REFERENCE_TURNS * self._calls), self._protocol.quantile))
        self._turns_ms.append(value)
        return value

    def quiet(self, stored_ms: float | None) -> float:
        """As in the harness: a low quantile of this run's turns, or the stored time where that is far lower."""
        quiet = float(np.quantile(self._turns_ms, 0.2))
        far = stored_ms is not None and quiet > stored_ms * (1 + self._protocol.run_drift)
        return stored_ms if far and stored_ms is not None else quiet


def _window(calls: Sequence[Call], seconds: float) -> tuple[tuple[float, ...], float]:
    """Times of all calls in ms, and calls a second, with every one of `calls` repeated in its own thread."""
    samples: list[list[float]] = [[] for _ in calls]
    rates = [0.0] * len(calls)
    failures: list[Exception] = []
    start_line = threading.Barrier(len(calls))

    def work(index: int, call: Callable[[], None]) -> None:
        clock, mine = time.perf_counter_ns, samples[index]
        try:
            call()
            start_line.wait()
            start = last = clock()
            end = start + int(seconds * 1e9)
            while last < end:
                call()
                now = clock()
                mine.append((now - last) / 1e6)
                last = now
            rates[index] = len(mine) / ((last - start) / 1e9)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:  # handed to the thread that asked
            failures.append(error)
            start_line.abort()

    threads = [threading.Thread(target=work, args=entry, daemon=True) for entry in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return tuple(ms for part in samples for ms in part), sum(rates)
