"""Rank correlations against scipy and by hand, and the intervals that shipped certificates have of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hwnas.stats import draws, kendall_tau, paired, percentiles, spearman, with_interval

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


def test_intervals_hold_the_value_are_the_same_again_and_end_where_all_agrees():
    x = np.arange(12.0)
    y = x + array(0, 3, -2, 1, 0, -3, 2, 2, -1, 0, 1, -2)
    value, low, high = with_interval(paired(kendall_tau, x, y), 12)
    assert 0 < low < value < high <= 1
    assert with_interval(paired(kendall_tau, x, y), 12) == (value, low, high)
    assert with_interval(paired(kendall_tau, x, 2 * x), 12) == (1, 1, 1)
    assert np.isnan(with_interval(paired(kendall_tau, np.ones(12), y), 12)).all()
    noisy = with_interval(paired(kendall_tau, x[:5], y[:5]), 5)
    assert noisy[2] - noisy[1] > high - low
    assert percentiles(array(np.nan, 1, 1, np.inf)) == (1, 1)
    assert np.isnan(percentiles(array(np.nan, np.nan))).all()


@given(PAIRS)
@settings(deadline=None, max_examples=30)
def test_draws_done_at_once_are_those_of_scipy_one_by_one(pair: tuple[list[int], list[int]]) -> None:
    x, y = (np.array(values, float) for values in pair)
    rows = draws(len(x), 0, 20)
    for of, scipys in ((kendall_tau, stats.kendalltau), (spearman, stats.spearmanr)):
        one_by_one = [scipys(x[row], y[row]).statistic if np.ptp(x[row]) and np.ptp(y[row]) else np.nan for row in rows]
        np.testing.assert_allclose(of(x[rows], y[rows]), one_by_one, atol=1e-12)
