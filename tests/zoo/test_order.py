"""The order in which networks are timed, on made-up zoos: the front is there after a fifth of the timings."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.stats import non_dominated
from hwnas.zoo.order import CandidatePairs, choose_opening, choose_wave


def made_up_zoo(seed: int, n: int = 150, deployments: int = 2) -> tuple[CandidatePairs, np.ndarray]:
    """Networks of 15 families: top-1 and latency grow with MACs, and differ by family, deployment and chance."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0, 1, n)
    features = np.column_stack([4 * size + 0.3 * rng.standard_normal(n), 3 * size + 0.5 * rng.standard_normal(n),
                                2 * size + 0.5 * rng.standard_normal(n), rng.choice([5.1, 5.4, 5.7], n)])
    family = rng.integers(0, 15, n)
    top1 = 55 + 25 * size**0.7 + 2 * rng.standard_normal(15)[family] + rng.standard_normal(n)
    network, deployment = np.repeat(np.arange(n), deployments), np.tile(np.arange(deployments), n)
    log_ms = (0.7 * features[:, 0] + 0.3 * features[:, 1] + 0.3 * rng.standard_normal(15)[family])[network]
    log_ms += rng.standard_normal(deployments)[deployment] + 0.1 * rng.standard_normal(len(network))
    log_ms += 0.2 * rng.standard_normal((15, deployments))[family[network], deployment]
    return CandidatePairs(top1[network], features[network], family[network], network, deployment,
                          deployment % 2), log_ms


def area(pairs: CandidatePairs, log_ms: np.ndarray, timed: np.ndarray) -> float:
    """Hypervolume of what was timed, over both fronts."""
    total, end = 0.0, log_ms.max()
    for front in {*pairs.front}:
        best = pairs.top1.min() - 1
        own = timed[pairs.front[timed] == front]
        own = own[np.argsort(log_ms[own])]
        for at, until in zip(own, np.append(log_ms[own[1:]], end), strict=True):
            best = max(best, pairs.top1[at])
            total += (best - pairs.top1.min() + 1) * (until - log_ms[at])
    return total


def front_of(pairs: CandidatePairs, log_ms: np.ndarray, timed: np.ndarray) -> set[int]:
    fronts = set[int]()
    for front in {*pairs.front}:
        own = timed[pairs.front[timed] == front]
        fronts |= {*own[non_dominated(np.column_stack([log_ms[own], pairs.top1[own]]), [True, False])].tolist()}
    return fronts


def timed_in_order(pairs: CandidatePairs, log_ms: np.ndarray, budget: int) -> np.ndarray:
    every = np.arange(len(log_ms))
    timed = every[np.isin(pairs.network, choose_opening(pairs, every, 6))]
    while len(timed) < budget:
        wave = choose_wave(pairs, timed, log_ms[timed], np.setdiff1d(every, timed), min(12, budget - len(timed)))
        if not wave:
            break
        timed = np.append(timed, wave)
    return timed


@pytest.mark.parametrize(("n", "deployments", "seed"), [(300, 1, 0), (300, 1, 4), (200, 2, 1), (200, 2, 2)])
def test_the_front_is_there_after_a_fifth_of_the_timings(n: int, deployments: int, seed: int) -> None:
    pairs, log_ms = made_up_zoo(seed, n, deployments)
    every, budget = np.arange(len(log_ms)), len(log_ms) // 5
    timed = timed_in_order(pairs, log_ms, budget)
    front, whole = front_of(pairs, log_ms, every), area(pairs, log_ms, every)
    assert len(timed) <= budget
    assert len(front & {*timed.tolist()}) >= 0.85 * len(front)
    assert area(pairs, log_ms, timed) > 0.995 * whole
    rng = np.random.default_rng(seed)
    others = [rng.permutation(every)[:budget], np.argsort(-pairs.top1 / np.exp(pairs.features[:, 0]))[:budget]]
    for other in others:
        assert area(pairs, log_ms, timed) > area(pairs, log_ms, other)
        assert len(front & {*timed.tolist()}) > len(front & {*other.tolist()})


def test_what_is_sure_to_be_slower_than_the_cap_is_not_timed() -> None:
    pairs, log_ms = made_up_zoo(1)
    every, timed = np.arange(len(log_ms)), timed_in_order(pairs, log_ms, 40)
    cap_ms = float(np.exp(np.quantile(log_ms, 0.3)))
    wave = choose_wave(pairs, timed, log_ms[timed], np.setdiff1d(every, timed), 20, cap_ms)
    assert wave
    assert (log_ms[wave] < np.log(cap_ms)).mean() > 0.6
    assert not choose_wave(pairs, timed, log_ms[timed], np.setdiff1d(every, timed), 20, 1e-9)
    assert not choose_wave(pairs, timed, log_ms[timed], np.array([], int), 20)


def test_the_opening_is_spread_over_macs() -> None:
    pairs, _ = made_up_zoo(2)
    opening = choose_opening(pairs, np.arange(len(pairs.top1)), 5)
    cost = pairs.features[[2 * network for network in opening], 0]
    assert list(cost) == sorted(cost)
    assert cost[-1] - cost[0] > 0.6 * np.ptp(pairs.features[:, 0])
    assert choose_opening(pairs, np.array([4, 5]), 5) == [2]
