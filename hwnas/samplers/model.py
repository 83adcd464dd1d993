"""Model: the surrogate of one study's history, and the hypervolume that each candidate is expected to add.

If all objectives but one are known, the gain has a closed form. It is the integral, over the known objectives, of the
expected improvement: the amount by which the learnt value exceeds the best one reached at no greater cost. With two
objectives it is the expected hypervolume improvement of Emmerich et al. (2011), with one coordinate certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy
from hwnas.samplers.coding import Codes
from hwnas.samplers.domain import Domain
from hwnas.samplers.history import History
from hwnas.samplers.surrogate import Process, Warp, Weights, fit_weights
from hwnas.stats import layers, non_dominated

Array = NDArray[np.float64]
LEAST = 4  # least number of values for a model
MOST_TUNED, MOST_FITTED = 200, 600  # most values that weights are tuned on, and that the process is fitted to
GROWTH = 1.15  # the weights are tuned again when the history has grown by this factor
FAILED_BELOW, FAILED_NOISE = 0.5, 1.0  # failed settings: warped units below the worst value; their noise
MOST_KNOWN = 2  # most known objectives in a gain
WORST = 0.25  # hypervolume is counted from this quantile of the values that random settings are expected to reach
MOST_CELLS = 1 << 18  # candidates times cells of the front that are integrated at once
ABOVE = (0.5, 1.0, 2.0, 4.0)  # the warp's slope is also read at these distances above the best value, in robust units
_NODES, _NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(32)


class Tuner:
    """Tunes weights on the first values of a study, and remembers the last ones.

    They do not depend on the time of the ask, so a resumed study gets the same ones. `first` is the size of the first
    history that they are tuned on.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._last: tuple[bytes, Weights] | None = None

    def weights(self, domain: Domain, history: History) -> Weights:
        """The weights for a history with at least LEAST values, in the order of its trials."""
        # A step of a fixed ladder of sizes, so that asks between two steps share their weights.
        size = self.first
        while (larger := max(size + 1, math.ceil(GROWTH * size))) <= len(history.values):
            size = larger
        size = min(size, len(history.values))
        while (~history.failed[:size]).sum() < LEAST:
            size += 1
        part = history[np.arange(size)]
        key = part.codes.tobytes() + part.values.tobytes() + part.stds.tobytes()
        if self._last is None or self._last[0] != key:
            warped, noise = _warp_values(Warp.fit(part.values[~part.failed]), part)
            rows = np.unique(np.linspace(0, size - 1, min(size, MOST_TUNED)).round().astype(int))
            inputs = domain.inputs(part.codes[rows], domain.costs(part.codes[rows]))
            self._last = key, fit_weights(inputs, warped[rows], noise[rows])
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

    def __init__(self, domain: Domain, history: History, tuner: Tuner, worst_quantile: float = WORST) -> None:
        self.domain = domain
        costs, good = domain.costs(history.codes), ~history.failed
        # 1. The process is fitted to warped values.
        rows = _choose_rows(history, costs, domain)
        part = history[rows]
        self.warp = Warp.fit(part.values[~part.failed])
        warped, noise = _warp_values(self.warp, part)
        self.process = Process(domain.inputs(part.codes, costs[rows]), warped, noise, tuner.weights(domain, history))
        # 2. The front is that of posterior means, as the best of many noisy values is too high on average.
        values, codes = history.values.copy(), history.codes
        if (history.stds > 0).any():
            means, _ = self.process.predict(domain.inputs(codes[good], costs[good]))
            values[good] = self.warp.inverse(means)
        # 3. Pending settings count as if they had their expected values, which will be known soon.
        if len(history.pending):
            pending_costs = domain.costs(history.pending)
            inputs = domain.inputs(history.pending, pending_costs)
            means, _ = self.process.predict(inputs)
            self.process = self.process.extend(inputs, means)
            values = np.concatenate([values, self.warp.inverse(means)])
            costs, codes = np.concatenate([costs, pending_costs]), np.concatenate([codes, history.pending])
        finite = np.isfinite(values)
        self.codes, self.values, self.costs = codes[finite], values[finite], costs[finite]
        # 4. Hypervolume is counted from what random settings are expected to reach, or from just below the rivals.
        anywhere, _ = self.process.predict(domain.inputs(domain.sample, domain.sample_costs))
        worst = float(self.warp.inverse(np.quantile(anywhere, [worst_quantile]))[0])
        self.front = Front(self.values, self.costs, max(worst, self._below_rivals()), domain.reference_costs)

    def _below_rivals(self) -> float:
        """As far below the lowest value on the rivals' front as that is below their best.

        -inf if fewer than two of them are on it.
        """
        rival = (self.codes[:, None] == self.domain.rivals[None]).all(axis=2).any(axis=1)
        values = self.values[rival]
        values = values[_undominated(values, self.costs[rival])]
        return float(2 * values.min() - values.max()) if len(values) > 1 else -math.inf

    def good(self, most: int) -> Codes:
        """Evaluated settings, best first: the front, then the front of the rest."""
        order = _rank_by_layers(self.values * self.domain.factor(self.codes), self.costs)
        return np.asarray(self.codes[order[:most]])

    def gains(self, codes: Codes) -> Array:
        """The hypervolume that each setting is expected to add [m]; without known objectives, the improvement."""
        costs = self.domain.costs(codes)
        mean, std = self.process.predict(self.domain.inputs(codes, costs))
        if costs.shape[1]:
            return self.front.expected_gain(costs, mean, std, self.warp, self.warp.unit)
        # Expected improvement of the learnt value times its known factor, by quadrature.
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
    order = _rank_by_layers(history.values[older] * domain.factor(history.codes[older]), costs[older])
    return np.concatenate([np.sort(older[order[: MOST_FITTED // 2]]), newer])


def _rank_by_layers(worth: Array, costs: Array) -> NDArray[np.int64]:
    """Indices by layer: the front first, then the front of the rest, and so on."""
    points = np.column_stack([-worth, costs])
    return np.concatenate([np.zeros(0, np.int64), *layers(points, [True] * points.shape[1])])


def _undominated(values: Array, costs: Array) -> NDArray[np.bool_]:
    points = np.column_stack([-values, costs])
    return non_dominated(points, [True] * points.shape[1])


class Front:
    """The front of values [n] (larger is better) at costs [n, k], k 1 or 2, and what it would gain.

    Costs cut the space up to the reference point into cells. `best` is the best value at the lower corner of each.
    """

    def __init__(self, values: Array, costs: Array, reference_value: float, reference_costs: Array) -> None:
        inside = (costs < reference_costs).all(axis=1) & (values > reference_value)
        values, costs = values[inside], costs[inside]
        undominated = _undominated(values, costs)
        values, costs = values[undominated], costs[undominated]
        self.edges = [np.concatenate([[-np.inf], np.unique(costs[:, axis]), [limit]])
                      for axis, limit in enumerate(reference_costs)]
        self.best = np.full([len(edges) - 1 for edges in self.edges], reference_value)
        for value, cost in zip(values, costs, strict=True):
            beyond = tuple(slice(int(np.searchsorted(edges, at)), None)
                           for edges, at in zip(self.edges, cost, strict=True))
            self.best[beyond] = np.maximum(self.best[beyond], value)

    def expected_gain(self, costs: Array, mean: Array, std: Array, warp: Callable[[Array], Array], unit: float
                      ) -> Array:
        """Expected gain [m] of candidates at `costs` [m, k], whose warped value is normal.

        `warp` is increasing and maps values to warped ones. `unit` is a typical difference of values.
        """
        levels, level_of = np.unique(self.best, return_inverse=True)
        at_once = max(1, MOST_CELLS // self.best.size)
        gains = []
        for start in range(0, len(costs), at_once):
            part = slice(start, start + at_once)
            # In each cell a candidate gains its width times the value's expected excess over the best one there.
            gain = expected_excess(levels, mean[part], std[part], warp, unit)[:, level_of.reshape(self.best.shape)]
            for axis, edges in reversed(list(enumerate(self.edges))):
                widths = np.maximum(edges[1:] - np.maximum(edges[:-1], costs[part, axis][:, None]), 0.0)
                gain = np.einsum("m...c,mc->m...", gain, widths)
            gains.append(gain)
        return np.concatenate(gains)


def expected_excess(levels: Array, mean: Array, std: Array, warp: Callable[[Array], Array], unit: float) -> Array:
    """E[(value - level)+] [m, l] for ascending `levels` [l]: exact for a warp that is straight between them."""
    steps = np.concatenate([levels, levels[-1] + unit * np.array(ABOVE)])
    warped = warp(steps)
    slopes = np.diff(steps) / np.maximum(np.diff(warped), 1e-12)
    distance = (mean[:, None] - warped) / std[:, None]
    # integral of P(warped value > v) over v from each step to infinity
    tails = std[:, None] * (distance * scipy.special.ndtr(distance) + np.exp(-0.5 * distance**2) / np.sqrt(2 * np.pi))
    pieces = np.column_stack([(tails[:, :-1] - tails[:, 1:]) * slopes, tails[:, -1:] * slopes[-1]])
    return np.asarray(np.cumsum(pieces[:, ::-1], axis=1)[:, ::-1][:, : len(levels)])
