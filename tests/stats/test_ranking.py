"""Rank correlations against scipy and by hand, and the intervals that shipped certificates have of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hwnas.stats import draws, hypervolume_loss, kendall_tau, paired, percentiles, spearman, top_k_regret, with_interval

PAIRS = st.integers(4, 12).flatmap(lambda n: st.tuples(
    *(st.lists(st.integers(0, 6), min_size=n, max_size=n) for _ in range(2))))


def array(*values: float) -> np.ndarray:
    return np.array(values, float)


@given(PAIRS)
@settings(deadline=None, max_examples=60)
def test_correlations_are_scipys_ties_among_them(pair: tuple[list[int], list[int]]) -> None:
    x, y = (np.array(values, float) for values in pair)
    if len(set(pair[0])) == 1 or len(set(pair[1])) == 1:
        assert np.isnan(kendall_tau(x, y))
        assert np.isnan(spearman(x, y))
        return
    assert float(kendall_tau(x, y)) == pytest.approx(stats.kendalltau(x, y).statistic)
    assert float(spearman(x, y)) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert kendall_tau(np.exp(x), y) == kendall_tau(x, y)


def test_kendall_by_hand() -> None:
    assert float(kendall_tau([1, 2, 3, 4], [1, 3, 2, 4])) == pytest.approx((5 - 1) / 6)
    assert float(kendall_tau([1, 1, 2, 3], [1, 2, 3, 4])) == pytest.approx(5 / np.sqrt(5 * 6))  # tau-b: one tie
    many = kendall_tau(np.tile([1, 2, 3, 4], (3, 1)), [[1, 2, 3, 4], [4, 3, 2, 1], [1, 3, 2, 4]])
    assert many.tolist() == pytest.approx([1, -1, 2 / 3])


def test_intervals_hold_the_value_are_the_same_again_and_end_where_all_agrees() -> None:
    x = np.arange(12.0)
    y = x + array(0, 3, -2, 1, 0, -3, 2, 2, -1, 0, 1, -2)
    value, low, high = with_interval(paired(kendall_tau, x, y), 12)
    assert 0 < low < value < high <= 1
    assert with_interval(paired(kendall_tau, x, y), 12) == (value, low, high)
    assert with_interval(paired(kendall_tau, x, 2 * x), 12) == (1, 1, 1)
    assert np.isnan(with_interval(paired(kendall_tau, np.ones(12), y), 12)).all()
    noisy = with_interval(paired(kendall_tau, x[:5], y[:5]), 5)
    assert noisy[2] - noisy[1] > high - low


@given(PAIRS)
@settings(deadline=None, max_examples=30)
def test_draws_done_at_once_are_those_of_scipy_one_by_one(pair: tuple[list[int], list[int]]) -> None:
    x, y = (np.array(values, float) for values in pair)
    rows = draws(len(x), 0, 20)
    for of, scipys in ((kendall_tau, stats.kendalltau), (spearman, stats.spearmanr)):
        one_by_one = [scipys(x[row], y[row]).statistic if np.ptp(x[row]) and np.ptp(y[row]) else np.nan for row in rows]
        np.testing.assert_allclose(of(x[rows], y[rows]), one_by_one, atol=1e-12)


def test_top_k_regret_by_hand() -> None:
    cost, truth = array(1, 2, 3, 4), array(0.5, 0.6, 0.9, 0.8)
    estimate = array(0.9, 0.8, 0.1, 0.7)
    # k=1: budgets 2, 3, 4 (one network alone is no choice): it trains the first, which has 0.5
    assert top_k_regret(estimate, truth, cost, 1) == pytest.approx(((0.6 - 0.5) + (0.9 - 0.5) + (0.9 - 0.5)) / 3)
    # k=2: budgets 3 and 4: it trains the first two, of which the better has 0.6
    assert top_k_regret(estimate, truth, cost, 2) == pytest.approx(0.3)
    assert top_k_regret(truth, truth, cost, 1) == 0
    assert np.isnan(top_k_regret(estimate, truth, cost, 4))
    assert top_k_regret(array(1, 1, 1, 1), truth, cost, 1) == pytest.approx((0.1 + 0.4 + 0.4) / 3)  # the cheapest


def test_hypervolume_loss_by_hand() -> None:
    cost, truth = np.exp(array(0, 1, 2)), array(0.0, 1.0, 2.0)  # reference (-0.04, 2.04)
    whole = 2.04 * 0.04 + 1.04 * 1.0 + 0.04 * 1.0
    second = 1.04 * 1.04  # which adds most alone, by rank as by truth
    assert hypervolume_loss(truth, truth, cost, 1) == pytest.approx(1 - second / whole)
    assert hypervolume_loss(10 * truth + 3, truth, cost, 3) == pytest.approx(0)
    cheapest = 2.04 * 0.04  # which an estimator that has the order wrong takes for the best
    assert hypervolume_loss(-truth, truth, cost, 1) == pytest.approx(1 - cheapest / whole)
    assert np.isnan(hypervolume_loss(truth, np.ones(3), cost, 1))


@given(PAIRS, st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_what_is_lost_is_never_negative(pair: tuple[list[int], list[int]], k: int) -> None:
    estimate, truth = (np.array(values, float) for values in pair)
    cost = np.arange(1.0, len(truth) + 1)
    for lost in (top_k_regret(estimate, truth, cost, k), hypervolume_loss(estimate, truth, cost, k)):
        assert np.isnan(lost) or lost >= -1e-12
    assert not top_k_regret(truth, truth, cost, k) > 0


def test_draws_without_a_value_are_left_out_of_an_interval() -> None:
    assert percentiles(array(np.nan, 1, 1, np.inf)) == (1, 1)
    assert np.isnan(percentiles(array(np.nan, np.nan))).all()
