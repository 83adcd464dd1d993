"""Pareto fronts: which points no other point beats, in layers, and the area they cover."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def _losses(points: ArrayLike, minimise: Sequence[bool]) -> NDArray[np.float64]:
    values = np.asarray(points, dtype=np.float64)
    if values.size == 0:
        return np.empty((0, len(minimise)))
    if values.ndim != 2 or values.shape[1] != len(minimise):
        raise ValueError(f"points must have shape [n, {len(minimise)}], got {values.shape}")
    return np.where(np.asarray(minimise, dtype=bool), values, -values)


def non_dominated(points: ArrayLike, minimise: Sequence[bool]) -> NDArray[np.bool_]:
    """Mask of the points [n, k] that no other point dominates.

    `minimise[j]` says which way column j is better. A point dominates another when it is nowhere worse and
    somewhere better, so equal points stand or fall together. A point with a NaN is never on the front and
    dominates nothing.
    """
    losses = _losses(points, minimise)
    usable = ~np.isnan(losses).any(axis=1)
    mask = np.zeros(len(losses), dtype=bool)
    left = np.flatnonzero(usable)
    left = left[np.lexsort(losses[left].T[::-1])]
    # In lexicographic order nothing later can dominate the first one left, so it is on the front.
    while len(left):
        first = losses[left[0]]
        equal = (losses[left] == first).all(axis=1)
        mask[left[equal]] = True
        left = left[(losses[left] < first).any(axis=1) & ~equal]
    return mask


def layers(points: ArrayLike, minimise: Sequence[bool]) -> list[NDArray[np.intp]]:
    """Indices of the front, then of the front of the rest, and so on. Points with a NaN are in none."""
    losses = _losses(points, minimise)
    left = np.flatnonzero(~np.isnan(losses).any(axis=1))
    fronts = []
    while len(left):
        front = non_dominated(losses[left], [True] * losses.shape[1])
        fronts.append(left[front])
        left = left[~front]
    return fronts


def hypervolume_2d(top1: ArrayLike, latency_ms: ArrayLike, reference: tuple[float, float]) -> float:
    """Area between the front and `reference` (top-1, latency in ms); top-1 is maximised, latency minimised.

    Points that do not beat the reference in both coordinates add nothing.
    """
    worst_top1, worst_latency = reference
    points = np.column_stack([np.asarray(top1, dtype=np.float64), np.asarray(latency_ms, dtype=np.float64)])
    points = points[(points[:, 0] > worst_top1) & (points[:, 1] < worst_latency)]
    if not len(points):
        return 0.0
    front = points[non_dominated(points, (False, True))]
    front = front[np.argsort(front[:, 1], kind="stable")]
    until = np.append(front[1:, 1], worst_latency)
    return float(((until - front[:, 1]) * (front[:, 0] - worst_top1)).sum())
