"""The simulation of many workers: what it must come to where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest


def test_a_simulation_comes_to_what_arithmetic_says() -> None:
    from benchmarks.many_workers import Service, simulated

    free = Service("postgresql", 100, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "here")
    rate, shares = simulated(free, 50, [10.0], 2)
    assert rate == pytest.approx(3600 * 50 / 10, rel=0.05)
    assert shares == {"training": 1.0, "sampler": 0.0, "reading": 0.0, "database": 0.0}

    rate, shares = simulated(replace(free, locked_s=1.0), 50, [10.0], 2)
    assert rate == pytest.approx(3600, rel=0.01)  # one at a time
    assert shares["database"] == pytest.approx(0.8, abs=0.05)  # 50 in the circle, of which 10 train

    rate, _ = simulated(replace(free, server_s=1.0), 50, [10.0], 2)
    assert rate == pytest.approx(2 * 3600, rel=0.01)  # two cores

    rate, shares = simulated(replace(free, sampler_s=10.0), 50, [10.0], 2)
    assert rate == pytest.approx(3600 * 50 / 20, rel=0.05)  # each worker has a core of its own
    assert shares["sampler"] == pytest.approx(0.5, abs=0.02)

    one_core = simulated(replace(free, sampler_s=10.0), 50, [10.0], 1, shared=True)[0]
    assert one_core == pytest.approx(360, rel=0.02)
