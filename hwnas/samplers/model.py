"""Model: the surrogate of one study's history, and the hypervolume that each candidate is expected to add.

The surrogate is a Gaussian process on settings and their features, with a warp of the values that it is fitted to. The
noise of the values is known. The kernel has two parts: one compares settings, with a weight for each parameter, and one
compares features. The weights maximise the posterior; Rasmussen & Williams, 5.4, give the gradients.

If all objectives but one are known, the gain has a closed form. It is the integral, over the known objectives, of the
expected improvement: the amount by which the learnt value exceeds the best one reached at no greater cost. With two
objectives it is the expected hypervolume improvement of Emmerich et al. (2011), with one coordinate certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy
from hwnas.samplers.coding import Codes
from hwnas.samplers.facts import Domain, History, Inputs
from hwnas.stats import layers, non_dominated

Array = NDArray[np.float64]
_ITERATIONS = 25
_NUGGET = 1e-6
_FLOOR = -4.0  # least value, in robust deviations from the median: collapsed networks are moved there


@dataclass(frozen=True)
class Warp:
    """Maps values (larger is better) to roughly normal ones, and back.

    It is Yeo and Johnson's map on robust units. Low outliers are moved to a floor first.
    """

    centre: float
    unit: float
    power: float
    mean: float
    std: float

    @classmethod
    def of(cls, values: Array) -> Warp:
        """Fit the warp to finite values [n]; they may all be equal."""
        centre = float(np.median(values))
        low, high = np.quantile(values, [0.25, 0.75])
        std = float(values.std())
        unit = max(float(high - low) / 1.349, 0.01 * std)
        if unit <= 1e-12 * max(abs(centre), 1.0):  # the values are practically constant
            unit = 1.0
        scaled = np.maximum((values - centre) / unit, _FLOOR)
        power = 1.0
        if np.ptp(scaled) > 1e-9 and len(values) >= 8:
            # A weak prior prefers no warp, because a few values say little about it.
            optimum = scipy.optimize.minimize_scalar(
                lambda exponent: (exponent - 1) ** 2 - _likelihood(scaled, exponent), bounds=(0.0, 2.0),
                method="bounded")
            power = float(optimum.x)
        warped = _yeo_johnson(scaled, power)
        spread = float(warped.std())
        return cls(centre, unit, power, float(warped.mean()), spread if spread > 1e-6 else 1.0)

    def __call__(self, values: Array) -> Array:
        scaled = np.maximum((np.asarray(values) - self.centre) / self.unit, _FLOOR)
        return np.asarray((_yeo_johnson(scaled, self.power) - self.mean) / self.std)

    def inverse(self, warped: Array) -> Array:
        """Map warped values back; the results do not lie below the floor."""
        return np.asarray(_inverse(np.asarray(warped) * self.std + self.mean, self.power) * self.unit + self.centre)

    def slope(self, values: Array) -> Array:
        """Slope of the warp at values [n]: warped units per unit of value."""
        step = 1e-3 * self.unit
        return np.asarray((self(values + step) - self(values - step)) / (2 * step))


def _likelihood(x: Array, power: float) -> float:
    """Log likelihood of Yeo and Johnson's power (2000), without a constant. scipy's takes ten times as long."""
    jacobian = (power - 1) * float((np.sign(x) * np.log1p(np.abs(x))).sum())
    return jacobian - 0.5 * len(x) * float(np.log(_yeo_johnson(x, power).var()))


def _yeo_johnson(x: Array, power: float) -> Array:
    """Yeo and Johnson's map for powers from 0 to 2: there it is defined for every number and can be inverted."""
    up, down = np.maximum(x, 0), np.maximum(-x, 0)
    above = np.log1p(up) if power < 1e-6 else ((up + 1) ** power - 1) / power
    rest = 2 - power
    below = np.log1p(down) if rest < 1e-6 else ((down + 1) ** rest - 1) / rest
    return np.asarray(np.where(x >= 0, above, -below))


def _inverse(x: Array, power: float) -> Array:
    up, down = np.maximum(x, 0), np.maximum(-x, 0)
    above = np.expm1(up) if power < 1e-6 else (power * up + 1) ** (1 / power) - 1
    rest = 2 - power
    below = np.expm1(down) if rest < 1e-6 else (rest * down + 1) ** (1 / rest) - 1
    return np.asarray(np.where(x >= 0, above, -below))


@dataclass(frozen=True)
class Weights:
    """The kernel's numbers: variances of its two parts and of the noise, a weight for each parameter and feature.

    `calibration` scales standard deviations, so that the errors at left-out values are as large as the model says.
    """

    alike: float
    like_features: float
    noise: float
    parameters: Array
    features: Array
    calibration: float = 1.0

    @classmethod
    def of_logs(cls, logs: Array, n_parameters: int) -> Weights:
        """The weights with these logarithms, in the order of the fields."""
        values = np.exp(logs)
        alike, like_features, noise = (float(value) for value in values[:3])
        return cls(alike, like_features, noise, values[3 : 3 + n_parameters], values[3 + n_parameters :])


def prior(n_parameters: int, n_features: int) -> tuple[Array, Array]:
    """Means and standard deviations of the weights' logarithms."""
    means = [np.log(0.5), np.log(0.5), np.log(0.02), *[np.log(2.0 / n_parameters)] * n_parameters,
             *[np.log(1.0 / max(n_features, 1))] * n_features]
    widths = [1.0, 1.0, 1.5, *[1.2] * n_parameters, *[1.2] * n_features]
    return np.array(means), np.array(widths)


def _parts(left: Inputs, right: Inputs, weights: Weights) -> tuple[Array, Array]:
    """The kernel's two parts [n, m] for unit variances."""
    scale = np.sqrt(weights.parameters[left.owner])
    alike = np.exp(-_squares(left.embedded * scale, right.embedded * scale))
    root = np.sqrt(0.5 * weights.features)
    like = (np.exp(-_squares(left.features * root, right.features * root)) if left.features.shape[1]
            else np.zeros_like(alike))
    return alike, like


def _squares(left: Array, right: Array) -> Array:
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.asarray(np.maximum(squares, 0.0))


def tuned(inputs: Inputs, values: Array, noise: Array) -> Weights:
    """Find the weights of highest posterior for warped `values` [n], whose known noise has variances `noise` [n]."""
    n_parameters = int(inputs.owner.max()) + 1
    means, widths = prior(n_parameters, inputs.features.shape[1])
    optimum = scipy.optimize.minimize(_loss, means, args=(inputs, values, noise, means, widths), jac=True,
                                      method="L-BFGS-B", options={"maxiter": _ITERATIONS},
                                      bounds=list(zip(means - 4 * widths, means + 4 * widths, strict=True)))
    weights = Weights.of_logs(optimum.x, n_parameters)
    spread = Process(inputs, values, noise, weights).left_out_spread()
    unsure = np.sqrt(1 + len(optimum.x) / len(values))  # the weights were fitted to the same few values
    return replace(weights, calibration=float(spread * unsure))


def _loss(logs: Array, inputs: Inputs, values: Array, noise: Array, means: Array, widths: Array
          ) -> tuple[float, Array]:
    """Negative log posterior of the weights' logarithms, and its gradient in them."""
    n_parameters = int(inputs.owner.max()) + 1
    weights = Weights.of_logs(logs, n_parameters)
    alike, like = _parts(inputs, inputs, weights)
    matrix = weights.alike * alike + weights.like_features * like
    matrix[np.diag_indices_from(matrix)] += weights.noise + noise + _NUGGET
    factor = scipy.linalg.cho_factor(matrix, lower=True)
    inverse = scipy.linalg.cho_solve(factor, np.eye(len(values)))
    solved = inverse @ values
    slope = 0.5 * (inverse - np.outer(solved, solved))
    gradient = [weights.alike * np.vdot(slope, alike), weights.like_features * np.vdot(slope, like),
                weights.noise * np.trace(slope)]
    by_column = _pull(weights.alike * slope * alike, inputs.embedded)
    owned = np.bincount(inputs.owner, by_column, n_parameters)
    gradient += list(-weights.parameters * owned)
    gradient += list(-0.5 * weights.features * _pull(weights.like_features * slope * like, inputs.features))
    away = (logs - means) / widths
    loss = 0.5 * values @ solved + np.log(np.diag(factor[0])).sum() + 0.5 * away @ away
    return float(loss), np.array(gradient) + away / widths


def _pull(matrix: Array, columns: Array) -> Array:
    """For each column, the sum over pairs of matrix[i, j] * (columns[i] - columns[j])**2; `matrix` is symmetric."""
    return np.asarray(2 * (matrix.sum(1) @ columns**2 - ((matrix @ columns) * columns).sum(0)))


class Process:
    """The Gaussian process conditioned on warped values [n] with known noise variances [n]."""

    def __init__(self, inputs: Inputs, values: Array, noise: Array, weights: Weights) -> None:
        self.inputs, self.weights, self.values = inputs, weights, values
        matrix = self._kernel(inputs, inputs)
        matrix[np.diag_indices_from(matrix)] += weights.noise + noise + _NUGGET
        self._factor = scipy.linalg.cholesky(matrix, lower=True)
        self._solved = scipy.linalg.cho_solve((self._factor, True), values)

    def _kernel(self, left: Inputs, right: Inputs) -> Array:
        alike, like = _parts(left, right, self.weights)
        return np.asarray(self.weights.alike * alike + self.weights.like_features * like)

    def predict(self, wanted: Inputs) -> tuple[Array, Array]:
        """Posterior mean [m] and standard deviation [m] of the noiseless value."""
        cross = self._kernel(self.inputs, wanted)
        weights = self.weights
        own = weights.alike + weights.like_features * bool(wanted.features.shape[1])  # the kernel of each with itself
        shrunk = scipy.linalg.solve_triangular(self._factor, cross, lower=True, check_finite=False)
        variance = np.maximum(own - (shrunk**2).sum(0), 1e-10)
        return cross.T @ self._solved, np.sqrt(variance) * weights.calibration

    def left_out_spread(self) -> float:
        """Root mean square of leave-one-out errors, in their standard deviations (Rasmussen & Williams, 5.4.2)."""
        inverse = np.diag(scipy.linalg.cho_solve((self._factor, True), np.eye(len(self.values))))
        scores = self._solved / np.sqrt(inverse)
        return float(np.clip(np.sqrt(np.mean(np.minimum(scores**2, 9.0))), 1.0, 1.6))


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
        self.worst = max(float(self.warp.inverse(np.quantile(anywhere, [worst_quantile]))[0]), self._below_rivals())

    def _below_rivals(self) -> float:
        """As far below the lowest value on the rivals' front as that is below their best; -inf where fewer than two
        of them are on it."""
        rival = (self.codes[:, None] == self.domain.rivals[None]).all(axis=2).any(axis=1)
        values = self.values[rival]
        values = values[_undominated(values, self.costs[rival])]
        return float(2 * values.min() - values.max()) if len(values) > 1 else -math.inf

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
    k, (edges, best) = known.shape[1], _cells(front)
    if k > 1 and len(known) > _AT_ONCE and best.size > _MANY_CELLS:  # [m, cells, cells] would fill the memory
        parts = [slice(start, start + _AT_ONCE) for start in range(0, len(known), _AT_ONCE)]
        return np.concatenate([expected_gain(front, known[part], mean[part], std[part], warp, unit) for part in parts])
    levels, where = np.unique(best, return_inverse=True)
    exceeding = exceedance(levels, mean, std, warp, unit)[:, where.reshape(best.shape)]
    if k == 0:
        return np.asarray(exceeding.reshape(len(mean), -1)[:, 0])
    widths = [_widths(of_axis, known[:, axis]) for axis, of_axis in enumerate(edges)]
    if k == 1:
        return np.asarray((widths[0] * exceeding).sum(axis=1))
    return np.asarray(np.einsum("ma,mb,mab->m", widths[0], widths[1], exceeding))


def exceedance(levels: Array, mean: Array, std: Array, warp: Callable[[Array], Array], unit: float) -> Array:
    """E[(value - level)+] [m, l] for ascending `levels` [l]: exact for a warp that is straight between them."""
    steps = np.concatenate([levels, levels[-1] + unit * np.array(_ABOVE)])
    warped = warp(steps)
    slopes = np.diff(steps) / np.maximum(np.diff(warped), 1e-12)
    distance = (mean[:, None] - warped) / std[:, None]
    # integral of P(warped value > v) over v from each step to infinity
    tails = std[:, None] * (distance * scipy.special.ndtr(distance) + np.exp(-0.5 * distance**2) / np.sqrt(2 * np.pi))
    pieces = np.column_stack([(tails[:, :-1] - tails[:, 1:]) * slopes, tails[:, -1:] * slopes[-1]])
    return np.asarray(np.cumsum(pieces[:, ::-1], axis=1)[:, ::-1][:, : len(levels)])


def _cells(front: Front) -> tuple[list[Array], Array]:
    """The edges of the cells by known objective, and the best value at the lower corner of each cell."""
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
    return edges, best


def _undominated(values: Array, known: Array) -> NDArray[np.bool_]:
    points = np.column_stack([-values, known])
    return non_dominated(points, [True] * points.shape[1])


def _widths(edges: Array, at: Array) -> Array:
    """The part of each cell that lies beyond each candidate [m, cells]."""
    return np.asarray(np.maximum(edges[1:] - np.maximum(edges[:-1], at[:, None]), 0.0))
