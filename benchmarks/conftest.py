"""Every benchmark states its limit: it is kept in the saved results, and over it the benchmark fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Within = Callable[[Any, float], None]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No benchmark reads or writes the user's tables."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))


@pytest.fixture
def within() -> Within:
    """`within(benchmark, seconds, per)`: the median round, divided by `per` units of work, is at most `seconds`."""

    def check(benchmark: Any, seconds: float, per: int = 1) -> None:
        median = benchmark.stats.stats.median / per
        benchmark.extra_info.update(limit_s=seconds, median_s=median)
        assert median <= seconds, f"{median:.4g} s, limit {seconds:g} s"

    return check
