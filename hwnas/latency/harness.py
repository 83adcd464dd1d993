"""The harness: it times networks in interleaved random rounds, beside a fixed reference network and probes."""

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
        calls: The call of each compilation.
        path: The file. Its size is taken as the size of the network's weights.
    """

    def __init__(self, calls: Iterable[Call], path: Path) -> None:
        super().__init__(calls)
        self.weights_mb = path.stat().st_size / 1e6


Progress = Callable[[float, str], None]
CHECK_AFTER = 1.25  # times the rounds at the last check, the intervals are computed again
LOST_MS, LOST_SHARE = 0.03, 0.02  # a group of calls has lost time if it is more than both
NAP_S, CUT_FOR = 0.005, 8  # seconds of sleep before each of the CUT_FOR turns after one that another process cut into
WARM_TURNS = 2  # a compilation is warm after calls that take as long as so many turns
REMEMBER = 200  # clear readings that a run needs before its quiet times are stored for later runs


def measure(candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol, *, seed: int = 0,
            progress: Progress | None = None, threads: int = 1, gpu: Callable[[], GpuState] | None = None,
            reference_id: str = "") -> dict[str, Measurement]:
    """Time every candidate by `protocol`. INVALID ones are returned with their reason and without a number.

    Args:
        candidates: By name, a call of one inference with its inputs bound; or one call for each compilation, as many as
            the protocol's `copies`. A single call is used for all copies.
        reference: The network by which runs are compared; its time is the mean of its copies.
        protocol: The rules of timing.
        seed: The seed of the order.
        progress: It is called with the share done (by networks or by time, whichever is larger) and a note.
        threads: The number of cores that the process keeps to, the quietest (0: as many as it may use). Other
            measurements on this machine wait.
        gpu: A function that returns the state of the GPU. It is called before and after each block.
        reference_id: The name of the reference and its deployment. Runs of one name and with the same kind of probe are
            compared; empty: this run is compared with none.

    Raises:
        TableError: The file of earlier runs cannot be read.
    """
    run_id = reference_id if threads == 1 and gpu is None else f"{reference_id} beside {threads}t"
    runs = QuietRuns(Host.detect().name, run_id) if reference_id else None  # before cores are taken: it counts them
    with measuring_lock(allowed_cores(), progress), seated(threads) as seat:
        run = _Run(candidates, reference, protocol, random.Random(seed), seat, gpu, runs)
        run.warm_up(progress)
        # Time the networks whose intervals are too wide. Intervals are slow to compute, so this is not for each round.
        deadline = time.monotonic() + protocol.max_seconds
        rounds, next_check, open_names = 0, min(protocol.min_rounds, protocol.max_rounds), list(candidates)
        while open_names and time.monotonic() < deadline:
            run.round(open_names, deadline)
            rounds += 1
            if rounds >= next_check:
                next_check = math.ceil(CHECK_AFTER * rounds)
                next_check = next_check if rounds >= protocol.max_rounds else min(next_check, protocol.max_rounds)
                open_names = [name for name, each in run.measurements().items() if not each.converged]
            if progress:
                share = max(1 - (deadline - time.monotonic()) / protocol.max_seconds,
                            1 - len(open_names) / len(candidates))
                progress(min(share, 1.0), f"round {rounds}, {len(open_names)} of {len(candidates)} networks open")
        measured = run.measurements()
        run.remember()
        return {name: replace(each, paused_ms=run.time_after_pauses(name)) for name, each in measured.items()}


class _Run:
    """One run: its networks, its cores, its probes, and all turns so far."""

    def __init__(self, candidates: Mapping[str, Copies], reference: Copies, protocol: Protocol, rng: random.Random,
                 seat: Seat, gpu: Callable[[], GpuState] | None, runs: QuietRuns | None) -> None:
        self.candidates = {name: calls_of(copies) for name, copies in candidates.items()}
        self.weights_mb = {name: copies.weights_mb if isinstance(copies, FileCalls) else 0.0
                           for name, copies in candidates.items()}
        self.reference, self.protocol, self.rng, self.seat, self.gpu = calls_of(reference), protocol, rng, seat, gpu
        # No core probe shows the state of several cores or of a GPU. The reference, which runs there too, is the probe.
        self.is_alone = seat.threads == 1 and gpu is None
        self.probe = core_probe() if self.is_alone else Probe(self.reference[0], REFERENCE_READINGS)
        self.memory = memory_probe()
        self.runs, self.earlier = runs, runs.load() if runs else []
        self.throttled = throttled_periods()
        self.turns: dict[str, list[Turn]] = {name: [] for name in candidates}
        self.beside: list[Turn] = []  # turns of the reference
        self.calls: dict[str, tuple[int, int]] = {}  # numbers of calls in a turn, and in a group of it
        self.cut_turns = 0  # turns from now in which other processes are expected to cut in

    def warm_up(self, progress: Progress | None = None) -> None:
        """Run first inferences, which do not count, and learn how many calls make a turn."""
        self.reference_calls = self._plan(self.reference)
        for number, (name, copies) in enumerate(self.candidates.items()):
            self.calls[name] = self._plan(copies)
            if progress:
                progress(0.0, f"warmed up {number + 1} of {len(self.candidates)}")
        for _ in range(3):
            self.probe.read()
            self.memory_us = self.memory.read()

    def _plan(self, copies: Sequence[Call]) -> tuple[int, int]:
        """Return how many calls make a turn, and how many are between two readings of the probe."""
        typical = min(float(np.median(self._warm(call))) for call in copies)
        calls = int(np.clip(self.protocol.round_ms / max(typical, 1e-6), self.protocol.min_calls,
                            self.protocol.max_calls))
        if typical >= self.probe.spacing_ms:
            return calls, 1
        # The first of several calls after a reading does not count (`quiet._Calls`), so a group has one more.
        most = min(calls, 1 + math.ceil(min(self.probe.spacing_ms / max(typical, 1e-6), calls)))
        return calls, math.ceil(calls / math.ceil(calls / most))  # groups as equal as can be: `Turn.calls_in_group`

    def _warm(self, call: Call) -> list[float]:
        """Return the times of a compilation's first calls without the very first one, which may choose kernels. A slow
        network has few, because they would take minutes."""
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
            if self.gpu and state:  # all turns of a block have the worse state of its two ends
                state = state.worse(self.gpu())
                for name in block:
                    self.turns[name][-1] = replace(self.turns[name][-1], gpu=state)
            if time.monotonic() > deadline:
                break

    def _turn(self, copies: Sequence[Call], copy: int, plan: tuple[int, int]) -> Turn:
        """Time a turn: one call that finds cold caches first, then groups of calls between readings of the probe."""
        call, (calls, group) = copies[copy % len(copies)], plan
        if self.cut_turns > 0:  # a process that has slept is not interrupted so soon
            time.sleep(NAP_S)
        first_ms = time_calls(call, 1)[0]
        samples, lost, readings = list[float](), list[float](), [self.probe.read()]
        for done in range(0, calls, group):
            ran_ns, start_ns = time.process_time_ns(), time.perf_counter_ns()
            samples += time_calls(call, min(group, calls - done))
            passed_ms = (time.perf_counter_ns() - start_ns) / 1e6
            # Wall time without processor time of this process was lost to others, if it is more than a timer's error.
            missing_ms = passed_ms - (time.process_time_ns() - ran_ns) / 1e6
            lost.append(missing_ms if self.is_alone and missing_ms > max(LOST_MS, LOST_SHARE * passed_ms) else 0.0)
            readings.append(self.probe.read())
        self.cut_turns = CUT_FOR if any(lost) else self.cut_turns - 1
        before_us, self.memory_us = self.memory_us, self.memory.read()
        return Turn(tuple(samples), tuple(readings), tuple(lost) if any(lost) else (), first_ms,
                    (before_us + self.memory_us) / 2)

    def time_after_pauses(self, name: str) -> tuple[float, ...]:
        """Time single calls of a network after pauses, as a camera or a quiet server makes them, in ms."""
        samples = []
        for number in range(self.protocol.paused_calls):
            time.sleep(PAUSE_S)
            samples += time_calls(self.candidates[name][number % len(self.candidates[name])], 1)
        return tuple(samples)

    def measurements(self) -> dict[str, Measurement]:
        """Return the measurement of each network from its turns so far."""
        conditions = self._conditions()
        quiet_ms = conditions.reference_ms or 1e-3 * conditions.probe_us
        return {name: Measurement(tuple(turns), quiet_ms, self.protocol, conditions, weights_mb=self.weights_mb[name])
                for name, turns in self.turns.items()}

    def _conditions(self) -> Conditions:
        # Turns in which heat or the power supply slowed the GPU do not count. The reference is one of the networks.
        usable = {name: [turn for turn in turns if not turn.slowed] for name, turns in self.turns.items()}
        copies = {name: [place % self.protocol.copies for place, turn in enumerate(turns) if not turn.slowed]
                  for name, turns in self.turns.items()}
        usable[_REFERENCE] = self.beside
        copies[_REFERENCE] = [place % len(self.reference) for place in range(len(self.beside))]
        learnt = learn_conditions(usable, copies, self.protocol.quantile, reference=_REFERENCE, earlier=self.earlier)
        return replace(learnt, cores=tuple(self.seat.cores), seat=self.seat.words,
                       throttled=throttled_periods() - self.throttled)

    def remember(self) -> None:
        """Store this run's quiet times for later runs on this host, if it has seen enough quiet moments."""
        conditions = self._conditions()
        readings = [us for of in [*self.turns.values(), self.beside] for turn in of for us in turn.probe_us]
        clear = sum(us < conditions.probe_us * math.exp(CLEAR) for us in readings)
        if self.runs and clear >= REMEMBER:
            # The reference's time in this run, before it was corrected by earlier runs.
            as_it_was_ms = conditions.reference_ms * conditions.level * math.exp(conditions.traffic)
            self.runs.add(QuietRun(conditions.probe_us, as_it_was_ms, conditions.memory_us))


_REFERENCE = "\0reference"  # no network is called so


def calls_of(copies: Copies) -> Sequence[Call]:
    """List the calls of a network's copies; a single call is used for all of them."""
    return [copies] if callable(copies) else list(copies)


def time_calls(call: Call, calls: int) -> list[float]:
    """Run `call` so many times and return the wall time of each, in ms."""
    clock = time.perf_counter_ns
    times = []
    for _ in range(calls):
        start = clock()
        call()
        times.append((clock() - start) / 1e6)
    return times
