"""Model: the surrogate of one study's history, and the hypervolume that each candidate is expected to add.

If all objectives but one are known, the gain has a closed form. It is the integral, over the known objectives, of the
expected improvement: the amount by which the learnt value exceeds the best one reached at no greater cost. With two
objectives it is the expected hypervolume improvement of Emmerich et al. (2011), with one coordinate certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hwnas.samplers.coding import Codes
from hwnas.samplers.domain import Domain
from hwnas.samplers.history import History
from hwnas.samplers.surrogate import Inputs, Process, Warp, Weights, tuned
from hwnas.stats import layers, non_dominated

Array = NDArray[np.float64]
LEAST = 4  # least number of values for a model
MOST_TUNED, MOST_FITTED = 200, 600
GROWTH = 1.15  # the weights are tuned again when the history has grown by this factor
FAILED_BELOW, FAILED_NOISE = 0.5, 1.0  # failed settings: warped units below the worst value; their noise
MOST_KNOWN = 2  # most known objectives in a gain
WORST = 0.25  # hypervolume is counted from this quantile of the values that random settings are expected to reach
_AT_ONCE, _MANY_CELLS = 64, 4096
_ABOVE = (0.5, 1.0, 2.0, 4.0)  # the warp's slope is also read at these distances above the best value, in robust units
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(32)


def tuning_size(n: int, first: int) -> int:
    """The number of values, of `n`, on which the weights are tuned.

    It is a step of a fixed ladder, so that a resumed study gets the same weights.
    """
    size = first
    while (larger := max(size + 1, math.ceil(GROWTH * size))) <= n:
        size = larger
    return min(size, n)


class Tuner:
    """Tunes weights and remembers the last ones.

    They depend only on the first values of a study, not on the time of the ask, so a resumed study gets the same ones.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[str, int], Weights] | None = None

    def weights(self, domain: Domain, history: History, first: int, study: str) -> Weights:
        """The weights for a history with at least LEAST values, in the order of its trials."""
        size = tuning_size(len(history.values), first)
        while (~history.failed[:size]).sum() < LEAST:
            size += 1
        if self._last is None or self._last[0] != (study, size):
            part = history[np.arange(size)]
            warped, noise = _warp_values(Warp.of(part.values[~part.failed]), part)
            rows = np.unique(np.linspace(0, size - 1, min(size, MOST_TUNED)).round().astype(int))
            inputs = domain.inputs(part.codes[rows], domain.costs(part.codes[rows]))
            self._last = (study, size), tuned(inputs, warped[rows], noise[rows])
        return self._last[1]


def _warp_values(warp: Warp, history: History) -> tuple[Array, Array]:
    """Warped values [n] and the variances of their known noise [n]; failed settings lie below all others."""
    good = ~history.failed
    warped, noise = np.zeros(len(good)), np.zeros(len(good))
    warped[good] = warp(history.values[good])
    noise[good] = (history.stds[good] * warp.slope(history.values[good])) ** 2
    warped[~good] = warped[good].min() - FAILED_BELOW
    noise[~good] = FAILED_NOISE
    return warped, noise


class Model:
    """Predicts gains for one ask. `history` has at least LEAST values."""

    def __init__(self, domain: Domain, history: History, tuner: Tuner, first: int, study: str,
                 worst_quantile: float = WORST) -> None:
        self.domain = domain
        weights = tuner.weights(domain, history, first, study)
        costs, good = domain.costs(history.codes), ~history.failed
        rows = _choose_rows(history, costs, domain)
        part = history[rows]
        self.warp = Warp.of(part.values[~part.failed])
        self.unit = self.warp.unit
        warped, noise = _warp_values(self.warp, part)
        inputs = domain.inputs(part.codes, costs[rows])
        process = Process(inputs, warped, noise, weights)
        values = history.values.copy()
        if (history.stds > 0).any():  # the best of many noisy values is too high on average
            values[good] = self.warp.inverse(process.predict(domain.inputs(history.codes[good], costs[good]))[0])
        codes = history.codes
        if len(history.pending):
            process, at_work, more = self._with_pending(process, inputs, warped, noise, weights, history.pending)
            values, costs = np.concatenate([values, at_work]), np.concatenate([costs, more])
            codes = np.concatenate([codes, history.pending])
        self.process = process
        kept = np.isfinite(values)
        self.codes, self.values, self.costs = codes[kept], values[kept], costs[kept]
        anywhere, _ = process.predict(domain.inputs(domain.sample, domain.sample_costs))
        self.worst = float(self.warp.inverse(np.quantile(anywhere, [worst_quantile]))[0])

    def _with_pending(self, process: Process, inputs: Inputs, warped: Array, noise: Array, weights: Weights,
                      pending: Codes) -> tuple[Process, Array, Array]:
        """The process as if the pending settings had their expected values: they will be known soon."""
        costs = self.domain.costs(pending)
        more = self.domain.inputs(pending, costs)
        mean, _ = process.predict(more)
        both = Inputs(np.concatenate([inputs.embedded, more.embedded]), inputs.owner,
                      np.concatenate([inputs.features, more.features]))
        again = Process(both, np.concatenate([warped, mean]), np.concatenate([noise, np.zeros(len(mean))]), weights)
        return again, self.warp.inverse(mean), costs

    def good(self, most: int) -> Codes:
        """Evaluated settings, best first: the front, then the front of the rest."""
        worth = self.values * self.domain.factor(self.codes)
        return np.asarray(self.codes[ranked_by_layers(worth, self.costs)[:most]])

    def gains(self, codes: Codes) -> Array:
        """The hypervolume that each setting is expected to add [m]."""
        costs = self.domain.costs(codes)
        mean, std = self.process.predict(self.domain.inputs(codes, costs))
        if not costs.shape[1]:
            return self._improvement(codes, mean, std)
        front = Front(self.values, self.costs, self.worst, self.domain.far)
        return expected_gain(front, costs, mean, std, self.warp, self.unit)

    def _improvement(self, codes: Codes, mean: Array, std: Array) -> Array:
        """Expected improvement of a single objective, the learnt value times its known factor, by quadrature."""
        best = float((self.values * self.domain.factor(self.codes)).max())
        values = self.warp.inverse(mean[:, None] + std[:, None] * _NODES)
        above = np.maximum(values * self.domain.factor(codes)[:, None] - best, 0.0)
        return np.asarray(above @ _NODE_WEIGHTS / math.sqrt(2 * math.pi))


def _choose_rows(history: History, costs: Array, domain: Domain) -> NDArray[np.int64]:
    """Rows of at most MOST_FITTED settings to fit. If there are more, half are the newest, half the best others."""
    n = len(history.values)
    if n <= MOST_FITTED:
        return np.arange(n)
    newer = np.arange(n - MOST_FITTED // 2, n)
    older = np.flatnonzero(~history.failed[: newer[0]])
    if not len(older):
        return newer
    worth = history.values[older] * domain.factor(history.codes[older])
    ranked = ranked_by_layers(worth, costs[older])
    return np.concatenate([np.sort(older[ranked[: MOST_FITTED // 2]]), newer])


def ranked_by_layers(worth: Array, costs: Array) -> NDArray[np.int64]:
    """Indices by layer: the front first, then the front of the rest, and so on."""
    return np.concatenate(layers(np.column_stack([-worth, costs]), [True] * (1 + costs.shape[1])))


@dataclass(frozen=True)
class Front:
    """The front so far: `values` [n] (larger is better) at costs `known` [n, k] (smaller is better).

    Hypervolume is counted from the reference point.
    """

    values: Array
    known: Array
    reference_value: float
    reference_known: Array


def expected_gain(front: Front, known: Array, mean: Array, std: Array, warp: Callable[[Array], Array],
                  unit: float) -> Array:
    """Expected gain [m] of candidates at costs `known` [m, k], k from 0 to 2, whose warped value is normal.

    `warp` is increasing and maps values to warped ones. `unit` is a typical difference of values.
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
    best = np.full([len(axis) - 1 for axis in edges], front.reference_value)
    for value, cost in zip(values, known, strict=True):
        corner = tuple(slice(int(np.searchsorted(edges[axis], cost[axis])), None) for axis in range(k))
        best[corner] = np.maximum(best[corner], value)
    return _Cells(edges, best)


def _undominated(values: Array, known: Array) -> NDArray[np.bool_]:
    points = np.column_stack([-values, known])
    return non_dominated(points, [True] * points.shape[1])


def _widths(edges: Array, at: Array) -> Array:
    """The part of each cell that lies beyond each candidate [m, cells]."""
    return np.asarray(np.maximum(edges[1:] - np.maximum(edges[:-1], at[:, None]), 0.0))
