"""How well estimates rank networks: correlations with bootstrap intervals, and what is lost by trusting them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from hwnas.stats.intervals import Array, OfRows
from hwnas.stats.pareto import hypervolume_2d

LEAST = 4  # networks; fewer rank in too few ways
K = 3
_BEYOND = 0.02  # of the range: how far behind the worst network the reference point lies
_CHUNK = 1 << 24  # pairs at once


def kendall_tau(x: ArrayLike, y: ArrayLike) -> Array:
    """Kendall's tau-b (1945) along the last axis; NaN where either is constant.

    All draws of a bootstrap at once, which is a hundred times quicker than scipy's kendalltau one by one; the tests
    hold the two against each other.
    """
    first, second = (np.asarray(values, np.float64) for values in (x, y))
    n = first.shape[-1]
    rows = first.reshape(-1, n), second.reshape(-1, n)
    step = max(1, _CHUNK // (n * n))
    parts = [_tau(rows[0][start:start + step], rows[1][start:start + step]) for start in range(0, len(rows[0]), step)]
    taus: Array = np.concatenate(parts).reshape(first.shape[:-1])
    return taus


def _tau(x: Array, y: Array) -> Array:
    signs = [np.sign(values[:, :, None] - values[:, None, :]).astype(np.int8) for values in (x, y)]
    agree = np.einsum("dij,dij->d", *signs, dtype=np.float64)
    pairs = np.count_nonzero(signs[0], axis=(1, 2)) * np.count_nonzero(signs[1], axis=(1, 2)).astype(np.float64)
    taus: Array = np.divide(agree, np.sqrt(pairs), out=np.full(len(x), np.nan), where=pairs > 0)
    return taus


def spearman(x: ArrayLike, y: ArrayLike) -> Array:
    """Spearman's rank correlation (1904; ties have their mean rank) along the last axis; NaN where one is constant.

    scipy's spearmanr warns of constant vectors and takes one pair at a time.
    """
    from scipy.stats import rankdata

    ranks = [rankdata(np.asarray(values, np.float64), axis=-1) for values in (x, y)]
    first, second = (values - values.mean(axis=-1, keepdims=True) for values in ranks)
    scale = np.sqrt((first**2).sum(axis=-1) * (second**2).sum(axis=-1))
    rho: Array = np.divide((first * second).sum(axis=-1), scale, out=np.full(scale.shape, np.nan), where=scale > 0)
    return rho


def paired(of: Callable[[Array, Array], Array], x: Array, y: Array) -> OfRows:
    """A correlation of `x` and `y` [n] as a statistic of rows."""
    return lambda rows: of(x[rows], y[rows])


def top_k_regret(estimate: Array, truth: Array, cost: Array, k: int = K) -> float:
    """Top-1 (a fraction, >= 0) lost at equal cost by training the `k` networks that an estimator likes best.

    Every network's cost is a budget if more than `k` networks keep it. The `k` networks within the budget with the
    highest estimates are trained (of equal estimates the cheaper). The best of them is compared with the best of all
    within the budget. The result is the mean over budgets; NaN where there is none.
    """
    order = np.lexsort((cost, -estimate))
    lost = []
    for budget in cost:
        inside = order[cost[order] <= budget]
        if len(inside) > k:
            lost.append(truth[inside].max() - truth[inside[:k]].max())
    return float(np.mean(lost)) if lost else float("nan")


def hypervolume_loss(estimate: Array, truth: Array, cost: Array, k: int = K) -> float:
    """Share (0 to 1) of the true front's hypervolume that the `k` networks chosen by an estimator miss.

    Hypervolume: area of true top-1 against log cost, from a point 2 % of the range behind the worst of each. Networks
    are chosen one after the other, always the network that adds most. Each estimate counts as the truth of the same
    rank, so that only the ranking matters.
    """
    from scipy.stats import rankdata

    where = np.log(cost)
    reference = (truth.min() - _BEYOND * np.ptp(truth), where.max() + _BEYOND * np.ptp(where))
    if reference[0] == truth.min() or reference[1] == where.max():
        return float("nan")
    looks = np.interp(rankdata(estimate), np.arange(1, len(truth) + 1), np.sort(truth))
    chosen: list[int] = []
    for _ in range(min(k, len(truth))):
        areas = [hypervolume_2d(looks[[*chosen, row]], where[[*chosen, row]], reference) for row in range(len(truth))]
        chosen.append(int(np.argmax(areas)))
    whole = hypervolume_2d(truth, where, reference)
    return 1 - hypervolume_2d(truth[chosen], where[chosen], reference) / whole
