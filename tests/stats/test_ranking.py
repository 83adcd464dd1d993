"""Rank correlations by hand, with ties, and of what is constant."""

from __future__ import annotations

import math

import pytest

from hwnas.stats import kendall_tau, spearman


def test_correlations_by_hand_with_ties_and_of_what_is_constant() -> None:
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx((5 - 1) / 6)
    assert kendall_tau([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(5 / math.sqrt(5 * 6))  # tau-b: one tie
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    for ranks in (kendall_tau, spearman):
        assert math.isnan(ranks([1, 1, 1], [1, 2, 3]))
