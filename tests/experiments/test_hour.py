"""What the experiments that hold searches against each other compute."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.hour.run import levels

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
def test_the_level_of_a_part_is_the_best_top1_at_no_more_latency(latency_ms: list[float], top1: list[float],
                                                                 expected: list[float]) -> None:
    assert levels(np.array(latency_ms), np.array(top1), EDGES, 0.1) == pytest.approx(expected)
