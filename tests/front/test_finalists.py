"""The choice of finalists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwnas.errors import StudyError
from hwnas.front.finalists import choose_finalists, doubts, finalists_of, reward_winner
from hwnas.networks.network import FoundNetwork
from hwnas.space.architecture import Architecture


def trial(id: str, top1: float | None, ms: float | None, **changes: Any) -> dict[str, Any]:
    return {"id": id, "state": "COMPLETE", "outcome": "evaluated", "top1_proxy": top1, "latency_ms_predicted": ms,
            "latency_ms_predicted_low": ms, "latency_ms_predicted_high": ms, "reward": None,
            "feasible": True, **changes}


def ids(rows) -> list[str]:
    return [row["id"] for row in rows]


def front(n: int) -> list[dict[str, Any]]:
    return [trial(f"f{i}", 0.5 + i / 100, 0.1 * 1.1**i) for i in range(n)]


def test_finalists_are_spread_over_log_latency_with_the_rewards_winner_among_them():
    chosen = choose_finalists(front(50), 5)
    assert ids(chosen) == ["f9", "f19", "f29", "f39", "f49"]
    crowd = [trial(f"c{i}", 0.90 + i / 1000, 1.0 + i / 1000) for i in range(20)]
    chosen = ids(choose_finalists([trial("fast", 0.5, 0.01), trial("mid", 0.7, 0.1), *crowd], 3))
    assert {"fast", "mid", "c19"} == set(chosen)
    rows = [trial("best", 0.9, 0.1), trial("second", 0.8, 0.2), trial("third", 0.7, 0.3)]
    assert ids(choose_finalists(rows, 2)) == ["best", "second"]
    assert ids(choose_finalists(rows, 5)) == ["best", "second", "third"]
    rows = [*front(50), trial("winner", 0.5, 0.3, reward=0.9), trial("loser", 0.6, 0.25, reward=0.1)]
    chosen = ids(choose_finalists(rows, 5))
    assert "winner" in chosen
    assert len(chosen) == 5
    assert reward_winner(rows) == "winner"


def test_a_cost_of_nothing_is_a_cost():
    rows = [trial(str(macs), 0.5 + macs / 10, 0.1, objectives="macs", macs=macs) for macs in range(4)]
    assert ids(choose_finalists(rows, 2)) == ["3", "0"]  # as fast: the most accurate first


@pytest.mark.parametrize("changes", [
    {"state": "FAIL", "outcome": "failed"}, {"state": "PRUNED", "outcome": "infeasible"}, {"outcome": "duplicate"},
    {"top1_proxy": None}, {"top1_proxy": float("nan")}, {"latency_ms_predicted": None}, {"feasible": False}])
def test_trials_that_are_no_result_are_left_out(changes: dict[str, Any]) -> None:
    rows = [trial("good", 0.5, 0.2), {**trial("other", 0.9, 0.1), **changes}]
    assert ids(choose_finalists(rows, 5)) == ["good"]
    with pytest.raises(StudyError, match="no network was trained and scored"):
        choose_finalists([trial("a", None, 0.1)], 5)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=40), st.integers(1, 8),
       st.sampled_from([None, 1.0]))
def test_there_are_k_and_the_most_accurate_is_among_them(points, k, cap_ms):
    rows = [trial(str(i), top1, ms) for i, (top1, ms) in enumerate(points) if cap_ms is None or ms <= cap_ms]
    if not rows:
        return
    chosen = choose_finalists(rows, k, cap_ms)
    assert len(chosen) == len(set(ids(chosen))) == min(k, len(rows))
    assert max(row["top1_proxy"] for row in chosen) == max(row["top1_proxy"] for row in rows)
    latencies = [row["latency_ms_predicted"] for row in chosen]
    assert latencies == sorted(latencies)


def test_what_the_model_believes_is_chosen_and_not_a_lucky_value() -> None:
    rows = [trial("lucky", 0.95, 0.2, top1_estimated=0.70, reward=0.95),
            trial("sound", 0.80, 0.2, top1_estimated=0.79, reward=0.80),
            trial("slow", 0.90, 0.4, top1_estimated=0.78, reward=0.80)]
    assert ids(choose_finalists(rows, 1)) == ["sound"]
    assert reward_winner(rows) == "sound"
    unmodelled = [{**row, "top1_estimated": None} for row in rows]
    assert ids(choose_finalists(unmodelled, 1)) == ["lucky"] == [reward_winner(unmodelled)]


def test_the_reward_takes_the_only_place_where_the_search_was_for_it_and_never_that_of_the_most_accurate() -> None:
    rows = [trial("quick", 0.80, 0.2, reward=0.95), trial("best", 0.90, 2.0, reward=0.85)]
    assert ids(choose_finalists(rows, 1, cap_ms=2.5)) == ["best"]
    assert ids(choose_finalists(rows, 1, cap_ms=2.5, by_reward=True)) == ["quick"]
    near = [*rows, trial("near", 0.89, 2.4, reward=0.5), trial("middle", 0.85, 0.9, reward=0.5)]
    assert "best" in ids(choose_finalists(near, 2, cap_ms=2.5))


def test_finalists_carry_what_the_search_knew() -> None:
    one = Architecture((("ds_r1_k3_s1_c16",),), 16, 1, 0, "relu", 8, 1, 10)
    rows = [trial(one.id, 0.8, 0.1, reward=0.7, top1_estimated=0.75, top1_estimated_low=0.7, top1_estimated_high=0.79)]
    (found,) = finalists_of(rows, lambda row: {one.id: FoundNetwork(one)}[row["id"]], 3, "t", "h")
    assert (found.id, found.top1_proxy, found.latency_ms_predicted, found.reward, found.reward_winner) == (
        one.id, 0.8, 0.1, 0.7, True)
    assert (found.top1_estimated, found.top1_estimated_low, found.top1_estimated_high) == (0.75, 0.7, 0.79)
    assert (found.network.shape.image_size, found.macs, found.target, found.host) == (8, one.macs, "t", "h")


def test_with_a_cap_one_network_shows_what_it_buys() -> None:
    quick = [trial(f"q{i}", 0.60 + i / 100, 0.12 + i / 100) for i in range(5)]
    slow = [trial("poor", 0.5, 1.3), trial("better", 0.55, 1.25), trial("middle", 0.56, 0.8)]
    assert "better" not in ids(choose_finalists([*quick, *slow], 4))
    chosen = ids(choose_finalists([*quick, *slow], 4, cap_ms=1.5))
    assert len(chosen) == 4
    assert {"better", "q4"} <= set(chosen)
    assert ids(choose_finalists([*quick, *slow], 1, cap_ms=1.5)) == ["q4"]
    assert ids(choose_finalists([*quick, *slow], 2, cap_ms=0.17)) == ["q2", "q4"]  # none is near a cap far above


def test_with_a_cap_finalists_stand_over_its_whole_range_though_small_networks_learn_faster() -> None:
    crowd = [trial(f"c{i}", 0.60 + i / 1000, 0.12 + i / 1000) for i in range(30)]
    larger = [trial("a", 0.52, 0.25), trial("b", 0.50, 0.5), trial("b2", 0.51, 0.55), trial("d", 0.40, 1.3)]
    chosen = choose_finalists([*crowd, *larger], 4, cap_ms=1.5)
    assert ids(chosen) == ["c29", "a", "b2", "d"]
    span = chosen[-1]["latency_ms_predicted"] / chosen[0]["latency_ms_predicted"]
    assert span > (1.5 / 0.12) ** 0.5
    priced = [{**row, "objectives": "latency_ms size_mb", "size_mb_predicted": row["latency_ms_predicted"]}
              for row in [*crowd, *larger]]
    assert len(choose_finalists(priced, 4, cap_ms=1.5)) == 4


@pytest.mark.parametrize(("high", "chosen"), [(0.63, ["mid", "dear"]), (0.61, ["quick", "mid"])])
def test_a_network_near_the_cap_is_chosen_within_its_noise_and_not_where_it_is_clearly_worse(high, chosen):
    rows = [trial(name, top1, ms, top1_estimated=top1, top1_estimated_low=low, top1_estimated_high=end)
            for name, top1, ms, low, end in (("quick", 0.60, 0.1, 0.58, 0.61), ("mid", 0.64, 0.8, 0.62, 0.66),
                                             ("dear", 0.59, 1.3, 0.55, high))]
    assert ids(choose_finalists(rows, 2, cap_ms=1.5)) == chosen


def found(trials: list[dict[str, Any]]) -> list:
    return [SimpleNamespace(latency_ms_predicted=row["latency_ms_predicted"]) for row in trials]


def test_estimates_within_their_noise_and_a_cap_that_nobody_uses_are_doubted():
    alike = [trial(f"n{i}", 0.55 + (i % 3) / 100, 0.1 + i / 100, top1_std=0.022) for i in range(12)]
    line, = doubts(alike, found(alike[:2]), None)
    assert "differ by 0.9 points" in line
    assert "their own error of 2.2" in line
    apart = [trial(f"n{i}", 0.4 + i / 50, 0.1 + i / 100, top1_std=0.022) for i in range(12)]
    assert doubts(apart, found(apart[:2]), None) == []
    assert doubts(alike[:3], found(alike[:2]), None) == []
    assert doubts([{**row, "top1_std": 0.0} for row in alike], found(alike[:2]), None) == []  # not known
    rows = [trial(f"n{i}", 0.4 + i / 50, 0.1 + i / 100) for i in range(6)]
    line, = doubts(rows, found(rows), 1.5)
    assert "budget.latency_ms=1.5: the slowest is predicted at 0.15 ms" in line
    assert doubts(rows, found(rows), 0.25) == []
