"""The harness: what counts as quiet, when it stops, and what it says about a machine that is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwnas.errors import TableError
from hwnas.latency.harness import call_overhead_ms, measure, measure_load, time_calls
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.roofline import measure_bandwidths
from hwnas.target import usable_cores

QUICK = Protocol(warmup_calls=3, round_ms=2.0, min_calls=5, min_rounds=4, max_rounds=6, drift=10.0, steal=10.0,
                 half_width=0.2, max_seconds=20.0)


def busy(ms: float) -> Callable[[], None]:
    """A call that takes at least `ms` of real time."""
    def call() -> None:
        end = time.perf_counter_ns() + int(ms * 1e6)
        while time.perf_counter_ns() < end:
            pass

    return call


def turns(values_ms, reference_ms=1.0, steal=0.0):
    return tuple(Turn((value, value, value), reference_ms, steal) for value in values_ms)


@pytest.mark.parametrize(("module", "times"), [
    ("latency.harness", lambda: measure({}, busy(0))), ("latency.harness", lambda: call_overhead_ms(busy(0))),
    ("latency.harness", lambda: measure_load([busy(0)], 1, 1, busy(0), QUICK, quiet_ms=None, progress=print)),
    ("roofline", lambda: measure_bandwidths(1))])
def test_whatever_is_timed_is_timed_under_the_lock(module: str, times: Callable[[], object],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def ask(*given: object) -> None:
        raise Asked

    monkeypatch.setattr(f"hwnas.{module}.measuring_lock", ask)
    with pytest.raises(Asked):
        times()


def test_programmed_times_are_recovered(virtual_clock):
    wait = virtual_clock.call
    found = measure({"slow": wait(0.4), "fast": wait(0.2)}, wait(0.3), QUICK)
    assert found["fast"].valid
    assert found["slow"].valid
    assert found["fast"].latency_ms == pytest.approx(0.2)
    assert found["slow"].latency_ms == pytest.approx(0.4)


def test_what_is_timed_takes_at_least_its_time():
    assert min(time_calls(busy(0.2), 5)) >= 0.2


def test_what_the_harness_adds_is_the_median_of_calls_that_do_nothing(virtual_clock):
    took = iter([*[0.003] * 15, *[7.0] * 6])
    assert call_overhead_ms(lambda: virtual_clock.advance(next(took)), 21) == pytest.approx(0.003)


def test_every_sample_is_kept_and_rounds_stop_at_the_interval(virtual_clock):
    wait = virtual_clock.call
    steady = measure({"one": wait(0.2)}, wait(0.2), QUICK)["one"]
    assert len(steady.turns) == max(QUICK.min_rounds, QUICK.copies + 1)  # one copy twice tells an error
    assert all(len(turn.samples_ms) == 10 for turn in steady.turns)  # as many as fill a round of 2 ms
    slow = measure({"one": wait(1.0)}, wait(0.2), QUICK)["one"]
    assert all(len(turn.samples_ms) == QUICK.min_calls for turn in slow.turns)
    restless = measure({"one": wait(0.2)}, wait(0.2), replace(QUICK, half_width=-1.0))["one"]  # that none is as narrow
    assert len(restless.turns) == QUICK.max_rounds


def test_a_run_far_above_the_stored_quiet_reference_is_invalid(virtual_clock):
    wait = virtual_clock.call
    found = measure({"one": wait(0.2)}, wait(0.4), replace(QUICK, drift=0.03, max_seconds=1.0), quiet_ms=0.2)["one"]
    assert not found.valid
    assert "quiet" in found.reason
    assert np.isnan(found.latency_ms)


def test_a_run_a_little_above_the_stored_quiet_reference_counts(virtual_clock):
    wait = virtual_clock.call
    found = measure({"one": wait(0.2)}, wait(0.21), QUICK, quiet_ms=0.2)["one"]
    assert found.valid
    assert found.quiet_ms == pytest.approx(0.21)


def test_turns_beside_a_disturbed_reference_or_with_stolen_time_do_not_count():
    protocol = Protocol(min_rounds=3)
    measured = Measurement(turns([1.0, 1.0, 1.0]) + turns([5.0], reference_ms=1.06) + turns([7.0], steal=0.5),
                           1.0, protocol)
    assert measured.good.tolist() == [True, True, True, False, False]
    assert measured.latency_ms == 1.0


def test_too_few_quiet_turns_give_a_reason_not_a_number():
    measured = Measurement(turns([1.0, 1.0]) + turns([1.0] * 5, reference_ms=2.0), 1.0, Protocol())
    assert not measured.valid
    assert "2 of 7 turns" in measured.reason
    assert np.isnan(measured.latency_ms)
    assert not measured.converged


def test_percentiles_need_their_samples():
    few = Measurement(turns([1.0, 2.0, 3.0]), 1.0, Protocol())
    assert few.percentile_ms(0.5) == 2.0
    assert few.percentile_ms(0.9) is None
    many = Measurement(tuple(Turn(tuple(np.linspace(1, 2, 50)), 1.0) for _ in range(14)), 1.0, Protocol())
    assert many.percentile_ms(0.9) == pytest.approx(1.9, abs=0.02)
    assert many.percentile_ms(0.99) == pytest.approx(1.99, abs=0.02)


@given(st.lists(st.floats(0.01, 100.0), min_size=3, max_size=30))
def test_interval_holds_the_estimate_and_survives_storage(values):
    protocol = Protocol(min_rounds=3)
    measured = Measurement(turns(values), 1.0, protocol)
    assert measured.latency_ms_low <= measured.latency_ms <= measured.latency_ms_high
    again = Measurement.from_dict(measured.to_dict(), protocol, "here")
    assert again.latency_ms == pytest.approx(measured.latency_ms, abs=2e-4)


@pytest.mark.parametrize(("key", "value"), [
    ("samples_us", [[-1.0]]), ("samples_us", [[0.0]]), ("samples_us", [[float("nan")]]), ("samples_us", [[]]),
    ("reference_us", [0.0]), ("quiet_us", -3.0), ("samples_us", "text"), ("steal", [])])
def test_impossible_times_are_refused_by_place(key, value):
    data = {"samples_us": [[1.0]], "reference_us": [1.0], "steal": [0.0], "quiet_us": 1.0, key: value}
    with pytest.raises(TableError, match=r"networks\[3\]"):
        Measurement.from_dict(data, Protocol(), "networks[3]")


@pytest.mark.parametrize(("slice_ms", "pause_ms", "valid"), [
    (4.0, 4.0, True),  # the scheduler's slices: most calls run undisturbed
    (0.05, 0.05, False),  # as two threads of one core: every call takes twice as long
    (0.15, 3.0, False)])
def test_another_process_on_the_same_core_gives_the_quiet_value_or_none(virtual_clock, slice_ms, pause_ms, valid):
    """Never a quietly wrong number: what we get of the core comes in slices, with pauses for the other process."""
    ran = [0.0]

    def wait(ms: float) -> Callable[[], None]:
        def call() -> None:
            pauses = (ran[0] + ms) // slice_ms - ran[0] // slice_ms
            ran[0] += ms
            virtual_clock.advance(ms + pauses * pause_ms)

        return call

    found = measure({"one": wait(0.2)}, wait(0.1), Protocol(max_seconds=8.0), quiet_ms=0.1)["one"]
    assert found.valid == valid
    assert np.isnan(found.latency_ms) or found.latency_ms == pytest.approx(0.2, rel=0.01)


@pytest.mark.soak
def test_a_burner_on_the_same_core_gives_the_quiet_value_or_none():
    """As above, with a real process and the real clock."""
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(burner.pid, usable_cores()[-1:])
        found = measure({"one": busy(0.2)}, busy(0.1), Protocol(max_seconds=8.0), quiet_ms=0.1)["one"]
    finally:
        burner.kill()
        burner.wait()
    assert not found.valid or found.latency_ms == pytest.approx(0.2, rel=0.05)


def test_the_process_is_pinned_while_it_measures_and_set_free_again():
    before, during = os.sched_getaffinity(0), []
    measure({"one": lambda: during.append(os.sched_getaffinity(0))}, busy(0.05), replace(QUICK, max_seconds=3.0))
    assert all(cores == set(usable_cores()[-1:]) for cores in during)
    assert os.sched_getaffinity(0) == before


def test_copies_take_turns_and_the_mean_of_them_counts(virtual_clock):
    wait, protocol = virtual_clock.call, replace(QUICK, copies=2, min_rounds=4, max_rounds=4)
    found = measure({"one": [wait(0.2), wait(0.4)]}, wait(0.1), protocol)["one"]
    assert found.latency_ms == pytest.approx(0.3)
    assert found.copies_ms == pytest.approx([0.2, 0.4])
    assert found.copy_spread == pytest.approx(0.47, abs=0.01)
    assert found.halves_ms() == pytest.approx((0.2, 0.4))  # the halves have a copy each
    assert found.half_width < 0.01  # of these copies: their spread is told apart


def test_a_slower_moment_is_told_apart_by_the_reference():
    quiet = Measurement(turns([1.0] * 4), 1.0, replace(QUICK, copies=1))
    slow = Measurement(turns([1.1] * 4, reference_ms=1.1), 1.1, replace(QUICK, copies=1))
    assert slow.latency_ms == pytest.approx(1.1)
    assert slow.at_ms(1.0) == pytest.approx(quiet.at_ms(1.0))


def test_turns_slowed_by_heat_do_not_count():
    hot = tuple(Turn((9.0, 9.0), 1.0, 0.0, True) for _ in range(3))
    measured = Measurement(turns([1.0] * 3) + hot, 1.0, replace(QUICK, copies=1))
    assert measured.latency_ms == 1.0
    assert "throttled" in Measurement(hot, 1.0, QUICK).reason
    stored = measured.to_dict()
    assert Measurement.from_dict(stored, measured.protocol, "here").turns == measured.turns
