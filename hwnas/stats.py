"""Statistics: intervals, Pareto fronts, and how well estimates rank networks.

Intervals are Wilson's for a share, percentiles of bootstrap draws, and conformal ones for held-out errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwnas.lazy import scipy

Array = NDArray[np.float64]
Z90 = 1.6449  # two-sided 90 % of a normal, in standard deviations
LEVEL = 0.95


def wilson(n_correct: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Return Wilson's score interval of a fraction `n_correct / n`; Wilson, JASA 22 (1927)."""
    if n < 1 or not 0 <= n_correct <= n:
        raise ValueError(f"need 0 <= n_correct <= n and n >= 1, got {n_correct} of {n}")
    # scipy.stats has it too, but takes a second to import.
    share, z = n_correct / n, scipy.special.ndtri(0.5 + 0.5 * level)
    width = 2 * (n + z**2)
    centre, half = (2 * n * share + z**2) / width, z / width * np.sqrt(4 * n * share * (1 - share) + z**2)
    return float(centre - half) if n_correct else 0.0, float(centre + half) if n_correct < n else 1.0


@cache
def student_t(share: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees, to twelve digits; NaN if `freedom` is below 1.

    The finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4) is inverted by bisection
    over the angle atan(t / sqrt(freedom)). It needs no scipy: a device has numpy and a runtime alone.
    """
    if freedom < 1:
        return math.nan
    low, high, inside = 0.0, math.pi / 2, abs(2 * share - 1)
    # Until no float is between the two ends.
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (angle, high) if _within(angle, freedom) < inside else (low, angle)
    return math.copysign(math.sqrt(freedom) * math.tan(low), share - 0.5)


def _within(angle: float, freedom: int) -> float:
    """Return the probability that t is within ± sqrt(freedom) tan(angle)."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for step in range(2 + odd, freedom - 1, 2):
        term *= (step - 1) / step * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def paired_interval(wins: int, losses: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the interval of the difference of two shares over the same `n` things. The first share has `wins` of them
    alone, the second `losses`.

    Each end is the wider one of two intervals. One is Tango's score interval (Statistics in Medicine 17, 1998). The
    other inverts McNemar's exact test, by Clopper and Pearson's interval of the share of wins among the things that
    differ. So 0 is outside only if the exact test says so too, however few differ.
    """
    if n < 1 or wins < 0 or losses < 0 or wins + losses > n:
        raise ValueError(f"need wins and losses among n >= 1, got {wins} and {losses} of {n}")
    z, middle = float(scipy.special.ndtri(0.5 + 0.5 * level)), (wins - losses) / n

    def excess(difference: float) -> float:
        """Return the score statistic of a difference; it falls as the difference rises."""
        # `shared` is the larger root of a quadratic equation: the most likely share of losses for this difference.
        b = -(wins + losses) + (2 * n - wins + losses) * difference
        shared = (math.sqrt(max(0.0, b * b + 8 * n * losses * difference * (1 - difference))) - b) / (4 * n)
        variance = n * (2 * shared + difference * (1 - difference))
        return (wins - losses - n * difference) / math.sqrt(max(variance, 1e-12))

    # Tango's interval has the differences with a statistic of at most z standard deviations.
    low = _root(lambda d: excess(d) - z, -1.0, middle)
    high = _root(lambda d: excess(d) + z, middle, 1.0)
    differ, tail = wins + losses, 0.5 - 0.5 * level
    if differ:  # Clopper and Pearson's ends are quantiles of the beta distribution
        least = scipy.special.betaincinv(wins, losses + 1, tail) if wins else 0.0
        most = scipy.special.betaincinv(wins + 1, losses, 1 - tail) if losses else 1.0
        low, high = min(low, (2 * least - 1) * differ / n), max(high, (2 * most - 1) * differ / n)
    return float(low), float(high)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the point at which a falling function crosses 0, by bisection; an end if it does not cross."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def paired_difference(first: NDArray[np.bool_], second: NDArray[np.bool_], *, confidence: float = LEVEL
                      ) -> tuple[float, float, float]:
    """Return the mean of `first - second` over images, with its interval (`paired_interval`): (mean, low, high).

    Both arrays [n] say for each image whether the answer is right, in the same order.
    """
    if first.shape != second.shape or first.ndim != 1 or len(first) == 0:
        raise ValueError(f"need two vectors over the same images, got {first.shape} and {second.shape}")
    wins, losses = int((first & ~second).sum()), int((second & ~first).sum())
    return ((wins - losses) / len(first), *paired_interval(wins, losses, len(first), confidence))


def binomial_std(share: float, n: int) -> float:
    """Return the standard deviation of a share of `n` images, never 0 (Agresti and Coull, 1998)."""
    centre = (share * n + 2) / (n + 4)
    return float((centre * (1 - centre) / (n + 4)) ** 0.5)


def conformal_quantile(scores: np.ndarray, q: float) -> float:
    """Return the finite-sample quantile of held-out scores. For q of 1/2 or more the rank is rounded up, for smaller q
    it is rounded down."""
    ordered, n = np.sort(scores), len(scores)
    rank = np.ceil((n + 1) * q) if q >= 0.5 else np.floor((n + 1) * q)
    return float(ordered[int(np.clip(rank - 1, 0, n - 1))])


def percentiles(values: Array, level: float = LEVEL) -> tuple[float, float]:
    """Return the ends of the middle `level` of bootstrap draws. Draws that are not finite are left out; both ends are
    NaN if no draw is left."""
    usable = values[np.isfinite(values)]
    if not len(usable):
        return np.nan, np.nan
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_mean(values: ArrayLike, counts: ArrayLike, *, level: float = LEVEL, seed: int = 0
                   ) -> tuple[float, float, float]:
    """Return the mean of `values` [k], each of which occurs `counts` [k] times, with its percentile interval.

    This suits few different values, such as right and wrong answers to images. The resamples are drawn as multinomial
    counts, which is exact, and quick for any set. Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch.
    13.
    """
    weights = np.asarray(counts, np.float64)
    n = int(weights.sum())
    drawn = np.random.default_rng(seed).multinomial(n, weights / n, size=10_000)
    low, high = percentiles(drawn @ np.asarray(values, np.float64) / n, level)
    return float(np.dot(values, weights) / n), low, high


def _losses(points: ArrayLike, minimise: Sequence[bool]) -> NDArray[np.float64]:
    values = np.asarray(points, dtype=np.float64)
    if values.size == 0:
        return np.empty((0, len(minimise)))
    if values.ndim != 2 or values.shape[1] != len(minimise):
        raise ValueError(f"points must have shape [n, {len(minimise)}], got {values.shape}")
    return np.where(np.asarray(minimise, dtype=bool), values, -values)


def non_dominated(points: ArrayLike, minimise: Sequence[bool]) -> NDArray[np.bool_]:
    """Return a mask [n] of the points [n, k] that no other point dominates.

    `minimise[j]`: in column j less is better. A point dominates another if it is nowhere worse and somewhere better.
    Of equal points therefore all are on the front, or none is. A point with a NaN is never on the front and dominates
    nothing.
    """
    losses = _losses(points, minimise)
    usable = ~np.isnan(losses).any(axis=1)
    mask = np.zeros(len(losses), dtype=bool)
    rest = np.flatnonzero(usable)
    rest = rest[np.lexsort(losses[rest].T[::-1])]
    # In lexicographic order nothing later can dominate the first point of the rest, so it is on the front.
    while len(rest):
        first = losses[rest[0]]
        equal = (losses[rest] == first).all(axis=1)
        mask[rest[equal]] = True
        rest = rest[(losses[rest] < first).any(axis=1) & ~equal]
    return mask


def layers(points: ArrayLike, minimise: Sequence[bool]) -> list[NDArray[np.intp]]:
    """Return the indices of the front, then of the front of the rest, and so on. Points with a NaN are in none."""
    losses = _losses(points, minimise)
    rest = np.flatnonzero(~np.isnan(losses).any(axis=1))
    fronts = []
    while len(rest):
        front = non_dominated(losses[rest], [True] * losses.shape[1])
        fronts.append(rest[front])
        rest = rest[~front]
    return fronts


def kendall_tau(x: ArrayLike, y: ArrayLike) -> float:
    """Return Kendall's tau-b (1945); NaN if `x` or `y` is constant."""
    return float(scipy.stats.kendalltau(x, y).statistic)


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's rank correlation (1904; ties have their mean rank); NaN if `x` or `y` is constant."""
    is_constant = np.ptp(np.asarray(x)) == 0 or np.ptp(np.asarray(y)) == 0  # scipy would warn of it
    return math.nan if is_constant else float(scipy.stats.spearmanr(x, y).statistic)
