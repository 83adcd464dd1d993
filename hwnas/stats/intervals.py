"""Intervals: Wilson's for a share, percentiles of bootstrap draws, conformal ones for held-out errors; log odds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
OfRows = Callable[[NDArray[np.int64]], Array]  # of rows [..., n] of n things: a value for each [...]
Z90 = 1.6449  # two-sided 90 % of a normal, in standard deviations
DRAWS = 2000
LEVEL = 0.95


def wilson(n_correct: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a fraction `n_correct / n`; Wilson, JASA 22 (1927)."""
    from scipy.stats import binomtest

    if n < 1 or not 0 <= n_correct <= n:
        raise ValueError(f"need 0 <= n_correct <= n and n >= 1, got {n_correct} of {n}")
    interval = binomtest(n_correct, n).proportion_ci(level, "wilson")
    return float(interval.low), float(interval.high)


def binomial_std(share: float, n: int) -> float:
    """Standard deviation of a share of `n` images, never 0 (Agresti and Coull, 1998)."""
    centre = (share * n + 2) / (n + 4)
    return float((centre * (1 - centre) / (n + 4)) ** 0.5)


def log_odds(share: ArrayLike, edge: float = 1e-3) -> Array:
    """Logits of shares, which are kept `edge` off 0 and 1; scipy.special.expit leads back."""
    from scipy.special import logit

    return np.asarray(logit(np.clip(share, edge, 1 - edge)))


def conformal_quantile(scores: np.ndarray, q: float) -> float:
    """Finite-sample quantile of held-out scores. For q of 1/2 or more the rank is rounded up, below 1/2 it is
    rounded down."""
    ordered, n = np.sort(scores), len(scores)
    rank = np.ceil((n + 1) * q) if q >= 0.5 else np.floor((n + 1) * q)
    return float(ordered[int(np.clip(rank - 1, 0, n - 1))])


def percentiles(values: Array, level: float = LEVEL) -> tuple[float, float]:
    """Ends of the middle `level` of bootstrap draws. Draws without a value (NaN) are left out; both ends are NaN
    where all are."""
    usable = values[np.isfinite(values)]
    if not len(usable):
        return np.nan, np.nan
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def draws(n: int, seed: int | Sequence[int], size: int = DRAWS) -> NDArray[np.int64]:
    """Rows [size, n] of `n` things, drawn with replacement. The same seed gives the same rows, so that figures are
    paired."""
    return np.random.default_rng(seed).integers(0, n, (size, n))


def with_interval(of: OfRows, n: int) -> tuple[float, float, float]:
    """A statistic of `n` things, given as rows [..., n], with the ends of its LEVEL percentile interval (Efron 1979).

    All three are NaN where the statistic has no value. Draws without a value are left out.
    """
    value = float(of(np.arange(n)))
    return (value, *percentiles(of(draws(n, (0, n))))) if np.isfinite(value) else (np.nan,) * 3


def bootstrap_mean(values: ArrayLike, counts: ArrayLike, *, level: float = LEVEL, seed: int = 0,
                   n_draws: int = 10_000) -> tuple[float, float, float]:
    """Mean of `values` [k], each of which occurs `counts` [k] times, with its percentile interval.

    This suits few different values, such as right and wrong answers to images. The resamples are drawn as multinomial
    counts, which is exact, and quick for any set. Efron and Tibshirani, An Introduction to the Bootstrap (1993), ch.
    13.
    """
    weights = np.asarray(counts, np.float64)
    n = int(weights.sum())
    drawn = np.random.default_rng(seed).multinomial(n, weights / n, size=n_draws)
    low, high = percentiles(drawn @ np.asarray(values, np.float64) / n, level)
    return float(np.dot(values, weights) / n), low, high
