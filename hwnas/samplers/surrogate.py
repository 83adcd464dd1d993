"""The surrogate of the learnt objective: a Gaussian process on settings and their features, with a warp of its values.

The kernel has two parts: one compares settings, with a weight for each parameter, and one compares features. The
weights maximise the posterior; Rasmussen & Williams, 5.4, give the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy
from hwnas.samplers.domain import Inputs

Array = NDArray[np.float64]
ITERATIONS = 25  # of the search for the weights
NUGGET = 1e-6  # variance that keeps matrices invertible
FLOOR = -4.0  # least value, in robust deviations from the median: collapsed networks are moved there
LEAST_WARPED = 8  # fewer values are not warped
MOST_SURPRISE, CALIBRATIONS = 9.0, (1.0, 1.6)  # most squared error that counts, and the range of the calibration


@dataclass(frozen=True)
class Warp:
    """Maps values (larger is better) to roughly normal ones, and back.

    It is Yeo and Johnson's map (2000) on robust units. Low outliers are moved to a floor first.
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
            jacobian = float((np.sign(scaled) * np.log1p(np.abs(scaled))).sum())

            def loss(power: float) -> float:
                """Yeo and Johnson's negative log likelihood, and a weak prior: few values say little about a warp."""
                variance = float(_yeo_johnson(scaled, power).var())
                return (power - 1) ** 2 - ((power - 1) * jacobian - 0.5 * len(values) * float(np.log(variance)))

            power = float(scipy.optimize.minimize_scalar(loss, bounds=(0.0, 2.0), method="bounded").x)
        warped = _yeo_johnson(scaled, power)
        spread = float(warped.std())
        return cls(centre, unit, power, float(warped.mean()), spread if spread > 1e-6 else 1.0)

    def __call__(self, values: Array) -> Array:
        scaled = np.maximum((np.asarray(values) - self.centre) / self.unit, FLOOR)
        return np.asarray((_yeo_johnson(scaled, self.power) - self.mean) / self.std)

    def inverse(self, warped: Array) -> Array:
        """Map warped values back; the results do not lie below the floor."""
        shifted = np.asarray(warped) * self.std + self.mean
        scaled = np.where(shifted >= 0, scipy.special.inv_boxcox1p(np.maximum(shifted, 0), self.power),
                          -scipy.special.inv_boxcox1p(np.maximum(-shifted, 0), 2 - self.power))
        return np.asarray(scaled * self.unit + self.centre)

    def slope(self, values: Array) -> Array:
        """Slope of the warp at values [n]: warped units per unit of value."""
        step = 1e-3 * self.unit
        return np.asarray((self(values + step) - self(values - step)) / (2 * step))


def _yeo_johnson(values: Array, power: float) -> Array:
    """Yeo and Johnson's map for powers from 0 to 2: there it is defined for every number and can be inverted."""
    return np.asarray(np.where(values >= 0, scipy.special.boxcox1p(np.maximum(values, 0), power),
                               -scipy.special.boxcox1p(np.maximum(-values, 0), 2 - power)))


@dataclass(frozen=True)
class Weights:
    """The kernel's numbers: variances of its two parts and of the noise, a weight for each parameter and feature.

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
        """The weights with these logarithms, in the order of the fields."""
        values = np.exp(logs)
        by_setting, by_features, noise = values[:3].tolist()
        return cls(by_setting, by_features, noise, values[3 : 3 + n_parameters], values[3 + n_parameters :])


def prior(n_parameters: int, n_features: int) -> tuple[Array, Array]:
    """Means and standard deviations of the weights' logarithms."""
    means = np.log([0.5, 0.5, 0.02, *[2.0 / n_parameters] * n_parameters, *[1.0 / max(n_features, 1)] * n_features])
    return means, np.array([1.0, 1.0, 1.5, *[1.2] * (n_parameters + n_features)])


def _kernel_parts(left: Inputs, right: Inputs, weights: Weights) -> tuple[Array, Array]:
    """The kernel's two parts [n, m]: by settings and by features."""
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
    """Negative log posterior of the weights' logarithms, and its gradient in them."""
    n_parameters = int(inputs.owner.max()) + 1
    weights = Weights.of_logs(logs, n_parameters)
    by_setting, by_features = _kernel_parts(inputs, inputs, weights)
    covariance = by_setting + by_features
    covariance[np.diag_indices_from(covariance)] += weights.noise_variance + noise + NUGGET
    factor = scipy.linalg.cho_factor(covariance, lower=True)
    inverse = scipy.linalg.cho_solve(factor, np.eye(len(values)))
    solved = inverse @ values
    # The likelihood's slope in each entry of the covariance; the chain rule then gives that in each weight.
    slope = 0.5 * (inverse - np.outer(solved, solved))
    by_column = _weighted_squares(slope * by_setting, inputs.embedded)
    gradient = np.concatenate([
        [np.vdot(slope, by_setting), np.vdot(slope, by_features), weights.noise_variance * np.trace(slope)],
        -weights.parameters * np.bincount(inputs.owner, by_column, n_parameters),
        -0.5 * weights.features * _weighted_squares(slope * by_features, inputs.features)])
    away = (logs - means) / widths
    loss = 0.5 * values @ solved + np.log(np.diag(factor[0])).sum() + 0.5 * away @ away
    return float(loss), gradient + away / widths


def _weighted_squares(matrix: Array, columns: Array) -> Array:
    """For each column, the sum over pairs of matrix[i, j] * (columns[i] - columns[j])**2; `matrix` is symmetric."""
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
        """Posterior mean [m] and standard deviation [m] of the noiseless value."""
        weights = self.weights
        cross = np.add(*_kernel_parts(self.inputs, inputs, weights))
        shrunk = scipy.linalg.solve_triangular(self._factor, cross, lower=True, check_finite=False)
        variance = np.maximum(weights.setting_variance + weights.feature_variance - (shrunk**2).sum(0), 1e-10)
        return cross.T @ self._solved, np.sqrt(variance) * weights.calibration

    def extend(self, inputs: Inputs, values: Array) -> Process:
        """The process with more settings and their warped values."""
        both = Inputs(np.concatenate([self.inputs.embedded, inputs.embedded]), inputs.owner,
                      np.concatenate([self.inputs.features, inputs.features]))
        return Process(both, np.concatenate([self.values, values]),
                       np.concatenate([self.noise, np.zeros(len(values))]), self.weights)

    def left_out_spread(self) -> float:
        """Root mean square of leave-one-out errors, in their standard deviations (Rasmussen & Williams, 5.4.2)."""
        inverse = np.diag(scipy.linalg.cho_solve((self._factor, True), np.eye(len(self.values))))
        scores = self._solved / np.sqrt(inverse)
        return float(np.clip(np.sqrt(np.mean(np.minimum(scores**2, MOST_SURPRISE))), *CALIBRATIONS))
