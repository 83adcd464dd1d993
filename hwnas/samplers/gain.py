"""Expected gain of hypervolume when all objectives but one are known: closed forms, no sampling.

The gain is an integral over the known objectives' part of the hypervolume: at every point there, what the learnt value
is expected to exceed the best one already reached at no greater cost (expected improvement). With two objectives it is
the expected hypervolume improvement of Emmerich et al. (2011) with one coordinate certain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_KNOWN = 2
_AT_ONCE, _MANY_CELLS = 64, 4096
_ABOVE = (0.5, 1.0, 2.0, 4.0)  # robust units above the best value where the warp's slope is read off once more


@dataclass(frozen=True)
class Front:
    """What was reached: `values` [n] (larger is better) at costs `known` [n, k] (smaller is better), and the reference
    point that hypervolume is counted from."""

    values: Array
    known: Array
    reference_value: float
    reference_known: Array


def expected_gain(front: Front, known: Array, mean: Array, std: Array, warp: Callable[[Array], Array],
                  unit: float) -> Array:
    """Expected gain [m] of candidates at costs `known` [m, k], k from 0 to 2, whose warped value is normal.

    `warp`: increasing, values to warped ones; `unit`: a typical difference of values.
    """
    k, cells = known.shape[1], _cells(front)
    if k > 1 and len(known) > _AT_ONCE and cells.best.size > _MANY_CELLS:  # [m, cells, cells] would fill the memory
        parts = [slice(start, start + _AT_ONCE) for start in range(0, len(known), _AT_ONCE)]
        return np.concatenate([expected_gain(front, known[part], mean[part], std[part], warp, unit) for part in parts])
    levels, where = np.unique(cells.best, return_inverse=True)
    exceeding = exceedance(levels, mean, std, warp, unit)[:, where.reshape(cells.best.shape)]
    if k == 0:
        return np.asarray(exceeding.reshape(len(mean), -1)[:, 0])
    widths = [_widths(edges, known[:, axis]) for axis, edges in enumerate(cells.edges)]
    if k == 1:
        return np.asarray((widths[0] * exceeding).sum(axis=1))
    return np.asarray(np.einsum("ma,mb,mab->m", widths[0], widths[1], exceeding))


def exceedance(levels: Array, mean: Array, std: Array, warp: Callable[[Array], Array], unit: float) -> Array:
    """E[(value - level)+] [m, l] for ascending `levels` [l]: exact for a warp that is straight between them."""
    from scipy.special import ndtr

    steps = np.concatenate([levels, levels[-1] + unit * np.array(_ABOVE)])
    warped = warp(steps)
    slopes = np.diff(steps) / np.maximum(np.diff(warped), 1e-12)
    distance = (mean[:, None] - warped) / std[:, None]
    # integral of P(warped value > v) over v from each step to infinity
    tails = std[:, None] * (distance * ndtr(distance) + np.exp(-0.5 * distance**2) / np.sqrt(2 * np.pi))
    pieces = np.column_stack([(tails[:, :-1] - tails[:, 1:]) * slopes, tails[:, -1:] * slopes[-1]])
    return np.asarray(np.cumsum(pieces[:, ::-1], axis=1)[:, ::-1][:, : len(levels)])


@dataclass(frozen=True)
class _Cells:
    """The best value at the lower corner of each cell between the edges of every known objective."""

    edges: list[Array]
    best: Array


def _cells(front: Front) -> _Cells:
    k = front.known.shape[1]
    inside = (front.known < front.reference_known).all(axis=1) & (front.values > front.reference_value)
    values, known = front.values[inside], front.known[inside]
    kept = _undominated(values, known)
    values, known = values[kept], known[kept]
    edges = [np.concatenate([[-np.inf], np.unique(known[:, axis]), [front.reference_known[axis]]]) for axis in range(k)]
    best = np.full([len(one) - 1 for one in edges], front.reference_value)
    for value, cost in zip(values, known, strict=True):
        corner = tuple(slice(int(np.searchsorted(edges[axis], cost[axis])), None) for axis in range(k))
        best[corner] = np.maximum(best[corner], value)
    return _Cells(edges, best)


def _undominated(values: Array, known: Array) -> NDArray[np.bool_]:
    from hwnas.stats.pareto import non_dominated

    points = np.column_stack([-values, known])
    return non_dominated(points, [True] * points.shape[1])


def _widths(edges: Array, at: Array) -> Array:
    """How much of each cell [m, cells] lies beyond each candidate."""
    return np.asarray(np.maximum(edges[1:] - np.maximum(edges[:-1], at[:, None]), 0.0))
