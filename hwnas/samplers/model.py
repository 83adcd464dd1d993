"""The model of the learnt objective, and the hypervolume that each candidate is expected to add.

The model is a Gaussian process on settings and their features, with a warp of its values. The kernel has two parts: one
compares settings, with a weight for each parameter, and one compares features. The weights maximise the posterior;
Rasmussen & Williams, 5.4, give the gradients.

If all objectives but one are known, the gain is the integral, over the known objectives, of the expected improvement:
the amount by which the learnt value exceeds the best one reached at no greater cost. With two objectives it is the
expected hypervolume improvement of Emmerich et al. (2011), with one coordinate certain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy
from hwnas.samplers.domain import Codes, Domain, History, Inputs
from hwnas.stats import layers, non_dominated

Array = NDArray[np.float64]
ITERATIONS = 25  # of the search for the weights
NUGGET = 1e-6  # variance that keeps matrices invertible
FLOOR = -4.0  # least value, in robust deviations from the median: collapsed networks are moved there
LEAST_WARPED = 8  # fewer values are not warped
MOST_SURPRISE, CALIBRATIONS = 9.0, (1.0, 1.6)  # most squared error that counts, and the range of the calibration
LEAST = 4  # least number of values for a model
MOST_TUNED, MOST_FITTED = 120, 600  # most values that weights are tuned on, and that the process is fitted to
MOST_KNOWN = 2  # most known objectives in a gain
WORST = 0.25  # hypervolume is counted from this quantile of the values that random settings are expected to reach
MOST_CELLS = 1 << 15  # most candidates times cells of the front that are integrated at once
# Places of a normal distribution, in standard deviations, and their weights: integrals over it are sums over them.
PLACES = np.linspace(-5, 5, 81)
WEIGHTS = np.exp(-0.5 * PLACES**2) / np.exp(-0.5 * PLACES**2).sum()


@dataclass(frozen=True)
class Warp:
    """A map from values (larger is better) to roughly normal ones, and back.

    It is Yeo and Johnson's map (2000) on robust units, with powers from 0 to 2: for them it is defined for every number
    and can be inverted. Low outliers are moved to a floor first.
    """

    centre: float
    unit: float
    power: float
    mean: float
    std: float

    @classmethod
    def fit(cls, values: Array) -> Warp:
        """Fit the warp to finite values [n]; they may all be equal."""
        # Units that outliers do not change: the quartiles' distance, as a normal distribution's standard deviation.
        centre = float(np.median(values))
        low, high = np.quantile(values, [0.25, 0.75])
        unit = max(float(high - low) / 1.349, 0.01 * float(values.std()))
        if unit <= 1e-12 * max(abs(centre), 1.0):  # the values are practically constant
            unit = 1.0
        scaled = np.maximum((values - centre) / unit, FLOOR)
        power = 1.0
        if np.ptp(scaled) > 1e-9 and len(values) >= LEAST_WARPED:
            def loss(power: float) -> float:
                """Return the negative log likelihood with a weak prior, as few values say little about a warp."""
                return (power - 1) ** 2 - float(scipy.stats.yeojohnson_llf(power, scaled))

            power = float(scipy.optimize.minimize_scalar(loss, bounds=(0.0, 2.0), method="bounded").x)
        warped = scipy.stats.yeojohnson(scaled, power)
        spread = float(warped.std())
        return cls(centre, unit, power, float(warped.mean()), spread if spread > 1e-6 else 1.0)

    def __call__(self, values: Array) -> Array:
        scaled = np.maximum((np.asarray(values) - self.centre) / self.unit, FLOOR)
        return np.asarray((scipy.stats.yeojohnson(scaled, self.power) - self.mean) / self.std)

    def inverse(self, warped: Array) -> Array:
        """Map warped values back. A value that was below the floor comes back as the floor."""
        shifted = np.asarray(warped) * self.std + self.mean
        scaled = np.where(shifted >= 0, scipy.special.inv_boxcox1p(np.maximum(shifted, 0), self.power),
                          -scipy.special.inv_boxcox1p(np.maximum(-shifted, 0), 2 - self.power))
        return np.asarray(scaled * self.unit + self.centre)

    def slope(self, values: Array) -> Array:
        """Return the slope of the warp at values [n]: warped units per unit of value."""
        step = 1e-3 * self.unit
        return np.asarray((self(values + step) - self(values - step)) / (2 * step))


@dataclass(frozen=True)
class Weights:
    """The kernel's parameters: variances of its two parts and of the noise, a weight for each parameter and feature.

    `calibration` scales standard deviations, so that the errors at left-out values are as large as the model says.
    """

    setting_variance: float
    feature_variance: float
    noise_variance: float
    parameters: Array
    features: Array
    calibration: float = 1.0

    @classmethod
    def of_logs(cls, logs: Array, n_parameters: int) -> Weights:
        """Return the weights with these logarithms, in the order of the fields."""
        values = np.exp(logs)
        by_setting, by_features, noise = values[:3].tolist()
        return cls(by_setting, by_features, noise, values[3 : 3 + n_parameters], values[3 + n_parameters :])


def prior(n_parameters: int, n_features: int) -> tuple[Array, Array]:
    """Return means and standard deviations of the weights' logarithms."""
    means = np.log([0.5, 0.5, 0.02, *[2.0 / n_parameters] * n_parameters, *[1.0 / max(n_features, 1)] * n_features])
    return means, np.array([1.0, 1.0, 1.5, *[1.2] * (n_parameters + n_features)])


def _kernel_parts(left: Inputs, right: Inputs, weights: Weights) -> tuple[Array, Array]:
    """Return the kernel's two parts [n, m]: by settings and by features."""
    scale, feature_scale = np.sqrt(weights.parameters[left.owner]), np.sqrt(0.5 * weights.features)
    by_setting = np.exp(-_squared_distances(left.embedded * scale, right.embedded * scale))
    by_features = np.exp(-_squared_distances(left.features * feature_scale, right.features * feature_scale))
    return weights.setting_variance * by_setting, weights.feature_variance * by_features


def _squared_distances(left: Array, right: Array) -> Array:
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.asarray(np.maximum(squares, 0.0))


def fit_weights(inputs: Inputs, values: Array, noise: Array) -> Weights:
    """Find the weights of highest posterior for warped `values` [n], whose known noise has variances `noise` [n]."""
    n_parameters = int(inputs.owner.max()) + 1
    means, widths = prior(n_parameters, inputs.features.shape[1])
    optimum = scipy.optimize.minimize(negative_log_posterior, means, args=(inputs, values, noise, means, widths),
                                      jac=True, method="L-BFGS-B", options={"maxiter": ITERATIONS},
                                      bounds=list(zip(means - 4 * widths, means + 4 * widths, strict=True)))
    weights = Weights.of_logs(optimum.x, n_parameters)
    spread = Process(inputs, values, noise, weights).left_out_spread()
    doubt = np.sqrt(1 + len(optimum.x) / len(values))  # the weights were fitted to the same few values
    return replace(weights, calibration=float(spread * doubt))


def negative_log_posterior(logs: Array, inputs: Inputs, values: Array, noise: Array, means: Array, widths: Array
                           ) -> tuple[float, Array]:
    """Return the negative log posterior of the weights' logarithms, and its gradient in them."""
    # 1. The covariance at these weights, and its inverse.
    n_parameters = int(inputs.owner.max()) + 1
    weights = Weights.of_logs(logs, n_parameters)
    by_setting, by_features = _kernel_parts(inputs, inputs, weights)
    covariance = by_setting + by_features
    covariance[np.diag_indices_from(covariance)] += weights.noise_variance + noise + NUGGET
    factor = scipy.linalg.cho_factor(covariance, lower=True)
    inverse = scipy.linalg.cho_solve(factor, np.eye(len(values)))
    solved = inverse @ values
    # 2. The slope of the likelihood in each entry of the covariance. The chain rule gives it in each log weight.
    slope = 0.5 * (inverse - np.outer(solved, solved))
    by_column = _weighted_squares(slope * by_setting, inputs.embedded)
    gradient = np.concatenate([
        [np.vdot(slope, by_setting), np.vdot(slope, by_features), weights.noise_variance * np.trace(slope)],
        -weights.parameters * np.bincount(inputs.owner, by_column, n_parameters),
        -0.5 * weights.features * _weighted_squares(slope * by_features, inputs.features)])
    # 3. The normal prior of the log weights.
    away = (logs - means) / widths
    loss = 0.5 * values @ solved + np.log(np.diag(factor[0])).sum() + 0.5 * away @ away
    return float(loss), gradient + away / widths


def _weighted_squares(matrix: Array, columns: Array) -> Array:
    """Sum matrix[i, j] * (columns[i] - columns[j])**2 over all pairs, for each column; `matrix` is symmetric."""
    return np.asarray(2 * (matrix.sum(1) @ columns**2 - ((matrix @ columns) * columns).sum(0)))


class Process:
    """The Gaussian process conditioned on warped values [n] with known noise variances [n]."""

    def __init__(self, inputs: Inputs, values: Array, noise: Array, weights: Weights) -> None:
        self.inputs, self.values, self.noise, self.weights = inputs, values, noise, weights
        covariance = np.add(*_kernel_parts(inputs, inputs, weights))
        covariance[np.diag_indices_from(covariance)] += weights.noise_variance + noise + NUGGET
        self._factor = scipy.linalg.cholesky(covariance, lower=True)
        self._solved = scipy.linalg.cho_solve((self._factor, True), values)

    def predict(self, inputs: Inputs) -> tuple[Array, Array]:
        """Return posterior mean [m] and standard deviation [m] of the noiseless value."""
        weights = self.weights
        cross = np.add(*_kernel_parts(self.inputs, inputs, weights))
        shrunk = scipy.linalg.solve_triangular(self._factor, cross, lower=True, check_finite=False)
        variance = np.maximum(weights.setting_variance + weights.feature_variance - (shrunk**2).sum(0), 1e-10)
        return cross.T @ self._solved, np.sqrt(variance) * weights.calibration

    def extend(self, inputs: Inputs, values: Array) -> Process:
        """Return the process with more settings and their warped values, which have no known noise."""
        both = Inputs(np.concatenate([self.inputs.embedded, inputs.embedded]), inputs.owner,
                      np.concatenate([self.inputs.features, inputs.features]))
        return Process(both, np.concatenate([self.values, values]),
                       np.concatenate([self.noise, np.zeros(len(values))]), self.weights)

    def left_out_spread(self) -> float:
        """Return the root mean square of leave-one-out errors in standard deviations (Rasmussen & Williams, 5.4.2)."""
        inverse = np.diag(scipy.linalg.cho_solve((self._factor, True), np.eye(len(self.values))))
        scores = self._solved / np.sqrt(inverse)
        # A few surprises must not widen all intervals, and intervals are never narrowed.
        return float(np.clip(np.sqrt(np.mean(np.minimum(scores**2, MOST_SURPRISE))), *CALIBRATIONS))


class Surrogate:
    """A model that predicts gains for one ask. `history` has at least LEAST values."""

    def __init__(self, domain: Domain, history: History) -> None:
        self.domain = domain
        costs, codes, values = domain.costs(history.codes), history.codes, history.values.copy()
        # 1. The process is fitted to warped values. Its weights are tuned on fewer rows, as that takes many fits.
        inputs = domain.inputs(codes, costs)
        self.warp = Warp.fit(values)
        warped, noise = self.warp(values), (history.stds * self.warp.slope(values)) ** 2
        fitted_rows, tuned_rows = _thin(len(values), MOST_FITTED), _thin(len(values), MOST_TUNED)
        weights = fit_weights(inputs[tuned_rows], warped[tuned_rows], noise[tuned_rows])
        self.process = Process(inputs[fitted_rows], warped[fitted_rows], noise[fitted_rows], weights)
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
        # 4. Hypervolume is counted from a value that random settings are expected to reach.
        anywhere, _ = self.process.predict(domain.inputs(domain.sample, domain.sample_costs))
        worst = float(self.warp.inverse(np.quantile(anywhere, [WORST]))[0])
        floor = worst if domain.n_known else -math.inf
        self.front = Front(self.values, self.costs, floor, domain.reference_costs)

    def good(self, most: int) -> Codes:
        """Return evaluated and pending settings, best first: the front, then the front of the rest, and so on."""
        points = np.column_stack([-self.values, self.costs])
        order = np.concatenate(layers(points, [True] * points.shape[1]))
        return np.asarray(self.codes[order[:most]])

    def gains(self, codes: Codes) -> Array:
        """Return the hypervolume [m] that each setting is expected to add; if no objective is known, the
        improvement."""
        costs = self.domain.costs(codes)
        mean, std = self.process.predict(self.domain.inputs(codes, costs))
        values = self.warp.inverse(mean[:, None] + std[:, None] * PLACES) * self.domain.factor(codes)[:, None]
        return self.front.expected_gain(costs, values)


def _thin(n: int, most: int) -> NDArray[np.int64]:
    """Return the indices of all `n` rows, or of `most` rows at even distances."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(int))


class Front:
    """The front of values [n] (larger is better) at costs [n, k], k at most MOST_KNOWN, and the gains of candidates.

    Costs cut the space up to the reference point into cells. `best` is the best value at the lower corner of each.
    """

    def __init__(self, values: Array, costs: Array, reference_value: float, reference_costs: Array) -> None:
        inside = (costs < reference_costs).all(axis=1) & (values > reference_value)
        values, costs = values[inside], costs[inside]
        points = np.column_stack([-values, costs])
        undominated = non_dominated(points, [True] * points.shape[1])
        values, costs = values[undominated], costs[undominated]
        self.edges = [np.concatenate([[-np.inf], np.unique(costs[:, axis]), [limit]])
                      for axis, limit in enumerate(reference_costs)]
        self.best = np.full([len(edges) - 1 for edges in self.edges], reference_value)
        for value, cost in zip(values, costs, strict=True):  # a value counts in all cells of no lower cost
            beyond = tuple(slice(int(np.searchsorted(edges, at)), None)
                           for edges, at in zip(self.edges, cost, strict=True))
            self.best[beyond] = np.maximum(self.best[beyond], value)

    def expected_gain(self, costs: Array, values: Array) -> Array:
        """Return the expected gain [m] of candidates at `costs` [m, k]; `values` [m, places] are theirs at PLACES."""
        levels, level_of = np.unique(self.best, return_inverse=True)
        at_once = max(1, MOST_CELLS // self.best.size)
        gains = []
        for start in range(0, len(costs), at_once):
            part = slice(start, start + at_once)
            # In each cell a candidate gains its width times the value's expected excess over the best one there.
            excess = np.maximum(values[part, None] - levels[:, None], 0.0) @ WEIGHTS
            # Sum over the cells, one cost axis after another.
            gain = excess[:, level_of.reshape(self.best.shape)]
            for axis, edges in reversed(list(enumerate(self.edges))):
                widths = np.maximum(edges[1:] - np.maximum(edges[:-1], costs[part, axis][:, None]), 0.0)
                gain = np.einsum("m...c,mc->m...", gain, widths)
            gains.append(gain)
        return np.concatenate(gains)
