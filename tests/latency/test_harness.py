"""The harness: what it times, when it stops, and what it says on a machine that others use too."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from clock_fixtures import VirtualClock
from hypothesis import given
from hypothesis import strategies as st

from hwnas.errors import TableError
from hwnas.latency import harness
from hwnas.latency.harness import measure, time_calls
from hwnas.latency.measurement import PAUSE_S, Measurement, Protocol, describe_machine
from hwnas.latency.probes import QuietRuns
from hwnas.latency.turn import Turn
from hwnas.system.cores import allowed_cores
from hwnas.system.gpu import GpuState
from hwnas.target import Host, Target

QUICK = Protocol(warmup_calls=3, round_ms=2.0, min_calls=5, min_rounds=4, max_rounds=6, half_width=0.2,
                 max_seconds=20.0)
PROBE_US = 3.0
NULL = Target("n", "null", "fp32")


class Machine:
    """A core, and how it is at each moment of a virtual clock: how much slower, and who cuts in."""

    def __init__(self, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, slow: Callable[[float], float],
                 slice_ms: float = math.inf, cut_ms: float = 0.0) -> None:
        self.clock, self.slow, self.slice_ms, self.cut_ms, self._ran_ms = clock, slow, slice_ms, cut_ms, 0.0
        monkeypatch.setattr(harness, "core_probe", lambda: self)
        monkeypatch.setattr(harness, "memory_probe", lambda: SimpleNamespace(read=lambda: 100 * PROBE_US))

    spacing_ms = 0.8

    def read(self) -> float:
        """The core probe of this machine."""
        us = PROBE_US * self.slow(self.clock.monotonic())
        self.clock.advance(1e-3 * us)
        return us

    def call(self, ms: float, slope: float = 1.0) -> Callable[[], None]:
        """A network that takes `ms` where nothing disturbs it."""
        def run() -> None:
            took = ms * self.slow(self.clock.monotonic()) ** slope
            cuts = (self._ran_ms + took) // self.slice_ms - self._ran_ms // self.slice_ms
            self._ran_ms += took
            self.clock.advance(took)
            self.clock.lose(cuts * self.cut_ms)

        return run


def busy(ms: float) -> Callable[[], None]:
    """A call that takes at least `ms` of real time."""
    def call() -> None:
        end = time.perf_counter_ns() + int(ms * 1e6)
        while time.perf_counter_ns() < end:
            pass

    return call


def turns(values_ms, reference_ms=1.0):
    return tuple(Turn((value, value, value), (1e3 * reference_ms,)) for value in values_ms)


def test_whatever_is_timed_is_timed_under_the_lock(monkeypatch):
    class Asked(Exception):
        pass

    def ask(*given: object) -> None:
        raise Asked

    monkeypatch.setattr("hwnas.latency.harness.measuring_lock", ask)
    with pytest.raises(Asked):
        measure({}, busy(0), QUICK)


def test_programmed_times_are_recovered(virtual_clock):
    wait = virtual_clock.call
    found = measure({"slow": wait(0.4), "fast": wait(0.2)}, wait(0.3), QUICK)
    assert found["fast"].latency_ms == pytest.approx(0.2)
    assert found["slow"].latency_ms == pytest.approx(0.4)
    assert found["slow"].quiet_ms == pytest.approx(0.3)
    assert found["slow"].quiet_share == 1.0


def test_what_is_timed_takes_at_least_its_time_on_a_core_of_its_own():
    assert min(time_calls(busy(0.2), 5)) >= 0.2
    before, during = os.sched_getaffinity(0), []
    measure({"one": lambda: during.append(os.sched_getaffinity(0))}, busy(0.05), replace(QUICK, max_seconds=3.0))
    assert all(len(cores) == 1 and cores <= set(allowed_cores()) for cores in during)
    assert os.sched_getaffinity(0) == before


def test_every_sample_is_kept_and_rounds_stop_at_the_interval(virtual_clock):
    wait = virtual_clock.call
    steady = measure({"one": wait(0.2)}, wait(0.2), QUICK)["one"]
    assert len(steady.turns) == QUICK.min_rounds
    assert all(len(turn.samples_ms) == 10 for turn in steady.turns)  # as many as fill a round of 2 ms
    slow = measure({"one": wait(1.0)}, wait(0.2), QUICK)["one"]
    assert all(len(turn.samples_ms) == QUICK.min_calls for turn in slow.turns)
    restless = measure({"one": wait(0.2)}, wait(0.2), replace(QUICK, half_width=-1.0))["one"]  # that none is as narrow
    assert len(restless.turns) == QUICK.max_rounds


def test_short_calls_have_a_reading_of_the_probe_now_and_then_and_long_ones_after_each(virtual_clock, monkeypatch):
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0)
    found = measure({"short": machine.call(0.1), "long": machine.call(2.0)}, machine.call(0.1), QUICK)
    assert {turn.calls_in_group for turn in found["short"].turns} == {7}  # of 20 calls
    assert {turn.calls_in_group for turn in found["long"].turns} == {1}


@pytest.mark.parametrize("busy_share", [0.5, 0.9])
def test_a_neighbour_on_the_same_physical_core_now_and_then_moves_no_latency(virtual_clock, monkeypatch, busy_share):
    """Networks run 1.3 to 1.8 times slower meanwhile, each in its own way."""
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.7 if (7 * at) % 1 < busy_share else 1.0)
    slopes = {"small": 1.1, "large": 0.5}
    found = measure({name: machine.call(0.3 if name == "small" else 2.0, slope) for name, slope in slopes.items()},
                    machine.call(0.2), replace(QUICK, round_ms=5.0, min_rounds=12, max_rounds=24, half_width=0.02))
    assert found["small"].latency_ms == pytest.approx(0.3, rel=0.02)
    assert found["large"].latency_ms == pytest.approx(2.0, rel=0.02)
    assert all(each.latency_ms_low < each.latency_ms < each.latency_ms_high for each in found.values())


@pytest.mark.parametrize(("slice_ms", "cut_ms"), [(4.0, 4.0), (3.0, 24.0), (0.9, 0.9)])
def test_time_that_another_process_had_is_in_no_latency(virtual_clock, monkeypatch, slice_ms, cut_ms):
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0, slice_ms, cut_ms)
    found = measure({"short": machine.call(0.2), "long": machine.call(1.0)}, machine.call(0.1),
                    Protocol(max_seconds=8.0))
    for name, ms in {"short": 0.2, "long": 1.0}.items():  # here the caches stay warm, which the model does not know
        assert found[name].latency_ms_low < ms < found[name].latency_ms_high
        assert found[name].latency_ms == pytest.approx(ms, rel=0.1)
    if slice_ms < 1:  # every call is cut
        assert found["long"].slowdown > 1.5
        assert "The machine was in use" in describe_machine(found.values())


def test_a_run_that_was_never_quiet_is_told_by_earlier_runs(virtual_clock, monkeypatch):
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0)
    protocol = Protocol(min_rounds=16, max_rounds=16, round_ms=16.0)
    quiet = measure({"one": machine.call(0.3)}, machine.call(0.2), protocol, reference_id="r")["one"]
    machine.slow = lambda at: 1.6
    loud = measure({"one": machine.call(0.3)}, machine.call(0.2), protocol, reference_id="r")["one"]
    assert loud.latency_ms_low < quiet.latency_ms < loud.latency_ms_high
    assert loud.half_width > 3 * quiet.half_width
    assert loud.slowdown == pytest.approx(1.6, rel=0.1)
    assert len(QuietRuns(Host.detect().name, "r").load()) == 1  # the loud run tells nothing of a quiet machine


def test_runs_of_other_threads_are_not_compared_by_the_same_quiet_time(virtual_clock, monkeypatch):
    """Their probe is another one, and takes a hundred times as long."""
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0)
    protocol = Protocol(min_rounds=16, max_rounds=16, round_ms=16.0)
    alone, beside, again = (measure({"one": machine.call(0.3)}, machine.call(0.2), protocol, threads=threads,
                                    reference_id="r")["one"] for threads in (1, 2, 1))
    assert beside.valid
    assert beside.latency_ms == pytest.approx(alone.latency_ms, rel=0.05)
    assert again.latency_ms == pytest.approx(alone.latency_ms, rel=0.05)


def test_a_slow_network_is_warmed_up_by_few_calls(virtual_clock):
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        virtual_clock.advance(500.0)

    measure({"one": [call] * 4}, virtual_clock.call(0.1), Protocol(max_seconds=1e-3, copies=4))
    assert calls <= 4 * 2 + 12  # of each compilation, and a turn


@pytest.mark.parametrize("text", ["{", "[]", '{"a r": [[1.0]]}', '{"a r": [[1.0, -1.0, 0.0]]}'])
def test_earlier_runs_that_cannot_be_read_are_refused_in_one_line(text, tmp_path, monkeypatch):
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    (tmp_path / "quiet_runs.json").write_text(text)
    with pytest.raises(TableError, match=r"quiet_runs\.json does not hold quiet runs\. Remove it"):
        QuietRuns("a", "r").load()


def test_what_too_few_or_slow_turns_tell():
    measured = Measurement(turns([2.2, 2.0], reference_ms=2.0), 1.0, Protocol())
    assert not measured.valid
    assert "0% of 2 turns were undisturbed" in measured.reason
    assert np.isnan(measured.latency_ms)
    assert not measured.converged
    few = Measurement(turns([1.0, 2.0, 3.0]), 1.0, Protocol())
    assert few.percentile_ms(0.5) == 2.0
    assert few.percentile_ms(0.9) is None
    many = Measurement(tuple(Turn(tuple(np.linspace(1, 2, 50)), (1000.0,)) for _ in range(14)), 1.0, Protocol())
    assert many.percentile_ms(0.9) == pytest.approx(1.9, abs=0.02)
    assert many.percentile_ms(0.99) == pytest.approx(1.99, abs=0.02)
    quiet = Measurement(turns([1.0] * 4), 1.0, replace(QUICK, copies=1))
    slow = Measurement(turns([1.1] * 4, reference_ms=1.1), 1.1, replace(QUICK, copies=1))
    assert slow.latency_ms == pytest.approx(1.1)
    assert slow.at_ms(1.0) == pytest.approx(quiet.at_ms(1.0))


@given(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=30))
def test_interval_holds_the_estimate_and_survives_storage(values):
    measured = Measurement(turns(values), 1.0, Protocol())
    if measured.valid:
        assert measured.latency_ms_low < measured.latency_ms < measured.latency_ms_high
    again = Measurement.from_dict(measured.to_dict(), measured.protocol, "here")
    assert again.valid == measured.valid
    assert again.latency_ms == pytest.approx(measured.latency_ms, rel=1e-2, nan_ok=True)


@pytest.mark.parametrize(("key", "value"), [
    ("samples_us", [[-1.0]]), ("samples_us", [[0.0]]), ("samples_us", [[float("nan")]]), ("samples_us", [[]]),
    ("probe_us", [[0.0]]), ("quiet_us", -3.0), ("samples_us", "text"), ("probe_us", []), ("lost_us", [[-1.0]]),
    ("first_us", [-1.0]), ("paused_us", [0.0]), ("conditions", {"probe_us": 1.0})])
def test_impossible_times_are_refused_by_place(key, value):
    data = {"samples_us": [[1.0]], "probe_us": [[1.0]], "quiet_us": 1.0, key: value}
    with pytest.raises(TableError, match=r"networks\[3\]"):
        Measurement.from_dict(data, Protocol(), "networks[3]")


def test_copies_take_turns_and_the_mean_of_them_counts(virtual_clock):
    wait, protocol = virtual_clock.call, replace(QUICK, copies=2, min_rounds=24, max_rounds=24)
    found = measure({"one": [wait(0.2), wait(0.204)]}, wait(0.1), protocol)["one"]
    assert found.latency_ms == pytest.approx(0.202, rel=0.001)
    assert found.copy_spread == pytest.approx(0.014, abs=0.001)
    assert found.half_width < 0.03  # of these copies: their spread is told apart


def test_turns_that_heat_slowed_leave_the_others_with_their_compilations():
    hot = GpuState(reasons=0x20)
    of_copies = [(0.2, None), (0.204, None), (0.3, hot), (0.204, None), (0.2, None), (0.204, None)] * 4
    timed = tuple(Turn((ms,) * 3, (100.0,), gpu=state) for ms, state in of_copies)
    found = Measurement(timed, 0.1, replace(QUICK, copies=2))
    first, second = np.exp(found.estimate.copies)
    assert second / first > 1.01  # all turns together tell them less apart than 1.02


def test_calls_after_a_pause_are_timed_apart(virtual_clock):
    """As those of a camera are: caches are cold then, and the clock is low."""
    at_ms = [0.0]

    def call() -> None:
        paused = virtual_clock.monotonic() * 1e3 - at_ms[0] > 500 * PAUSE_S
        virtual_clock.advance(0.5 if paused else 0.2)
        at_ms[0] = virtual_clock.monotonic() * 1e3

    found = measure({"one": call}, virtual_clock.call(0.1), replace(QUICK, paused_calls=16))["one"]
    assert found.latency_ms == pytest.approx(0.2, rel=0.02)
    assert found.pause_factor == pytest.approx(2.5, rel=0.02)
    assert Measurement.from_dict(found.to_dict(), QUICK, "here").pause_factor == pytest.approx(2.5, rel=0.02)


def test_a_machine_that_is_stopped_for_seconds_gives_the_same_latency(virtual_clock, monkeypatch):
    """As with SIGSTOP, or a virtual machine that is moved."""
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0)
    stops, call = iter([False] * 40 + [True] + [False] * 10_000), machine.call(0.3)

    def run() -> None:
        call()
        if next(stops):
            virtual_clock.lose(4000.0)

    found = measure({"one": run}, machine.call(0.2), Protocol(min_rounds=6, max_rounds=6, max_seconds=60.0))["one"]
    assert found.latency_ms == pytest.approx(0.3, rel=0.02)
    assert found.half_width < 0.1


def test_stalls_by_a_quota_count_in_no_latency_and_are_told(virtual_clock, monkeypatch):
    """Half a core: 50 of 100 ms."""
    periods = iter(range(0, 100_000, 7))
    monkeypatch.setattr(harness, "throttled_periods", lambda: next(periods))
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0, slice_ms=50.0, cut_ms=50.0)
    found = measure({"one": machine.call(2.0)}, machine.call(0.2), Protocol(max_seconds=8.0))
    assert found["one"].latency_ms == pytest.approx(2.0, rel=0.03)
    assert "A CPU quota stopped the run in" in describe_machine(found.values())


def test_the_cores_are_told_by_the_machine_that_timed(virtual_clock, monkeypatch):
    """Over ssh that is another one, with other cores than this one."""
    machine = Machine(virtual_clock, monkeypatch, lambda at: 1.0)
    found = measure({"one": machine.call(0.2)}, machine.call(0.2), QUICK)["one"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {*range(4099)})
    told = describe_machine([Measurement.from_dict(found.to_dict(), QUICK, "here")])
    assert "Timed on core" in told
    assert "of 4099" not in told
