"""The roofs of a roofline picture, measured here: peak of a target's convolutions, bandwidth of cache and memory.

A data sheet would promise what no network gets. The peak is that of the quickest of a few large dense networks. The
same runtime, threads and protocol run them as the networks below the roofs. The bandwidths are copies and sums of
arrays. They follow STREAM's counting: what is asked to be read and written, without the lines that a write brings in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import MeasurementInvalid
from hwnas.latency.copies import TimedFile, bind_copies, noise
from hwnas.latency.harness import measure, undisturbed
from hwnas.latency.table import Protocol
from hwnas.latency.timing import image_shape, reference_file
from hwnas.lazy import LazyModule
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.quantize import quantize_static, tuning_of
from hwnas.runtimes.runtime import threads_of
from hwnas.system.paths import temporary_folder
from hwnas.target import Target, measuring_lock, usable_cores

if TYPE_CHECKING:

    import torch.nn

    from hwnas.runtimes.runtime import Runtime
    from hwnas.space.architecture import Architecture
else:
    torch = LazyModule("torch")

KIB, MIB = 1 << 10, 1 << 20
L2_BYTES = MIB  # taken where the host does not say
MEMORY_BYTES = 256 * MIB  # each array; two of them are touched, and virtual machines report caches of any size
REPEATS = 40
LEAST_S = 2e-3  # a repeat: shorter ones would time the call


@dataclass(frozen=True, slots=True)
class Dense:
    """A network that is nothing but convolutions: `layers` of `kernel`, `channels` in and out, on maps of `size`."""

    kernel: int
    channels: int
    size: int
    layers: int = 8

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image."""
        return self.layers * (self.kernel * self.channels * self.size) ** 2

    def __str__(self) -> str:
        return f"{self.layers} convolutions {self.kernel}x{self.kernel}, {self.channels} channels at {self.size} px"


DENSE = (Dense(1, 256, 28), Dense(1, 512, 14), Dense(3, 128, 28, 4), Dense(3, 256, 14, 4))


@dataclass(frozen=True, slots=True)
class Peak:
    """Most that dense networks reached in a precision: GFLOP/s (2 a multiply-accumulate), and each of them."""

    precision: str
    gflops: float
    how: str
    runtime: str
    tried: dict[str, float]


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """GB/s (1e9 bytes read and written a second); `reach_bytes`: the most that a block may move at this speed."""

    level: str
    gb_per_s: float
    how: str
    array_bytes: int
    reach_bytes: int | None


@dataclass(frozen=True, slots=True)
class Roofs:
    """Both bandwidths and a peak for each precision, with what the host says of its caches (None: nothing)."""

    peaks: tuple[Peak, ...]
    cache: Bandwidth
    memory: Bandwidth
    l2_reported_bytes: int | None
    l3_reported_bytes: int | None

    def peak(self, precision: str) -> Peak:
        """The peak of a precision; KeyError where it was not measured."""
        return {peak.precision: peak for peak in self.peaks}[precision]

    def bandwidth(self, bytes_moved: float) -> Bandwidth:
        """The roof of a block that moves so much: the cache's where all of it fits, otherwise the memory's."""
        return self.cache if bytes_moved <= (self.cache.reach_bytes or 0) else self.memory

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def measured_peak(runtime: Runtime, target: Target, networks: Sequence[Dense] | None = None, *, seconds: float = 30.0,
                  reference: Architecture | None = None, quiet_ms: float | None = None,
                  progress: Callable[[float, str], None] | None = None) -> Peak:
    """Time dense networks (None: DENSE) by the protocol, `seconds` at most; the best quiet turn is the peak.

    `reference` and `quiet_ms` are a latency table's. Turns at which that network is slower than it was then do not
    count, so that peak and block times are of the same machine. Without them the smallest dense network stands in.
    MeasurementInvalid when the machine was too restless for any of them.
    """
    networks = DENSE if networks is None else networks
    runtime.check(target)
    with temporary_folder() as folder:
        calls = {str(network): _bind_dense(network, runtime, target, Path(folder)) for network in networks}
        beside = (bind_copies(TimedFile(reference_file(target, Path(folder), reference), target,
                                        image_shape(reference)), 1, Path(folder)) if reference
                  else calls[str(min(networks, key=lambda network: network.macs))])
        protocol = Protocol(min_calls=5, max_seconds=seconds)
        measurements = measure(calls, beside, protocol, quiet_ms=quiet_ms, progress=progress,
                               threads=threads_of(target))
    tried = {str(network): 2e-6 * network.macs * target.batch / float(measurements[str(network)].values_ms.min())
             for network in networks if measurements[str(network)].valid}
    if not tried:
        raise MeasurementInvalid(f"no peak of {target.precision}: {next(iter(measurements.values())).reason}. Stop "
                                 "what else runs here and give the command again.")
    best = max(tried, key=lambda name: tried[name])
    return Peak(target.precision, tried[best], best, runtime.version(), tried)


def _bind_dense(dense: Dense, runtime: Runtime, target: Target, folder: Path) -> Callable[[], None]:
    shape = (dense.channels, dense.size, dense.size)
    path = folder / f"k{dense.kernel}c{dense.channels}s{dense.size}.onnx"
    export_onnx(randomise(_network(dense), 0), path, shape)
    if target.precision == "int8":
        fp32, path = path, path.with_suffix(".int8.onnx")
        quantize_static(fp32, path, None, tuned_for=tuning_of(target))
    return runtime.compile(path, target).bind(noise(target.batch, shape))


def _network(dense: Dense) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for _ in range(dense.layers):
        layers.append(torch.nn.Conv2d(dense.channels, dense.channels, dense.kernel, padding=dense.kernel // 2))
        layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


def measured_bandwidths(threads: int = 1, *, memory_bytes: int | None = None, repeats: int | None = None,
                        waiting: Callable[[str], None] | None = None) -> tuple[Bandwidth, Bandwidth]:
    """Bandwidth of the cache and of memory with `threads` threads, each on arrays of its own; best of `repeats`.

    `memory_bytes` is the size of one array, over all threads (None: MEMORY_BYTES; of `repeats`: REPEATS).
    """
    reach, repeats = cache_bytes(2) or L2_BYTES, repeats or REPEATS
    share = max((memory_bytes or MEMORY_BYTES) // threads, KIB)
    with measuring_lock(usable_cores(), waiting), undisturbed(threads):
        # three arrays in three quarters of a core's own cache: the rest holds whatever else runs
        cache = _best_bandwidth("L2", reach // 4, threads, repeats)
        memory = _best_bandwidth("memory", share, threads, repeats)
    return (Bandwidth("L2", *cache, array_bytes=reach // 4, reach_bytes=reach),
            Bandwidth("memory", *memory, array_bytes=share, reach_bytes=None))


def _best_bandwidth(level: str, array_bytes: int, threads: int, repeats: int) -> tuple[float, str]:
    """(GB/s, how) of the better of copying and adding."""
    copied = _bandwidth(array_bytes, threads, repeats, add=False)
    # a third array would take memory past its cap of two
    added = _bandwidth(array_bytes, threads, repeats, add=True) if level != "memory" else 0.0
    size = f"{array_bytes / MIB:g} MiB" if array_bytes >= MIB else f"{array_bytes / KIB:g} KiB"
    what = f"{'copy' if copied >= added else 'sum'} of {size}{f', {threads} threads' if threads > 1 else ''}"
    return max(copied, added), what


def _bandwidth(array_bytes: int, threads: int, repeats: int, *, add: bool) -> float:
    """Best GB/s of c = a (two arrays) or c = a + b (three) over `repeats`."""
    streams = 3 if add else 2
    sets = [[np.ones(array_bytes // 4, np.float32) for _ in range(streams)] for _ in range(threads)]

    def work(arrays: list[np.ndarray], calls: int) -> None:
        for _ in range(calls):
            if add:
                np.add(arrays[0], arrays[1], out=arrays[2])
            else:
                np.copyto(arrays[1], arrays[0])

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        list(pool.map(work, sets, [calls] * threads)) if threads > 1 else work(sets[0], calls)
        return time.perf_counter() - start

    with ThreadPoolExecutor(threads) as pool:
        calls = max(1, int(LEAST_S / max(seconds(1), 1e-9)))
        calls = max(1, int(calls * LEAST_S / max(seconds(calls), 1e-9)))  # the first call had cold pages
        best = min(seconds(calls) for _ in range(repeats))
    return streams * (array_bytes // 4) * 4 * calls * threads / best / 1e9


def cache_bytes(level: int, folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of a core's unified or data cache as the host reports it (a virtual machine may report any), or None."""
    for index in sorted(folder.glob("index*")):
        try:
            cache_level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            if cache_level == str(level) and kind != "Instruction":
                return int(size.rstrip("KM")) * (MIB if size.endswith("M") else KIB if size.endswith("K") else 1)
        except (OSError, ValueError):
            continue
    return None
