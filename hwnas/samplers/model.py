"""The surrogate of one study's history, and the hypervolume that each candidate is expected to add.

If all objectives but one are known, the gain has a closed form. It is the integral, over the known objectives, of the
expected improvement: the amount by which the learnt value exceeds the best one reached at no greater cost. With two
objectives it is the expected hypervolume improvement of Emmerich et al. (2011), with one coordinate certain.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hwnas.samplers.coding import Codes
from hwnas.samplers.domain import Domain
from hwnas.samplers.history import History
from hwnas.samplers.surrogate import Process, Warp, fit_weights
from hwnas.stats import layers, non_dominated

Array = NDArray[np.float64]
LEAST = 4  # least number of values for a model
MOST_TUNED, MOST_FITTED = 120, 600  # most values that weights are tuned on, and that the process is fitted to
MOST_KNOWN = 2  # most known objectives in a gain
WORST = 0.25  # hypervolume is counted from this quantile of the values that random settings are expected to reach
MOST_CELLS = 1 << 15  # candidates times cells of the front that are integrated at once
# Places of a normal distribution, in standard deviations, and their weights: what integrals over it are summed up from.
PLACES = np.linspace(-5, 5, 81)
WEIGHTS = np.exp(-0.5 * PLACES**2) / np.exp(-0.5 * PLACES**2).sum()


class Surrogate:
    """Predicts gains for one ask. `history` has at least LEAST values."""

    def __init__(self, domain: Domain, history: History) -> None:
        self.domain = domain
        costs, codes, values = domain.costs(history.codes), history.codes, history.values.copy()
        # 1. The process is fitted to warped values.
        inputs = domain.inputs(codes, costs)
        self.warp = Warp.fit(values)
        warped, noise = self.warp(values), (history.stds * self.warp.slope(values)) ** 2
        fitted, tuned = _thin(len(values), MOST_FITTED), _thin(len(values), MOST_TUNED)
        weights = fit_weights(inputs[tuned], warped[tuned], noise[tuned])
        self.process = Process(inputs[fitted], warped[fitted], noise[fitted], weights)
        # 2. The front is that of posterior means, as the best of many noisy values is too high on average.
        if (history.stds > 0).any():
            means, _ = self.process.predict(inputs)
            values = self.warp.inverse(means)
        # 3. Pending settings count as if they had their expected values, which will be known soon.
        if len(history.pending):
            pending_costs = domain.costs(history.pending)
            inputs = domain.inputs(history.pending, pending_costs)
            means, _ = self.process.predict(inputs)
            self.process = self.process.extend(inputs, means)
            values = np.concatenate([values, self.warp.inverse(means)])
            costs, codes = np.concatenate([costs, pending_costs]), np.concatenate([codes, history.pending])
        self.codes, self.values, self.costs = codes, values * domain.factor(codes), costs
        # 4. Hypervolume is counted from what random settings are expected to reach.
        anywhere, _ = self.process.predict(domain.inputs(domain.sample, domain.sample_costs))
        worst = float(self.warp.inverse(np.quantile(anywhere, [WORST]))[0])
        floor = worst if domain.n_known else -math.inf
        self.front = Front(self.values, self.costs, floor, domain.reference_costs)

    def good(self, most: int) -> Codes:
        """Evaluated settings, best first: the front, then the front of the rest."""
        points = np.column_stack([-self.values, self.costs])
        order = np.concatenate(layers(points, [True] * points.shape[1]))
        return np.asarray(self.codes[order[:most]])

    def gains(self, codes: Codes) -> Array:
        """The hypervolume that each setting is expected to add [m]; without known objectives, the improvement."""
        costs = self.domain.costs(codes)
        mean, std = self.process.predict(self.domain.inputs(codes, costs))
        values = self.warp.inverse(mean[:, None] + std[:, None] * PLACES) * self.domain.factor(codes)[:, None]
        return self.front.expected_gain(costs, values)


def _thin(n: int, most: int) -> NDArray[np.int64]:
    """All rows of so many, or `most` of them at even distances."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))


def _undominated(values: Array, costs: Array) -> NDArray[np.bool_]:
    points = np.column_stack([-values, costs])
    return non_dominated(points, [True] * points.shape[1])


class Front:
    """The front of values [n] (larger is better) at costs [n, k], k at most MOST_KNOWN, and what it would gain.

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

    def expected_gain(self, costs: Array, values: Array) -> Array:
        """Expected gain [m] of candidates at `costs` [m, k], whose value at each of PLACES is `values` [m, places]."""
        levels, level_of = np.unique(self.best, return_inverse=True)
        at_once = max(1, MOST_CELLS // self.best.size)
        gains = []
        for start in range(0, len(costs), at_once):
            part = slice(start, start + at_once)
            # In each cell a candidate gains its width times the value's expected excess over the best one there.
            excess = np.maximum(values[part, None] - levels[:, None], 0.0) @ WEIGHTS
            gain = excess[:, level_of.reshape(self.best.shape)]
            for axis, edges in reversed(list(enumerate(self.edges))):
                widths = np.maximum(edges[1:] - np.maximum(edges[:-1], costs[part, axis][:, None]), 0.0)
                gain = np.einsum("m...c,mc->m...", gain, widths)
            gains.append(gain)
        return np.concatenate(gains)
