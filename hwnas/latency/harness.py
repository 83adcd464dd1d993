"""The harness: times networks against each other, in interleaved random rounds beside a fixed reference and probes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from hwnas.latency.measurement import PAUSE_S, Measurement, Protocol
from hwnas.latency.probes import REFERENCE_READINGS, Probe, QuietRuns, core_probe, memory_probe
from hwnas.latency.quiet import CLEAR, Conditions, QuietRun, learn_conditions
from hwnas.latency.seat import Seat, seated
from hwnas.latency.turn import Turn
from hwnas.system.cores import allowed_cores, throttled_periods
from hwnas.system.gpu import GpuState
from hwnas.target import Host, measuring_lock

Call = Callable[[], None]
Copies = Call | Sequence[Call]


class FileCalls(list[Call]):
    """The calls of a file's compilations.

    Args:
        calls: Of each compilation.
        path: The file, whose size stands for that of the network's weights.
    """

    def __init__(self, calls: Iterable[Call], path: Path) -> None:
        super().__init__(calls)
        self.weights_mb = path.stat().st_size / 1e6


Progress = Callable[[float, str], None]
CHECK_AFTER = 1.25  # times the rounds of the last check: the intervals are computed again
LOST_MS, LOST_SHARE = 0.03, 0.02  # a group of calls has lost time if it is both more than these
NAP_S, CUT_FOR = 0.005, 8  # before each of so many turns after one that another process cut into
WARM_TURNS = 2  # the time of so many turns is enough to warm a compilation up
REMEMBER = 200  # readings of a probe from which on its quiet time is kept for later runs


def measure(candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol, *, seed: int = 0,
            progress: Progress | None = None, threads: int = 1, gpu: Callable[[], GpuState] | None = None,
            reference_id: str = "") -> dict[str, Measurement]:
    """Time every candidate by `protocol`; INVALID ones come back with their reason and no number.

    Args:
        candidates: A call is one inference with its inputs bound. Of a network compiled several times all calls, as the
            protocol's `copies` says; one call stands for all copies.
        reference: The network that runs are compared by; its time is the mean of its copies.
        protocol: How they are timed.
        seed: Of the order.
        progress: Hears the share done (by networks or by time, whichever is further) and a note.
        threads: The process keeps to so many cores, the quietest (0: as many as it may use). Other processes'
            measurements on this machine wait.
        gpu: Tells the state of the GPU that the calls run on. It is asked before and after each block, and kept.
        reference_id: What runs beside the same reference have in common. They are compared, if the same kind of probe
            tells them how the machine was; empty: they are not.

    Raises:
        TableError: The file of earlier runs cannot be read.
    """
    alike = reference_id if threads == 1 and gpu is None else f"{reference_id} beside {threads}t"
    runs = QuietRuns(Host.detect().name, alike) if reference_id else None  # named before cores are taken
    with measuring_lock(allowed_cores(), progress), seated(threads) as seat:
        run = _Run(candidates, reference, protocol, random.Random(seed), seat, gpu, runs)
        run.warm_up(progress)
        deadline = time.monotonic() + protocol.max_seconds
        rounds, check, waiting = 0, min(protocol.min_rounds, protocol.max_rounds), list(candidates)
        while waiting and time.monotonic() < deadline:
            run.round(waiting, deadline)
            rounds += 1
            if rounds >= check:
                check = math.ceil(CHECK_AFTER * rounds)
                check = check if rounds >= protocol.max_rounds else min(check, protocol.max_rounds)
                waiting = [name for name, each in run.measurements().items() if not each.converged]
            if progress:
                done = max(1 - (deadline - time.monotonic()) / protocol.max_seconds, 1 - len(waiting) / len(candidates))
                progress(min(done, 1.0), f"round {rounds}, {len(waiting)} of {len(candidates)} networks open")
        measured = run.measurements()
        run.remember()
        return {name: replace(each, paused_ms=run.time_after_pauses(name)) for name, each in measured.items()}


class _Run:
    """One run: its networks, its seat, its probes, and all turns so far."""

    def __init__(self, candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol, rng: random.Random,
                 seat: Seat, gpu: Callable[[], GpuState] | None, runs: QuietRuns | None) -> None:
        self.candidates = {name: calls_of(copies) for name, copies in candidates.items()}
        self.weights_mb = {name: copies.weights_mb if isinstance(copies, FileCalls) else 0.0
                           for name, copies in candidates.items()}
        self.reference, self.protocol, self.rng, self.seat, self.gpu = calls_of(reference), protocol, rng, seat, gpu
        # What runs on several cores, or on a GPU, is told by itself alone: the reference, which runs there too.
        self.is_alone = seat.threads == 1 and gpu is None
        self.probe = core_probe() if self.is_alone else Probe(self.reference[0], REFERENCE_READINGS)
        self.memory = memory_probe()
        self.runs, self.earlier = runs, runs.load() if runs else []
        self.throttled = throttled_periods()
        self.turns: dict[str, list[Turn]] = {name: [] for name in candidates}
        self.beside: list[Turn] = []  # the reference's
        self.calls: dict[str, tuple[int, int]] = {}  # of a turn, and of a group in it
        self.cut_turns = 0  # for how many turns more others are expected to cut in

    def warm_up(self, progress: Progress | None = None) -> None:
        """Throw the first inferences away, and learn how many calls make a turn."""
        self.reference_calls = self._plan(self.reference)
        for number, (name, copies) in enumerate(self.candidates.items()):
            self.calls[name] = self._plan(copies)
            if progress:
                progress(0.0, f"warmed up {number + 1} of {len(self.candidates)}")
        for _ in range(3):
            self.probe.read()
            self.memory_us = self.memory.read()

    def _plan(self, copies: Sequence[Call]) -> tuple[int, int]:
        """Return how many calls make a turn, and how many lie between two readings of the probe."""
        typical = min(float(np.median(self._warm(call))) for call in copies)
        calls = int(np.clip(self.protocol.round_ms / max(typical, 1e-6), self.protocol.min_calls,
                            self.protocol.max_calls))
        if typical >= self.probe.spacing_ms:
            return calls, 1
        # The call after a reading of the probe does not count where it is short, so that one more makes up for it.
        most = min(calls, 1 + math.ceil(min(self.probe.spacing_ms / max(typical, 1e-6), calls)))
        return calls, math.ceil(calls / math.ceil(calls / most))  # groups as equal as can be: `Turn.calls_in_group`

    def _warm(self, call: Call) -> list[float]:
        """Return the times of a compilation's first calls but for the very first, which may choose kernels. Of a slow
        network they are few, as they would take minutes."""
        times = time_calls(call, 2)[1:]
        while len(times) < self.protocol.warmup_calls - 1 and sum(times) < WARM_TURNS * self.protocol.round_ms:
            times += time_calls(call, 1)
        return times

    def round(self, names: Sequence[str], deadline: float) -> None:
        """Give each of `names` a turn, and the reference one before each block."""
        order = self.rng.sample(names, len(names))
        for start in range(0, len(order), self.protocol.block):
            self.seat.look()
            state = self.gpu() if self.gpu else None
            self.beside.append(self._turn(self.reference, len(self.beside), self.reference_calls))
            block = order[start : start + self.protocol.block]
            for name in block:
                copy = len(self.turns[name]) % self.protocol.copies
                self.turns[name].append(self._turn(self.candidates[name], copy, self.calls[name]))
            if self.gpu and state:
                state = state.worse(self.gpu())
                for name in block:
                    self.turns[name][-1] = replace(self.turns[name][-1], gpu=state)
            if time.monotonic() > deadline:
                break

    def _turn(self, copies: Sequence[Call], copy: int, plan: tuple[int, int]) -> Turn:
        """Time a turn: first one call that finds cold caches, then groups of calls between readings of the probe."""
        call, (calls, group) = copies[copy % len(copies)], plan
        if self.cut_turns > 0:  # who has slept is not cut so soon: the scheduler owes it time
            time.sleep(NAP_S)
        first_ms = time_calls(call, 1)[0]
        samples, lost, readings = list[float](), list[float](), [self.probe.read()]
        for done in range(0, calls, group):
            ran_ns, start_ns = time.process_time_ns(), time.perf_counter_ns()
            samples += time_calls(call, min(group, calls - done))
            passed_ms = (time.perf_counter_ns() - start_ns) / 1e6
            missing_ms = passed_ms - (time.process_time_ns() - ran_ns) / 1e6
            lost.append(missing_ms if self.is_alone and missing_ms > max(LOST_MS, LOST_SHARE * passed_ms) else 0.0)
            readings.append(self.probe.read())
        self.cut_turns = CUT_FOR if any(lost) else self.cut_turns - 1
        before_us, self.memory_us = self.memory_us, self.memory.read()
        return Turn(tuple(samples), tuple(readings), tuple(lost) if any(lost) else (), first_ms,
                    (before_us + self.memory_us) / 2)

    def time_after_pauses(self, name: str) -> tuple[float, ...]:
        """Time calls of a network that come now and then, as those of a camera or a quiet server do."""
        samples = []
        for number in range(self.protocol.paused_calls):
            time.sleep(PAUSE_S)
            samples += time_calls(self.candidates[name][number % len(self.candidates[name])], 1)
        return tuple(samples)

    def measurements(self) -> dict[str, Measurement]:
        """Return what is known of each network by now."""
        conditions = self._conditions()
        quiet_ms = conditions.reference_ms or 1e-3 * conditions.probe_us
        return {name: Measurement(tuple(turns), quiet_ms, self.protocol, conditions, weights_mb=self.weights_mb[name])
                for name, turns in self.turns.items()}

    def _conditions(self) -> Conditions:
        usable = {name: [turn for turn in turns if not turn.slowed] for name, turns in self.turns.items()}
        copies = {name: [place % self.protocol.copies for place, turn in enumerate(turns) if not turn.slowed]
                  for name, turns in self.turns.items()}
        usable[_REFERENCE] = self.beside
        copies[_REFERENCE] = [place % len(self.reference) for place in range(len(self.beside))]
        learnt = learn_conditions(usable, copies, self.protocol.quantile, reference=_REFERENCE, earlier=self.earlier)
        return replace(learnt, cores=tuple(self.seat.cores), throttled=throttled_periods() - self.throttled)

    def remember(self) -> None:
        """Keep what this run tells later ones on this host, if it has seen enough quiet moments."""
        conditions = self._conditions()
        readings = [us for of in [*self.turns.values(), self.beside] for turn in of for us in turn.probe_us]
        clear = sum(us < conditions.probe_us * math.exp(CLEAR) for us in readings)
        if self.runs and clear >= REMEMBER:
            as_it_was_ms = conditions.reference_ms * conditions.level * math.exp(conditions.traffic)
            self.runs.add(QuietRun(conditions.probe_us, as_it_was_ms, conditions.memory_us))


_REFERENCE = "\0reference"  # no network is called so


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
