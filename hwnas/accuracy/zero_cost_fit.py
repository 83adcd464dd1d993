"""From scores to a top-1: a rising map fitted to a few trained networks, with the error that it has on those left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_RIDGE = 1.0  # squared weights count like one more network, whose score tells nothing
_LEAST_SLOPE = 1e-3  # logits a standard deviation: a map that orders networks, also where the anchors give no reason to
_EDGE = 2e-3  # nearest to 0 and to 1 that an anchor's top-1 counts


@dataclass(frozen=True, eq=False)
class Fit:
    """logit(top-1) = intercept + weights · standardised scores, no weight below 0; `std` of top-1 (a fraction) is the
    root mean square error at anchors left out one by one, whose predictions are `left_out` [n]."""

    middle: Array
    width: Array
    weights: Array
    intercept: float
    std: float
    left_out: Array

    def __call__(self, scores: Array) -> Array:
        """Top-1 [m], as a fraction, of networks with these scores [m, k]."""
        return _expit(self.intercept + (scores - self.middle) / self.width @ self.weights)


def fit(scores: Array, top1: Array) -> Fit:
    """The map through anchors: `scores` [n, k], `top1` [n] as fractions, n at least 3."""
    left_out = np.array([float(_map(np.delete(scores, i, 0), np.delete(top1, i))(scores[i : i + 1])[0])
                         for i in range(len(top1))])
    whole = _map(scores, top1)
    std = float(np.sqrt(np.mean((left_out - top1) ** 2)))
    return Fit(whole.middle, whole.width, whole.weights, whole.intercept, std, left_out)


def _map(scores: Array, top1: Array) -> Fit:
    from scipy.optimize import nnls

    middle, width = scores.mean(0), scores.std(0)
    width = np.where(width > 1e-9 * (1 + np.abs(middle)), width, 1.0)
    k = scores.shape[1]
    logits = _logit(top1)
    intercept = float(logits.mean())
    rows = np.concatenate([(scores - middle) / width, np.sqrt(_RIDGE) * np.eye(k)])
    weights, _ = nnls(rows, np.concatenate([logits - intercept, np.zeros(k)]))
    return Fit(middle, width, np.maximum(weights, _LEAST_SLOPE), intercept, 0.0, np.zeros(0))


def kendall_tau(scores: Array, top1: Array) -> float:
    """Kendall's tau-b; 0 where all are tied."""
    from scipy.stats import kendalltau

    tau = float(kendalltau(scores, top1).statistic)
    return tau if np.isfinite(tau) else 0.0


def _logit(top1: Array) -> Array:
    inside = np.clip(top1, _EDGE, 1 - _EDGE)
    return np.asarray(np.log(inside / (1 - inside)))


def _expit(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -500, 500))))
