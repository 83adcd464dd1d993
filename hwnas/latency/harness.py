"""The harness: times networks against each other, in interleaved random rounds beside a fixed reference; under load.

Throughput is measured with several requests in flight at once, each from a thread of its own, over repeated windows of
time.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.latency.measurement import Measurement, Protocol, Turn, robust_error
from hwnas.stats import student_t
from hwnas.system.gpu import GpuState
from hwnas.target import measuring_lock, usable_cores

Call = Callable[[], None]
Copies = Call | Sequence[Call]
Progress = Callable[[float, str], None]
PAUSE_S = 0.2
LEAST_REFERENCE_CALLS = 4  # of each copy in a turn


def measure(candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol | None = None, *, seed: int = 0,
            quiet_ms: float | None = None, progress: Progress | None = None, threads: int = 1,
            idle: Callable[[], bool] = lambda: False, gpu: Callable[[], GpuState] | None = None
            ) -> dict[str, Measurement]:
    """Time every candidate by `protocol`; INVALID ones come back with their reason and no number.

    A call is one inference with its inputs bound. Of a network compiled several times give all calls, as the protocol's
    `copies` says (one call stands for all copies). The reference's time is the mean of its copies.

    `quiet_ms` is the reference's quiet time from an earlier run. Where this run's lies too far above it, nothing counts
    as quiet: a run at half speed is INVALID. `progress` hears the share done (by networks or by time, whichever is
    further) and a note. Meanwhile the process keeps to `threads` cores (0: every core that it may use), and other
    processes' measurements there wait. While `idle` says that nothing else is to be done, rounds go on up to
    `max_rounds`, even if the interval is narrow enough. `gpu` tells the state of the GPU that the calls run on: it is
    asked before and after each block, and kept.
    """
    protocol = protocol or Protocol()
    def queued(who: str) -> None:
        if progress:
            progress(0.0, f"waiting for another measurement on this host: {who}")

    with measuring_lock(usable_cores(), queued), undisturbed(threads):
        run = _Run(candidates, reference, protocol, random.Random(seed), quiet_ms, gpu)
        run.warm_up()
        deadline = time.monotonic() + protocol.max_seconds
        rounds = 0
        while (waiting := run.unfinished() or (idle() and run.extensible())) and time.monotonic() < deadline:
            if not run.round(waiting, deadline):
                time.sleep(PAUSE_S)  # nothing was quiet; the disturbance may pass
            rounds += 1
            if progress:
                done = max(1 - (deadline - time.monotonic()) / protocol.max_seconds, 1 - len(waiting) / len(candidates))
                progress(min(done, 1.0), f"round {rounds}, {len(waiting)} of {len(candidates)} networks open")
        return run.measurements()


def call_overhead_ms(compiled_call: Call, calls: int = 2000) -> float:
    """What the harness adds to one call: the median time of a call that does nothing."""
    with measuring_lock(usable_cores()), undisturbed():
        return float(np.median(time_calls(compiled_call, calls)))


class _Run:
    def __init__(self, candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol, rng: random.Random,
                 quiet_ms: float | None, gpu: Callable[[], GpuState] | None = None) -> None:
        self.gpu = gpu
        self.candidates = {name: calls_of(copies) for name, copies in candidates.items()}
        self.reference, self.protocol, self.rng = calls_of(reference), protocol, rng
        self.stored_quiet_ms = quiet_ms
        self.cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.turns: dict[str, list[Turn]] = {name: [] for name in candidates}
        self.calls: dict[str, int] = {}
        self.references_ms: list[float] = []

    def warm_up(self) -> None:
        """Throw the first inferences away, and learn how many calls make a turn."""
        self.reference_calls = calls_in_turn(self.reference, self.protocol)
        for _ in range(5):
            self._time_reference()
        for name, copies in self.candidates.items():
            self.calls[name] = calls_in_turn(copies, self.protocol)

    def _time_reference(self) -> float:
        calls = max(-(-self.reference_calls // len(self.reference)), LEAST_REFERENCE_CALLS)
        values = [np.quantile(time_calls(call, calls), self.protocol.quantile) for call in self.reference]
        self.references_ms.append(float(np.mean(values)))
        return self.references_ms[-1]

    @property
    def quiet_ms(self) -> float:
        """The undisturbed reference."""
        return quiet_of(self.references_ms, self.stored_quiet_ms, self.protocol)

    def unfinished(self) -> list[str]:
        return [name for name, measurement in self.measurements().items() if not measurement.converged]

    def extensible(self) -> list[str]:
        return [name for name, measurement in self.measurements().items()
                if len(measurement.values_ms) < self.protocol.max_rounds]

    def round(self, names: list[str], deadline: float) -> bool:
        """Give each of `names` a turn. Returns whether any block was quiet."""
        quiet = False
        order = self.rng.sample(names, len(names))
        before = self._time_reference()
        for start in range(0, len(order), self.protocol.block):
            state = self.gpu() if self.gpu else None
            steal, throttled, clock = stolen_seconds(self.cores), throttle_count(), time.monotonic()
            block = {name: self._turn(name) for name in order[start : start + self.protocol.block]}
            after = self._time_reference()
            stolen = (stolen_seconds(self.cores) - steal) / max(time.monotonic() - clock, 1e-6)
            hot = throttle_count() > throttled
            if self.gpu and state:
                state = state.worse(self.gpu())
                hot |= state.slowed
            for name, samples in block.items():
                self.turns[name].append(Turn(samples, max(before, after), stolen, hot, state))
            quiet |= not hot and max(before, after) <= self.quiet_ms * (1 + self.protocol.drift)
            before = after
            if time.monotonic() > deadline:
                break
        return quiet

    def _turn(self, name: str) -> tuple[float, ...]:
        copies = self.candidates[name]
        call = copies[len(self.turns[name]) % self.protocol.copies % len(copies)]
        call()  # brings its weights back into the caches; thrown away
        return tuple(time_calls(call, self.calls[name]))

    def measurements(self) -> dict[str, Measurement]:
        quiet = self.quiet_ms
        return {name: Measurement(tuple(turns), quiet, self.protocol) for name, turns in self.turns.items()}


def calls_in_turn(copies: Sequence[Call], protocol: Protocol) -> int:
    """How many calls of the quickest of `copies` make a turn; the first inferences are thrown away."""
    typical = min(float(np.median(time_calls(call, protocol.warmup_calls))) for call in copies)
    return int(np.clip(protocol.round_ms / typical, protocol.min_calls, protocol.max_calls))


def quiet_of(turns_ms: Sequence[float], stored_ms: float | None, protocol: Protocol) -> float:
    """The undisturbed reference: a low quantile of a run's turns, or the stored time where that is far lower."""
    quiet = float(np.quantile(turns_ms, 0.2))
    return stored_ms if stored_ms is not None and quiet > stored_ms * (1 + protocol.run_drift) else quiet


def calls_of(copies: Copies) -> Sequence[Call]:
    """The calls of a network's copies; one stands for all of them."""
    return [copies] if callable(copies) else list(copies)


def time_calls(call: Call, calls: int) -> list[float]:
    """Wall time of each of `calls` calls, in ms."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(calls):
        start = clock()
        call()
        times.append((clock() - start) / 1e6)
    return times


@contextmanager
def undisturbed(threads: int = 1) -> Iterator[None]:
    """Keep every thread of this process to `threads` of its cores, and hold the garbage collector back.

    The last usable cores are taken, because the first ones serve most interrupts. 0 takes all cores.
    """
    cores = usable_cores()
    before = {task: os.sched_getaffinity(task) for task in _tasks()}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for task in before:
            _pin(task, cores[-threads:])
        yield
    finally:
        for task in _tasks():
            _pin(task, before.get(task, set(cores)))
        if collecting:
            gc.enable()


def _tasks() -> list[int]:
    """Threads of this process: runtimes keep their own, which do not follow the calling thread's affinity."""
    try:
        return [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0] if hasattr(os, "sched_getaffinity") else []


def _pin(task: int, cores: Iterable[int]) -> None:
    with suppress(ProcessLookupError):  # a thread may have ended meanwhile
        os.sched_setaffinity(task, cores)


def stolen_seconds(cores: Collection[int]) -> float:
    """Time that the hypervisor took from `cores` since boot (0 where /proc does not say)."""
    return _seconds_in(cores, _STOLEN) or 0.0


def _seconds_in(cores: Collection[int], columns: Sequence[int]) -> float | None:
    """Time since boot that `cores` spent in states of /proc/stat, to a hundredth; None where it does not say."""
    names = {f"cpu{core}" for core in cores}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        ticks = sum(int(line[column]) for line in lines if line and line[0] in names for column in columns)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def throttle_count() -> int:
    """How often the processor has slowed its cores down for heat since boot (0 where /sys does not say)."""
    total = 0
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count"):
        with suppress(OSError, ValueError):
            total += int(path.read_text())
    return total


LEAST_WINDOW_S, CALLS_A_WINDOW = 1.0, 20  # a window is long enough for this many calls of each thread
MIN_WINDOWS, MAX_WINDOWS = 8, 40
_REFERENCE_TURNS = 5
_BUSY, _STOLEN = (1, 2, 3, 6, 7), (8,)  # columns of /proc/stat: user, nice, system, irq, softirq; steal
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
        if not self.windows.valid:
            return float("inf")
        return student_t(0.95, len(self.values) - 1) * robust_error(self.values) / self.images_per_s

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
        n_reference = _REFERENCE_TURNS * calls_in_turn([reference], protocol)

        def time_reference() -> float:
            """Its low quantile now, over several turns: it stands for the whole window beside it."""
            reference()  # brings its weights back into the caches; thrown away
            return float(np.quantile(time_calls(reference, n_reference), protocol.quantile))

        references_ms = [time_reference() for _ in range(5)]
        _window(calls, min(window_s, 1.0))  # warm-up, thrown away
        deadline = time.monotonic() + protocol.max_seconds
        references_ms.append(time_reference())
        pinned = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(usable_cores())
        while True:
            lost, hot, clock = _lost_seconds(pinned), throttle_count(), time.monotonic()
            samples, rate = _window(calls, window_s)
            lost = max(0.0, _lost_seconds(pinned) - lost - _ROUNDED_S * len(pinned))
            stolen = lost / ((time.monotonic() - clock) * len(pinned))
            references_ms.append(time_reference())
            turns.append(Turn(samples, max(references_ms[-2:]), stolen, throttle_count() > hot))
            rates.append(images * rate)
            throughput = Throughput(tuple(rates), Measurement(tuple(turns), quiet_of(references_ms, quiet_ms, protocol),
                                                              protocol))
            good = len(throughput.values)
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
    """Time since boot that `cores` were not idle (None where /proc does not say)."""
    return _seconds_in(cores, _BUSY)


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
