"""Intervals against textbooks and against drawing one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hwnas.stats import bootstrap_mean, student_t, wilson


def test_intervals_are_those_of_the_textbook_and_of_scipy():
    low, high = wilson(10, 20)  # Wilson 1927 / Newcombe 1998: 0.2993 to 0.7007
    assert (round(low, 4), round(high, 4)) == (0.2993, 0.7007)
    assert wilson(20, 20)[1] == 1.0
    assert wilson(0, 20)[0] == 0.0
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)
    from scipy.stats import binomtest, t

    for n, hits in ((1, 0), (1, 1), (20, 7), (360, 351), (10_000, 9_871)):
        theirs = binomtest(hits, n).proportion_ci(0.9, "wilson")
        assert wilson(hits, n, 0.9) == (theirs.low, theirs.high)
    for freedom in (1, 2, 11, 299):
        for share in (0.95, 0.025):
            assert student_t(share, freedom) == pytest.approx(t.ppf(share, freedom), rel=1e-12)
    assert math.isnan(student_t(0.95, 0))


def test_a_mean_from_counts_agrees_with_drawing_each_value() -> None:
    values = np.repeat([-1.0, 0.0, 0.5], [30, 400, 70])
    mean, low, high = bootstrap_mean([-1, 0, 0.5], [30, 400, 70], level=0.9)
    drawn = values[np.random.default_rng(1).integers(0, 500, (4000, 500))].mean(axis=1)
    assert mean == pytest.approx(values.mean())
    assert (low, high) == (pytest.approx(np.quantile(drawn, 0.05), abs=0.003),
                           pytest.approx(np.quantile(drawn, 0.95), abs=0.003))
