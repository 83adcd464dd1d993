"""Intervals: Wilson's for a share of successes, conformal ones for held-out errors, a share's standard deviation."""

from __future__ import annotations

import math

import numpy as np


def wilson(n_correct: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval (95 % by default) of a fraction `n_correct / n`; Wilson, JASA 22 (1927)."""
    if n < 1 or not 0 <= n_correct <= n:
        raise ValueError(f"need 0 <= n_correct <= n and n >= 1, got {n_correct} of {n}")
    share = n_correct / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def conformal_quantile(scores: np.ndarray, q: float) -> float:
    """Finite-sample quantile of held-out scores: for q of 1/2 or more rounded up, below it rounded down."""
    ordered, n = np.sort(scores), len(scores)
    rank = np.ceil((n + 1) * q) if q >= 0.5 else np.floor((n + 1) * q)
    return float(ordered[int(np.clip(rank - 1, 0, n - 1))])

Z90 = 1.6449


def binomial_std(share: float, n: int) -> float:
    """Standard deviation of a share of `n` images, never 0 (Agresti and Coull, 1998)."""
    centre = (share * n + 2) / (n + 4)
    return float((centre * (1 - centre) / (n + 4)) ** 0.5)
