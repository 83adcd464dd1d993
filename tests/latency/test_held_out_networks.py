"""Choosing networks to validate on, and the figures that compare predicted with measured latency."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwnas.errors import SpaceError
from hwnas.latency.agreement import (
    Compared,
    ceilings,
    intervals,
    quartiles,
    rank_correlation,
    summary,
    verdicts,
)
from hwnas.latency.held_out_networks import FRONT, RANDOM, front_networks, held_out_networks, predicted_front
from hwnas.space.search_space import SearchSpace, macs, params


class Additive:
    """A predictor: MACs at a price that depends on the segment, so that some segments look like bargains."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.price = np.random.default_rng(1).lognormal(0, 0.1, space.n_segments)

    def predict(self, codes: np.ndarray) -> SimpleNamespace:
        segments = self.space.segments(codes)
        return SimpleNamespace(mean=0.05 + (self.space.parts(codes, macs)[..., 0] * self.price[segments]
                                      ).sum(axis=1) * 1e-8)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=10)


@pytest.fixture(scope="module")
def model(space: SearchSpace) -> Additive:
    return Additive(space)


def chosen_ids(space, model, n, seed, known=()) -> list[str]:
    return [one.id for _, one in held_out_networks(space, model, n, seed, known)]


def test_networks_are_new_different_and_half_of_each_group(space, model):
    first = held_out_networks(space, model, 31, 7, set())
    known = {one.id for _, one in first}
    again = held_out_networks(space, model, 31, 7, known)
    ids = [one.id for _, one in again]
    assert len(set(ids)) == 31
    assert not known & set(ids)
    assert [group for group, _ in again].count(FRONT) == 15
    assert [group for group, _ in again].count(RANDOM) == 16


def test_the_seed_decides(space, model):
    assert chosen_ids(space, model, 12, 7) == chosen_ids(space, Additive(space), 12, 7)
    assert chosen_ids(space, model, 12, 7) != chosen_ids(space, model, 12, 8)


def test_both_groups_span_the_predicted_latencies(space, model):
    every = model.predict(space.sample(np.random.default_rng(3), 4000)).mean
    for group in (RANDOM, FRONT):
        codes = np.array([space.to_codes(space.encode(one)) for name, one in held_out_networks(space, model, 60, 1, ())
                          if name == group])
        found = model.predict(codes).mean
        assert found.min() < np.quantile(every, 0.1)
        assert found.max() > np.quantile(every, 0.9)


def test_the_front_beats_random_networks_and_its_mutants_lie_near_it(space, model):
    rng = np.random.default_rng(0)

    def predict(codes):
        return model.predict(codes).mean

    def capacity(codes):
        return space.totals(codes, macs)[:, 0]

    front = predicted_front(space, predict, capacity, rng)
    random = space.sample(rng, 3000)
    assert np.all(np.diff(predict(front)) >= 0)
    assert np.all(np.diff(capacity(front)) >= 0)
    below = [capacity(front)[predict(front) <= ms].max(initial=0) for ms in predict(random[:400])]
    assert np.mean(capacity(random[:400]) <= np.array(below)) > 0.99

    def value(architectures):  # MACs bought for a predicted ms, beyond the fixed time
        codes = np.array([space.to_codes(space.encode(one)) for one in architectures])
        return np.median(capacity(codes) / (predict(codes) - 0.05))

    mutants = front_networks(space, predict, rng, 40, ())
    drawn = [space.decode(space.to_params(row)) for row in random[:200]]
    assert value(mutants) > value(drawn)


def test_capacity_is_the_architecture_s_own(space, model):
    codes = space.sample(np.random.default_rng(5), 20)
    networks = [space.decode(space.to_params(row)) for row in codes]
    assert space.totals(codes, macs, params).tolist() == [[one.macs, one.params] for one in networks]


def test_a_space_without_enough_networks_says_so(tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text("image_size: 16\nstem: {width: 8, stride: 2}\nhead: 0\nactivation: relu\n"
                    "stages:\n  - {channels: [8, 16, 24], repeats: [1, 2], stride: 2, op: ds, kernel: [3, 5], se: 0, "
                    "skip: true}\n")
    tiny = SearchSpace.load(file, channels=1, classes=2)
    assert len(set(chosen_ids(tiny, Additive(tiny), 8, 0))) == 8
    with pytest.raises(SpaceError, match=r"only \d+ of \d+ networks.*n=NUMBER"):
        held_out_networks(tiny, Additive(tiny), 13, 0, set())


def compared(error, halves=None, low=0.93, high=1.08, converged=None) -> Compared:
    """Networks of 0.1, 0.2, … ms, predicted with the given signed errors."""
    error = np.asarray(error, float)
    measured = 0.1 * np.arange(1, len(error) + 1)
    predicted = measured * (1 + error)
    halves = measured[:, None] * (np.ones((len(error), 2)) if halves is None else np.asarray(halves))
    return Compared(predicted, predicted * low, predicted * high, measured, halves,
                    np.ones(len(error), bool) if converged is None else np.asarray(converged, bool))


def test_perfect_predictions():
    found = summary(compared(np.zeros(20)))
    assert [found[name] for name in ("within_5", "within_10", "spearman", "kendall", "coverage", "mean_error")] == [
        1, 1, 1, 1, 1, 0]
    assert found["median_half_width"] == pytest.approx(0.075)
    assert all(one.met and not one.by_ceiling for one in verdicts(found) if one.mark.name != "coverage")
    assert not next(one for one in verdicts(found) if one.mark.name == "coverage").met  # 100 % is too wide an interval


@given(st.floats(-0.3, 0.3), st.integers(3, 30))
def test_a_shift_changes_the_errors_but_not_the_order(shift, n):
    found = summary(compared(np.full(n, shift)))
    assert found["mean_error"] == pytest.approx(abs(shift), abs=1e-5)
    assert found["bias"] == pytest.approx(shift, abs=1e-5)
    assert found["spearman"] == found["kendall"] == 1
    if not 0.0499 < abs(shift) < 0.0501 and not 0.0999 < abs(shift) < 0.1001:
        assert found["within_5"] == float(abs(shift) <= 0.05)
        assert found["within_10"] == float(abs(shift) <= 0.10)


@settings(max_examples=50)
@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=40))
def test_figures_are_consistent(error):
    one = compared(error)
    found = summary(one)
    assert found["n"] == len(error)
    assert 0 <= found["within_5"] <= found["within_10"] <= 1
    inside = [low <= ms <= high for low, ms, high in zip(one.low_ms, one.measured_ms, one.high_ms, strict=True)]
    assert found["coverage"] == pytest.approx(np.mean(inside), abs=1e-6)
    parts = quartiles(one)
    assert sum(part["n"] for part in parts) == len(error)
    assert max(part["error_max"] for part in parts) == pytest.approx(np.abs(one.error).max(), abs=1e-6)
    assert all(part["error_p50"] <= part["error_p90"] <= part["error_p95"] <= part["error_max"] for part in parts)
    assert all(before["to_ms"] <= after["from_ms"] for before, after in pairwise(parts))


def test_rank_correlations_count_ties_and_refuse_what_has_no_order():
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(x, -x, "spearman") == rank_correlation(x, -x, "kendall") == -1
    assert rank_correlation(x, np.array([1.0, 2.0, 2.0, 3.0]), "kendall") == pytest.approx(5 / np.sqrt(6 * 5), abs=1e-6)
    assert rank_correlation(x, np.ones(4), "spearman") is None
    assert rank_correlation(x[:2], x[:2], "spearman") is None


def test_only_measurements_that_met_the_protocol_tell_the_noise():
    halves = [[1.04, 1.0], [1.0, 1.3], [1.0, 1.0], [np.nan, np.nan]]
    found = ceilings(compared(np.zeros(4), halves, converged=[True, False, True, True]))
    assert found["n_ceiling"] == 2
    assert found["ceiling_mean"] == pytest.approx(np.log(1.04) / 4, abs=1e-6)
    assert found["ceiling_within_5"] == 1
    noisy = ceilings(compared(np.zeros(4), [[1.0, 1.3]] * 4))
    assert (noisy["ceiling_within_5"], noisy["ceiling_within_10"]) == (0, 0)  # half of ln 1.3 is 13 %
    assert ceilings(compared([], np.empty((0, 2))))["ceiling_within_5"] is None


@pytest.mark.parametrize(("value", "ceiling", "met", "by_ceiling"), [
    (0.91, 0.95, True, False), (0.91, 0.5, True, False), (0.89, 0.95, False, False),  # a higher ceiling excuses nothing
    (0.83, 0.85, True, True), (0.82, 0.85, False, False), (0.89, None, False, False), (None, 0.5, False, False)])
def test_a_lower_noise_ceiling_less_two_points_is_enough(value, ceiling, met, by_ceiling):
    one = verdicts({"within_5": value, "ceiling_within_5": ceiling})[0]
    assert (one.met, one.by_ceiling) == (met, by_ceiling)


@pytest.mark.parametrize(("coverage", "met"), [(0.84, False), (0.85, True), (0.95, True), (0.96, False)])
def test_coverage_must_be_neither_too_low_nor_too_high(coverage, met):
    assert next(one.met for one in verdicts({"coverage": coverage}) if one.mark.name == "coverage") is met


def test_intervals_narrow_with_more_networks():
    rng = np.random.default_rng(0)
    few, many = (intervals(compared(0.04 * rng.standard_normal(n))) for n in (20, 400))
    for name in ("within_5", "coverage", "mean_error", "spearman"):
        assert many[name][1] - many[name][0] < few[name][1] - few[name][0]
    assert intervals(compared([0.1]))["mean_error"] is None
