"""The reward of MnasNet's paper, what the study is told, and caps that nothing can meet."""

from __future__ import annotations

import numpy as np
import pytest
from study_fixtures import TinySpace, predict

from hwnas.errors import BudgetError
from hwnas.study.objective import Objective, check_cap, upper_ms


def test_soft_reward_trades_on_both_sides_and_hard_reward_cares_above_the_target_only() -> None:
    """The paper chose w so that twice the latency buys 5 % relative accuracy."""
    soft, hard = Objective(78.0), Objective(1.0, "reward", "hard")
    assert soft.reward(1.05, 156.0) == pytest.approx(1.0, abs=2e-3)
    assert hard.reward(np.array([0.6, 0.6, 0.6]), np.array([0.5, 1.0, 2.0])).tolist() == [0.6, 0.6, 0.3]
    assert soft.reward(0.75, 78.0) == 0.75
    assert soft.reward(0.75, 156.0) == pytest.approx(0.75 * 2**-0.07)
    assert soft.reward(0.75, 39.0) == pytest.approx(0.75 * 2**0.07)


def test_objectives_say_what_the_study_is_told() -> None:
    assert Objective(2.0).directions == ("maximize", "minimize")
    assert Objective(2.0).values(0.7, 3.0) == (0.7, 3.0)
    single = Objective(2.0, "reward", "hard")
    assert (single.directions, single.values(0.8, 4.0)) == (("maximize",), (0.4,))
    assert str(single) == "reward, hard reward at 2 ms"


def test_no_reward_is_told_before_its_target_is_known() -> None:
    open_target = Objective(None)
    with pytest.raises(ValueError, match="T of the reward is not known yet"):
        open_target.reward(0.5, 1.0)
    assert open_target.at(2.0).reward(0.5, 1.0) == Objective(2.0).reward(0.5, 1.0)


def test_upper_quantile_scales_the_upper_half_width() -> None:
    found = predict(np.array([[0, 0, 0, 0, 0, 0]]))
    assert upper_ms(found, 0.95) == pytest.approx(1.1)
    assert upper_ms(found, 0.5) == pytest.approx(1.0)
    assert upper_ms(found, 0.9) == pytest.approx(1 + 0.1 * 1.281552 / 1.644854)


def test_a_cap_that_nothing_meets_names_the_fastest() -> None:
    check_cap(TinySpace(5), predict, 1.11, 0.95)
    with pytest.raises(BudgetError, match=r"budget.latency_ms=1 is below .*: 1.1 ms \(10% above.* at least 1\.10\d"):
        check_cap(TinySpace(5), predict, 1.0, 0.95)
