"""What the experiments that hold searches against each other compute."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.race.arms import Arm, levels, speeds

EDGES = np.log([1.0, 2.0, 4.0, 8.0])


@pytest.mark.parametrize(("latency_ms", "top1", "expected"), [
    ([1.0], [0.9], [0.9, 0.9, 0.9]),
    ([2.0], [0.9], [0.1, 0.9, 0.9]),
    ([0.5, 4.0], [0.6, 0.8], [0.6, 0.6, 0.8]),
    ([2 * 2 ** 0.5], [0.9], [0.1, 0.5, 0.9]),  # half of a part, by the logarithm
    ([1.0, 3.0], [0.9, 0.5], [0.9, 0.9, 0.9]),  # a slower one that is less accurate
    ([9.0], [0.9], [0.1, 0.1, 0.1]),
    ([4.0, 1.0], [0.8, 0.05], [0.1, 0.1, 0.8]),  # below chance; in any order
])
def test_the_level_of_a_part_is_the_best_top1_at_no_more_latency(latency_ms, top1, expected):
    assert levels(np.array(latency_ms), np.array(top1), EDGES, 0.1) == pytest.approx(expected)


IMAGES = np.arange(1000)


def arm(*networks: tuple[float, int]) -> Arm:
    """An arm whose networks (ms, n) answer the first n of IMAGES rightly."""
    return Arm(np.array([at_ms for at_ms, _ in networks]), np.array([n > IMAGES for _, n in networks]))


def test_the_speed_at_a_rivals_top1_is_that_of_the_fastest_network_that_is_surely_no_less_accurate() -> None:
    rivals = arm((1.0, 800), (8.0, 900), (6.0, 700))
    ours = arm((0.5, 802), (0.25, 790), (2.0, 910))
    fast, middle, slow = np.exp(speeds(ours, rivals, IMAGES))
    assert fast == pytest.approx(2.0), "the fastest is one point behind"
    assert np.isnan(middle), "no rival is on the front there"
    assert slow == pytest.approx(4.0)
    assert np.exp(speeds(arm((0.1, 500)), rivals, IMAGES)[2]) == pytest.approx(1.0), \
        "none is as good: the slowest of both counts"
