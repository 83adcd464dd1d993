"""Fronts against a check of every pair, layers as a partition, hypervolumes computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from experiments.common import hypervolume_2d
from hwnas.stats import layers, non_dominated

POINTS = arrays(np.float64, st.tuples(st.integers(0, 25), st.just(2)), elements=st.integers(0, 6).map(float))


def pairwise(points: np.ndarray, minimise: tuple[bool, ...]) -> list[bool]:
    losses = np.where(minimise, points, -points)
    return [not any((other <= mine).all() and (other < mine).any() for other in losses) for mine in losses]


@given(POINTS, st.tuples(st.booleans(), st.booleans()))
def test_front_is_what_no_pair_contradicts(points: np.ndarray, minimise: tuple[bool, bool]) -> None:
    assert non_dominated(points, minimise).tolist() == pairwise(points, minimise)


def test_equal_points_stand_together_and_nan_never_in_any_number_of_objectives():
    points = [(0.9, 2.0), (0.9, 2.0), (0.8, 3.0), (float("nan"), 0.1), (0.5, 1.0)]
    assert non_dominated(points, (False, True)).tolist() == [True, True, False, False, True]
    points = np.random.default_rng(0).integers(0, 5, (200, 3)).astype(float)
    assert non_dominated(points, (True, False, True)).tolist() == pairwise(points, (True, False, True))
    with pytest.raises(ValueError, match=r"shape \[n, 2\]"):
        non_dominated([1.0, 2.0], (False, True))


@given(POINTS)
def test_layers_part_the_points_in_order(points):
    found = layers(points, (False, True))
    assert sorted(index for layer in found for index in layer) == list(range(len(points)))
    for number, layer in enumerate(found):
        left = np.concatenate(found[number:])
        assert sorted(left[non_dominated(points[left], (False, True))]) == sorted(layer)
    assert [layer.tolist() for layer in layers([(1.0, 1.0), (np.nan, 0.0), (0.5, 2.0)], (False, True))] == [[0], [2]]


def test_hypervolume_by_hand() -> None:
    # Two steps: 1..2 ms at 0.5 and 2..4 ms at 0.8; a dominated and an outlying point add nothing.
    assert hypervolume_2d([0.5, 0.8, 0.4, 0.9], [1, 2, 3, 5], (0.0, 4.0)) == pytest.approx(0.5 + 2 * 0.8)
    assert hypervolume_2d([0.5], [1], (0.5, 4.0)) == 0.0
    assert hypervolume_2d([], [], (0.0, 1.0)) == 0.0
