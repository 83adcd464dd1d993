"""Roofs: what this machine can do at most, in arithmetic and in moving bytes, and which of them bounds an operator.

Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures (CACM 2009). A data sheet
would promise what no network gets: here the peak is that of the quickest of a few large dense networks. Bandwidth is
that of copying arrays, counted as STREAM counts: what is read and written.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from timeit import timeit

import numpy as np

from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.seat import seated
from hwnas.latency.timing import prepare_untrained, reference_network, time_files
from hwnas.lazy import nn
from hwnas.runtimes.runtime import threads_of
from hwnas.system.cores import allowed_cores, text_of, whole_number
from hwnas.system.paths import temporary_folder
from hwnas.target import Target, measuring_lock

OVERHEAD_SHARE = 0.1  # of what the roofs allow: below that, something else than the two roofs limits an operator
MEMORY, ARITHMETIC, OVERHEAD = "memory", "arithmetic", "overhead"
DENSE = ((1, 256, 28, 8), (1, 512, 14, 8), (3, 128, 28, 4), (3, 256, 14, 4))  # kernel, channels, map in px, layers
CACHE_BYTES = 1 << 20  # a core's own cache, if the host does not say
MEMORY_BYTES = 256 << 20  # each of the two arrays
REPEATS, LEAST_S = 40, 2e-3  # a shorter repeat would time the call
PEAK_S = 6.0  # of timing dense networks, at most


@dataclass(frozen=True)
class Roofs:
    """Arithmetic in GFLOP/s; bytes read and written, in 1e9 a second, in a core's own cache and beyond it."""

    peak: float
    cache: float
    memory: float
    cache_bytes: int

    def bound(self, flops: float, moved_bytes: float, ms: float) -> str:
        """Return what bounds an operator that took `ms`: MEMORY, ARITHMETIC or OVERHEAD."""
        speed = self.cache if moved_bytes <= self.cache_bytes else self.memory
        intensity = flops / max(moved_bytes, 1.0)
        least_ms = 1e-6 * max(flops / self.peak, moved_bytes / speed)
        if least_ms < OVERHEAD_SHARE * ms:
            return OVERHEAD
        return MEMORY if intensity < self.peak / speed else ARITHMETIC


def measure_roofs(target: Target) -> Roofs | None:
    """Measure this machine as `target` uses it; None if no dense network could be timed."""
    threads, reach = threads_of(target), cache_bytes()
    with measuring_lock(allowed_cores()), seated(threads):
        cache, memory = copy_speed(reach // 4, threads), copy_speed(MEMORY_BYTES // threads, threads)
    peak = _measure_peak(target)
    return None if peak is None else Roofs(peak, cache, memory, reach)


def _measure_peak(target: Target) -> float | None:
    """Return the most GFLOP/s of dense networks."""
    files, macs = {}, {}
    with temporary_folder() as folder:
        for kernel, channels, px, layers in DENSE:
            name, shape = f"{kernel} {channels} {px}", (channels, px, px)
            parts = [part for _ in range(layers)
                     for part in (nn.Conv2d(channels, channels, kernel, padding=kernel // 2), nn.ReLU())]
            network = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            path = prepare_untrained(network, f"{kernel:04x}{channels:04x}", shape, target, Path(folder))
            files[name], macs[name] = TimedFile(path, target, shape), layers * (kernel * channels * px) ** 2
        measured = time_files(files, target, reference_network(),
                              Protocol(min_calls=5, copies=1, max_seconds=PEAK_S))
    reached = [2e-6 * macs[name] * target.batch / each.latency_ms for name, each in measured.items() if each.valid]
    return max(reached, default=None)


def cache_bytes() -> int:
    """Return the size of a core's second cache as the host reports it (a virtual machine may report any), or
    CACHE_BYTES."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if text_of(index / "level") == "2" and (size_kb := whole_number(text_of(index / "size").removesuffix("K"))):
            return size_kb << 10
    return CACHE_BYTES


def copy_speed(array_bytes: int, threads: int) -> float:
    """Return the best of REPEATS copies, each thread between two arrays of its own, in 1e9 bytes a second."""
    pairs = [(np.ones(array_bytes // 4, np.float32), np.ones(array_bytes // 4, np.float32)) for _ in range(threads)]

    def seconds(calls: int) -> float:  # of the thread that takes longest
        return max(pool.map(lambda pair: timeit(lambda: np.copyto(*pair), number=calls), pairs))

    with ThreadPoolExecutor(threads) as pool:
        seconds(1)  # the first one has cold pages
        calls = max(1, int(LEAST_S / max(seconds(1), 1e-9)))
        return 2 * array_bytes * calls * threads / min(seconds(calls) for _ in range(REPEATS)) / 1e9
