"""Decoding and predicting a batch, as a search that scans a space does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hwnas.latency.model import LatencyModel
from hwnas.space.search_space import SearchSpace
from synthetic import synthetic_table

BATCH = 20_000


@pytest.mark.parametrize("name", ["mnasnet_small", "mnasnet", "fused", "nas_bench_macro"])
def test_decode_and_predict(benchmark: Any, within: Any, name: str) -> None:
    space = SearchSpace.load(name, channels=3, classes=10)
    model = LatencyModel.fit(synthetic_table(space), space)
    rng = np.random.default_rng(1)
    # every round sees architectures that no round before it has seen
    benchmark.pedantic(model.predict, setup=lambda: ((space.sample(rng, BATCH),), {}), rounds=5)
    within(benchmark, 1 / 20_000, per=BATCH)
