"""Surrogate: a Gaussian process on settings and their features, and the warp of the values that it is fitted to.

The noise of the values is known. The kernel has two parts: one compares settings, with a weight for each parameter,
and one compares features. The weights maximise the posterior; Rasmussen & Williams, 5.4, give the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
        from scipy.optimize import minimize_scalar

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
            optimum = minimize_scalar(lambda exponent: (exponent - 1) ** 2 - _likelihood(scaled, exponent),
                                      bounds=(0.0, 2.0), method="bounded")
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
class Inputs:
    """Embedded settings [n, e], the parameter that owns each column [e], and scaled features [n, f]."""

    embedded: Array
    owner: NDArray[np.int64]
    features: Array

    def __len__(self) -> int:
        return len(self.embedded)

    def __getitem__(self, rows: Any) -> Inputs:
        return Inputs(self.embedded[rows], self.owner, self.features[rows])


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
    from scipy.optimize import minimize

    n_parameters = int(inputs.owner.max()) + 1
    means, widths = prior(n_parameters, inputs.features.shape[1])
    optimum = minimize(_loss, means, args=(inputs, values, noise, means, widths), jac=True, method="L-BFGS-B",
                       bounds=list(zip(means - 4 * widths, means + 4 * widths, strict=True)),
                       options={"maxiter": _ITERATIONS})
    weights = Weights.of_logs(optimum.x, n_parameters)
    spread = Process(inputs, values, noise, weights).left_out_spread()
    unsure = np.sqrt(1 + len(optimum.x) / len(values))  # the weights were fitted to the same few values
    return replace(weights, calibration=float(spread * unsure))


def _loss(logs: Array, inputs: Inputs, values: Array, noise: Array, means: Array, widths: Array
          ) -> tuple[float, Array]:
    """Negative log posterior of the weights' logarithms, and its gradient in them."""
    from scipy.linalg import cho_factor, cho_solve

    n_parameters = int(inputs.owner.max()) + 1
    weights = Weights.of_logs(logs, n_parameters)
    alike, like = _parts(inputs, inputs, weights)
    matrix = weights.alike * alike + weights.like_features * like
    matrix[np.diag_indices_from(matrix)] += weights.noise + noise + _NUGGET
    factor = cho_factor(matrix, lower=True)
    inverse = cho_solve(factor, np.eye(len(values)))
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
        from scipy.linalg import cho_solve, cholesky

        self.inputs, self.weights, self.values = inputs, weights, values
        matrix = self._kernel(inputs, inputs)
        matrix[np.diag_indices_from(matrix)] += weights.noise + noise + _NUGGET
        self._factor = cholesky(matrix, lower=True)
        self._solved = cho_solve((self._factor, True), values)

    def _kernel(self, left: Inputs, right: Inputs) -> Array:
        alike, like = _parts(left, right, self.weights)
        return np.asarray(self.weights.alike * alike + self.weights.like_features * like)

    def predict(self, wanted: Inputs) -> tuple[Array, Array]:
        """Posterior mean [m] and standard deviation [m] of the noiseless value."""
        from scipy.linalg import solve_triangular

        cross = self._kernel(self.inputs, wanted)
        weights = self.weights
        own = weights.alike + weights.like_features * bool(wanted.features.shape[1])  # the kernel of each with itself
        shrunk = solve_triangular(self._factor, cross, lower=True, check_finite=False)
        variance = np.maximum(own - (shrunk**2).sum(0), 1e-10)
        return cross.T @ self._solved, np.sqrt(variance) * weights.calibration

    def left_out_spread(self) -> float:
        """Root mean square of leave-one-out errors, in their standard deviations (Rasmussen & Williams, 5.4.2)."""
        from scipy.linalg import cho_solve

        inverse = np.diag(cho_solve((self._factor, True), np.eye(len(self.values))))
        scores = self._solved / np.sqrt(inverse)
        return float(np.clip(np.sqrt(np.mean(np.minimum(scores**2, 9.0))), 1.0, 1.6))
