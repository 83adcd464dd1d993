"""The harness: times networks against each other, in interleaved random rounds beside a fixed reference."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hwnas.latency.host import usable_cores
from hwnas.latency.locks import measuring_lock
from hwnas.latency.measurement import Measurement, Protocol, Turn

Call = Callable[[], None]
Progress = Callable[[float, str], None]
PAUSE_S = 0.2


def measure(candidates: Mapping[str, Call], reference: Call, protocol: Protocol | None = None, *, seed: int = 0,
            quiet_ms: float | None = None, progress: Progress | None = None) -> dict[str, Measurement]:
    """Time every candidate by `protocol`; INVALID ones come back with their reason, not as a number.

    A call is one inference with its inputs bound. `quiet_ms` is the reference's quiet time from an earlier run: where
    this run's stands too far above it, nothing counts as quiet, so that a run at half speed is INVALID.
    `progress` hears the share done (by networks or by time, whichever is further) and a note.
    """
    protocol = protocol or Protocol()
    def queued() -> None:
        if progress:
            progress(0.0, "waiting for another measurement on this host")

    with measuring_lock(queued), _undisturbed():
        run = _Run(candidates, reference, protocol, random.Random(seed), quiet_ms)
        run.warm_up()
        deadline = time.monotonic() + protocol.max_seconds
        rounds = 0
        while (waiting := run.unfinished()) and time.monotonic() < deadline:
            if not run.round(waiting, deadline):
                time.sleep(PAUSE_S)  # nothing was quiet: what disturbs may pass
            rounds += 1
            if progress:
                done = max(1 - (deadline - time.monotonic()) / protocol.max_seconds, 1 - len(waiting) / len(candidates))
                progress(min(done, 1.0), f"round {rounds}, {len(waiting)} of {len(candidates)} networks open")
        return run.measurements()


def call_overhead_ms(compiled_call: Call, calls: int = 2000) -> float:
    """What the harness adds to one call: the median time of a call that does nothing."""
    with _undisturbed():
        return float(np.median(_time_calls(compiled_call, calls)))


class _Run:
    def __init__(self, candidates: Mapping[str, Call], reference: Call, protocol: Protocol, rng: random.Random,
                 quiet_ms: float | None) -> None:
        self.candidates, self.reference, self.protocol, self.rng = candidates, reference, protocol, rng
        self.stored_quiet_ms = quiet_ms
        self.turns: dict[str, list[Turn]] = {name: [] for name in candidates}
        self.calls: dict[str, int] = {}
        self.references_ms: list[float] = []

    def warm_up(self) -> None:
        """Throw the first inferences away, and learn how many calls make a turn."""
        self.reference_calls = self._count(self.reference)
        for _ in range(5):
            self._time_reference()
        for name, call in self.candidates.items():
            self.calls[name] = self._count(call)

    def _count(self, call: Call) -> int:
        typical = float(np.median(_time_calls(call, self.protocol.warmup_calls)))
        return int(np.clip(self.protocol.round_ms / typical, self.protocol.min_calls, self.protocol.max_calls))

    def _time_reference(self) -> float:
        value = float(np.quantile(_time_calls(self.reference, self.reference_calls), self.protocol.quantile))
        self.references_ms.append(value)
        return value

    @property
    def quiet_ms(self) -> float:
        """The reference undisturbed: a low quantile of this run's turns, or the stored time where that is far lower."""
        quiet, stored = float(np.quantile(self.references_ms, 0.2)), self.stored_quiet_ms
        return stored if stored is not None and quiet > stored * (1 + self.protocol.run_drift) else quiet

    def unfinished(self) -> list[str]:
        return [name for name, found in self.measurements().items() if not found.converged]

    def round(self, names: list[str], deadline: float) -> bool:
        """Give each of `names` a turn; whether any block was quiet."""
        quiet = False
        order = self.rng.sample(names, len(names))
        before = self._time_reference()
        for start in range(0, len(order), self.protocol.block):
            steal, clock = _stolen_seconds(), time.monotonic()
            block = {name: self._turn(name) for name in order[start : start + self.protocol.block]}
            after = self._time_reference()
            stolen = (_stolen_seconds() - steal) / max(time.monotonic() - clock, 1e-6)
            for name, samples in block.items():
                self.turns[name].append(Turn(samples, max(before, after), stolen))
            quiet |= max(before, after) <= self.quiet_ms * (1 + self.protocol.drift)
            before = after
            if time.monotonic() > deadline:
                break
        return quiet

    def _turn(self, name: str) -> tuple[float, ...]:
        call = self.candidates[name]
        call()  # brings its weights back into the caches; thrown away
        return tuple(_time_calls(call, self.calls[name]))

    def measurements(self) -> dict[str, Measurement]:
        quiet = self.quiet_ms
        return {name: Measurement(tuple(turns), quiet, self.protocol) for name, turns in self.turns.items()}


def _time_calls(call: Call, calls: int) -> list[float]:
    clock = time.perf_counter_ns
    times = []
    for _ in range(calls):
        start = clock()
        call()
        times.append((clock() - start) / 1e6)
    return times


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep to the usable cores and hold the garbage collector back while the clock runs."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        if affinity is not None:
            os.sched_setaffinity(0, usable_cores())
        yield
    finally:
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
        if collecting:
            gc.enable()


def _stolen_seconds() -> float:
    """Time that the hypervisor took from this machine since boot (0 where /proc does not say)."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
