"""What the study is told, and caps that nothing can meet."""

from __future__ import annotations

import numpy as np
import pytest
from study_fixtures import TinySpace, predict

from hwnas.errors import BudgetError
from hwnas.study.objective import Objective, check_cap, fastest, upper_ms


def test_objectives_say_what_the_study_is_told() -> None:
    assert Objective().directions == ("maximize", "minimize")
    assert Objective().values(0.7, 3.0) == (0.7, 3.0)
    single = Objective("cap")
    assert (single.directions, single.values(0.8, 4.0)) == (("maximize",), (0.8,))


def test_upper_quantile_scales_the_upper_half_width() -> None:
    found = predict(np.array([[0, 0, 0, 0, 0, 0]]))
    assert upper_ms(found, 0.95) == pytest.approx(1.1)
    assert upper_ms(found, 0.5) == pytest.approx(1.0)
    assert upper_ms(found, 0.9) == pytest.approx(1 + 0.1 * 1.281552 / 1.644854)


def test_a_cap_that_nothing_meets_names_the_fastest() -> None:
    codes, latency_ms = fastest(TinySpace(5), predict, 0.95)
    assert codes.tolist() == [0] * 15
    assert latency_ms == pytest.approx(1.1)
    check_cap(TinySpace(), predict, 1.11, 0.95)
    with pytest.raises(BudgetError, match=r"budget.latency_ms=1 is below .*: 1.1 ms \(10% above.* at least 1\.10\d"):
        check_cap(TinySpace(), predict, 1.0, 0.95)
