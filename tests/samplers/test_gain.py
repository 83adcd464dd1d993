"""The parts of the known-objective sampler: gains against sampled ones, the warp, the codes, the surrogate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, IntDistribution
from scipy.stats import norm

from experiments.common import hypervolume_2d
from hwnas.samplers.domain import Coding, Column, Inputs
from hwnas.samplers.model import PLACES, WEIGHTS, Front, Process, Warp, fit_weights, negative_log_posterior, prior

RNG = np.random.default_rng(3)


def volume(values: np.ndarray, known: np.ndarray, reference_value: float, reference_costs: np.ndarray) -> float:
    """Dominated by points in (value, costs), by counting a fine grid of costs: an oracle of another kind."""
    if known.shape[1] == 1:
        return hypervolume_2d(values, known[:, 0], (reference_value, float(reference_costs[0])))
    axes = [np.unique(np.append(known[:, axis], reference_costs[axis])) for axis in range(2)]
    total = 0.0
    for left, right in zip(axes[0][:-1], axes[0][1:], strict=True):
        for low, high in zip(axes[1][:-1], axes[1][1:], strict=True):
            below = values[(known[:, 0] <= left) & (known[:, 1] <= low)]
            level = max([reference_value, *below.tolist()])
            if right <= reference_costs[0] and high <= reference_costs[1]:
                total += (right - left) * (high - low) * (level - reference_value)
    return total


@pytest.mark.parametrize("k", [1, 2])
def test_gains_are_the_mean_over_what_may_be_reached(k: int) -> None:
    values, known = RNG.uniform(0, 1, 12), RNG.uniform(0, 1, (12, k))
    reference_costs = np.full(k, 0.9)
    front = Front(values, known, 0.1, reference_costs)
    at, mean, std = RNG.uniform(0, 1, (6, k)), RNG.uniform(0.2, 1.1, 6), RNG.uniform(0.05, 0.3, 6)
    found = front.expected_gain(at, mean[:, None] + std[:, None] * PLACES)
    before = volume(values, known, 0.1, reference_costs)
    for index in range(6):
        reached = np.linspace(-5, 5, 101)  # in standard deviations
        costs = np.vstack([known, at[index]])
        gains = [volume(np.append(values, mean[index] + std[index] * away), costs, 0.1, reference_costs) - before
                 for away in reached]
        assert found[index] == pytest.approx(np.average(gains, weights=norm.pdf(reached)), rel=0.01, abs=1e-6)


def test_what_is_exceeded_is_counted_in_values_though_the_model_sees_warped_ones() -> None:
    levels, mean, std = (0.2, 2.2, 4.1), np.array([0.5, 1.2]), np.array([0.3, 0.5])
    values = np.expm1(mean[:, None] + std[:, None] * PLACES)
    drawn = np.expm1(RNG.normal(mean[:, None], std[:, None], (2, 200_000)))
    assert pytest.approx(1) == WEIGHTS.sum()
    for level in levels:
        found = Front(np.array([level]), np.zeros((1, 0)), 0.0, np.zeros(0)).expected_gain(np.zeros((2, 0)), values)
        assert found == pytest.approx(np.maximum(drawn - level, 0).mean(axis=1), rel=0.06, abs=0.002)


def test_a_point_behind_the_front_or_beyond_the_reference_gains_nothing() -> None:
    front = Front(np.array([0.5, 0.8]), np.array([[0.2], [0.5]]), 0.0, np.array([1.0]))
    found = front.expected_gain(np.array([[0.6], [1.2], [0.1]]), np.array([[0.3], [2.0], [0.4]]) + 1e-4 * PLACES)
    assert found[:2] == pytest.approx([0, 0], abs=1e-6)
    assert found[2] == pytest.approx(0.1 * 0.4, rel=1e-2)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=60), st.floats(-3, 3))
@example([0.0, 0.0, 1e-12], 0.0)
@example([0.0, 1e-300], 0.0)
@settings(max_examples=60, deadline=None)
def test_the_warp_goes_there_and_back_and_keeps_the_order(values: list[float], at: float) -> None:
    warp = Warp.fit(np.array(values))
    assert warp(warp.inverse(np.array([at]))) == pytest.approx(np.maximum([at], warp(np.array([-1e9]))), abs=1e-6)
    ordered = np.sort(np.array(values))
    assert (np.diff(warp(ordered)) >= -1e-12).all()


@pytest.mark.parametrize("distribution", [
    CategoricalDistribution([1, 10, 100]), CategoricalDistribution(["a", 1, None, True]), IntDistribution(3, 10),
    IntDistribution(3, 9, step=2), IntDistribution(2, 2)])
def test_codes_go_there_and_back(distribution) -> None:
    column = Column("x", distribution)
    for code, value in enumerate(column.values):
        assert distribution._contains(distribution.to_internal_repr(value))
        assert column.code(value) == code
    assert column.code("elsewhere") is None
    if len(column.values) > 1:
        stepped = column.step(np.repeat(np.arange(len(column.values)), 5), RNG)
        assert (stepped != np.repeat(np.arange(len(column.values)), 5)).all()
        assert {*stepped.tolist()} <= {*range(len(column.values))}


def test_distances_are_one_between_unlike_choices_and_smaller_between_near_ones() -> None:
    plain, ordered = Column("x", CategoricalDistribution(["a", "b", "c"])), Column("y", IntDistribution(0, 4))
    rows = plain.embed(np.arange(3))
    assert ((rows[0] - rows[2]) ** 2).sum() == pytest.approx(1)
    rows = ordered.embed(np.arange(5))
    near, far = ((rows[0] - rows[1]) ** 2).sum(), ((rows[0] - rows[4]) ** 2).sum()
    assert 0.5 < near < far == pytest.approx(1)


def test_settings_are_read_whole() -> None:
    coding = Coding({"a": IntDistribution(1, 3), "b": CategoricalDistribution("xy")})
    assert coding.decode(np.array([2, 0])) == {"a": 3, "b": "x"}
    assert coding.encode({"a": 3, "b": "x"}) == [2, 0]
    assert coding.encode({"a": 9, "b": "x"}) is None
    assert coding.encode({"a": 1}) is None


def test_the_surrogate_learns_and_its_gradient_is_right() -> None:
    from scipy.optimize import check_grad

    coding = Coding({name: CategoricalDistribution(["p", "q", "r"]) for name in "abcde"})
    codes = coding.sample(RNG, 90)
    values = codes[:, 0] - 0.5 * (codes[:, 1] == 2) + 0.3 * (codes[:, 2] == codes[:, 3])
    values = (values - values.mean()) / values.std()
    inputs = Inputs(coding.embed(codes), coding.owner, codes[:, :1] / 2)
    noise = np.full(90, 1e-4)
    means, widths = prior(5, 1)
    at = means + 0.3 * RNG.normal(size=len(means))
    gap = check_grad(lambda x: negative_log_posterior(x, inputs, values, noise, means, widths)[0],
                     lambda x: negative_log_posterior(x, inputs, values, noise, means, widths)[1], at, epsilon=1e-5)
    assert gap < 1e-2
    process = Process(inputs[:60], values[:60], noise[:60], fit_weights(inputs[:60], values[:60], noise[:60]))
    mean, std = process.predict(inputs[60:])
    assert np.mean((mean - values[60:]) ** 2) < 0.1
    assert np.mean(np.abs(mean - values[60:]) < 2 * std + 0.05) > 0.8
