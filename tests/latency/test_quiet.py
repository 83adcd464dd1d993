"""The model of the quiet machine: what it makes of turns that were disturbed in known ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.quiet import Conditions, QuietRun, estimate, learn_conditions, low_mode
from hwnas.latency.turn import Turn, turns_from_dict, turns_to_dict

PROBE_US, QUANTILE = 1.0, 0.25
SLOPES = {"small": 1.1, "middle": 0.7, "large": 0.6}  # of the logarithm of the core probe
QUIET_MS = {"small": 0.1, "middle": 1.0, "large": 12.0}
QUIET_RUN = QuietRun(PROBE_US, QUIET_MS["small"])


def turn(ms: float, slope: float, slow: float, rng: np.random.Generator, *, calls: int = 8, lost_ms: float = 0.0,
         cold: float = 0.1, noise: float = 0.01) -> Turn:
    """A turn beside a neighbour that makes the core probe `slow` times slower, and cuts into the middle call."""
    own = ms * slow**slope * np.exp(rng.normal(0, noise, calls))
    lost = np.zeros(calls)
    if lost_ms:
        lost[calls // 2] = lost_ms
        own[calls // 2 : calls // 2 + 2] *= 1 + cold
    probes = PROBE_US * slow * np.exp(rng.normal(0, 0.02, calls + 1))
    return Turn(tuple(own + lost), tuple(probes), tuple(lost) if lost_ms else (), float(own[0] * (1 + cold)))


def alone(run: dict[str, list[Turn]]) -> dict[str, list[int]]:
    """One compilation of each network."""
    return {name: [0] * len(turns) for name, turns in run.items()}


def run_of(slows: Sequence[float], seed: int = 0, **options: float) -> dict[str, list[Turn]]:
    rng = np.random.default_rng(seed)
    return {name: [turn(ms, SLOPES[name], slow, rng, **options) for slow in slows] for name, ms in QUIET_MS.items()}


def errors(run: dict[str, list[Turn]], *earlier: QuietRun) -> dict[str, tuple[float, float]]:
    """Error and half-width of each network, in logarithms."""
    conditions = learn_conditions(run, alone(run), QUANTILE, reference="small", earlier=earlier)
    found = {name: estimate(turns, conditions, [0] * len(turns), QUANTILE) for name, turns in run.items()}
    return {name: (each.quiet - math.log(QUIET_MS[name]), each.half) for name, each in found.items()}


def test_a_machine_that_is_the_same_throughout_gives_the_median_of_its_turns():
    run = run_of([1.0] * 24)
    for name, (error, half) in errors(run).items():
        low = np.median([np.median(each.samples_ms) for each in run[name]])
        assert abs(error + math.log(QUIET_MS[name]) - math.log(low)) < 0.004
        assert half < 0.13
    for error, _ in errors(run_of([1.6] * 20)).values():
        assert error > 0.15


def test_a_few_clear_turns_decide_however_many_are_slow() -> None:
    run = run_of([1.0, 1.6, 1.6, 1.7, 1.5, 1.6, 1.0, 1.6, 1.6, 1.0, 1.6, 1.7] * 3)
    for error, half in errors(run).values():
        assert abs(error) < 0.02
        assert half < 0.13
    medians = [np.median([np.median(each.samples_ms) for each in run[name]]) / QUIET_MS[name] for name in run]
    assert min(medians) > 1.15  # what a plain median would say


def test_without_a_clear_turn_the_interval_is_as_wide_as_slopes_differ_and_holds_the_truth() -> None:
    run = run_of([1.55, 1.6, 1.65] * 10)
    for error, half in errors(run, QUIET_RUN).values():
        assert 0.08 < half < 0.5
        assert abs(error) < half


def test_a_level_that_sessions_differ_by_is_the_runs_own():
    run = run_of([1.0] * 20)
    conditions = learn_conditions(run, alone(run), QUANTILE, earlier=[QuietRun(PROBE_US / 1.1, 0.1)])
    assert conditions.level == pytest.approx(1.1, abs=0.02)
    assert conditions.probe_us == pytest.approx(PROBE_US, rel=0.02)
    for error, _ in errors(run_of([1.0] * 20), QuietRun(PROBE_US, 0.995 * QUIET_MS["small"])).values():
        assert abs(error) < 0.004


def test_traffic_that_slows_the_reference_beside_earlier_runs_is_taken_off_all_networks() -> None:
    run = {name: [replace(each, samples_ms=tuple(1.12 * ms for ms in each.samples_ms)) for each in turns]
           for name, turns in run_of([1.0] * 20).items()}
    for error, half in errors(run, QUIET_RUN, QUIET_RUN).values():
        assert abs(error) < 0.02
        assert half > 0.02  # networks differ in what traffic costs them
    for error, _ in errors(run).values():
        assert error == pytest.approx(math.log(1.12), abs=0.01)


def test_a_busy_memory_costs_a_network_of_many_weights_more() -> None:
    run = [replace(each, memory_us=140.0) for each in run_of([1.0] * 20)["middle"]]
    conditions = Conditions(PROBE_US, memory_us=100.0, reference_ms=QUIET_MS["middle"])
    few, many = (estimate(run, conditions, [0] * len(run), QUANTILE, weights_mb=size) for size in (0.5, 11.0))
    idle = estimate(run, replace(conditions, memory_us=140.0), [0] * len(run), QUANTILE, weights_mb=11.0)
    assert few.quiet - many.quiet > 0.15
    assert many.half > 2 * few.half > 2 * idle.half


def test_time_that_was_lost_to_another_process_counts_as_none():
    run = run_of([1.0] * 16, lost_ms=4.0)
    for error, half in errors(run).values():
        assert abs(error) < 0.03
        assert half < 0.15
    rng = np.random.default_rng(3)
    own = 12.0 * np.exp(rng.normal(0, 0.01, (16, 6)))
    turns = [Turn(tuple(row + 8.0), (1.0,) * 7, (8.0,) * 6, 13.0) for row in own]
    conditions = learn_conditions({"large": turns}, alone({"large": turns}), QUANTILE)
    found = estimate(turns, conditions, [0] * len(turns), QUANTILE)
    assert abs(found.quiet - math.log(12.0)) < found.half < 0.25


def test_one_reading_that_is_too_low_moves_no_mode() -> None:
    readings = np.concatenate([np.full(200, 1.6), np.full(40, 1.0), [0.4]])
    assert low_mode(readings) == pytest.approx(1.0)


def test_copies_differ_and_their_mean_counts() -> None:
    rng = np.random.default_rng(0)
    turns = [turn(1.0 * (1 + 0.02 * (at % 2)), 0.7, 1.0, rng) for at in range(24)]
    found = estimate(turns, Conditions(PROBE_US), [at % 2 for at in range(len(turns))], QUANTILE)
    assert math.exp(found.quiet) == pytest.approx(1.01, rel=0.01)
    assert np.exp(found.copies) == pytest.approx([1.0, 1.02], rel=0.01)


@settings(max_examples=40)
@given(st.lists(st.floats(1.0, 2.5), min_size=1, max_size=30), st.integers(0, 5), st.floats(0.0, 6.0))
def test_whatever_the_turns_are_there_is_an_estimate_with_an_interval(slows, seed, lost_ms):
    run = run_of(slows, seed, lost_ms=lost_ms)
    for error, half in errors(run, QUIET_RUN).values():
        assert math.isfinite(error)
        assert 0 < half < 20


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 20), st.booleans(), st.booleans())
def test_turns_survive_storage(n: int, calls: int, lost: bool, one_reading: bool) -> None:
    rng = np.random.default_rng(n)
    made = [turn(0.5, 0.7, 1.1, rng, calls=calls, lost_ms=3.0 if lost else 0.0) for _ in range(n)]
    if one_reading:
        made = [Turn(each.samples_ms, each.probe_us[:1]) for each in made]
    again = turns_from_dict(turns_to_dict(made))
    for one, other in zip(made, again, strict=True):
        assert other.samples_ms == pytest.approx(one.samples_ms, abs=2e-5)
        assert other.probe_us == pytest.approx(one.probe_us, abs=2e-3)
        assert other.own_ms() == pytest.approx(one.own_ms(), abs=1e-4)


def test_files_with_a_reference_beside_each_turn_are_read_as_they_were_meant() -> None:
    quiet = {"samples_us": [[1000.0, 1010.0]] * 8, "reference_us": [100.0] * 8, "steal": [0.0] * 8, "quiet_us": 100.0}
    measured = Measurement.from_dict(quiet, Protocol(copies=1), "here")
    assert measured.latency_ms == pytest.approx(1.0, rel=1e-3)
    loud = {**quiet, "samples_us": [[1000.0, 1010.0]] * 8 + [[1500.0, 1510.0]] * 8,
            "reference_us": [100.0] * 8 + [150.0] * 8, "steal": [0.0] * 16}
    assert Measurement.from_dict(loud, Protocol(copies=1), "here").latency_ms == pytest.approx(1.0, rel=0.02)
