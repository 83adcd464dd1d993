"""A small Gaussian process on standardised inputs, its few settings chosen by marginal likelihood on a grid."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

LENGTHS = (0.7, 1.5, 3.0, 6.0)      # in units of sqrt(dimensions)
AMPLITUDES = (0.02, 0.05, 0.1, 0.2)  # log units
NOISES = (0.01, 0.02, 0.04, 0.08)    # log units


@dataclass(frozen=True)
class Process:
    """Posterior of a zero-mean process with a Matern-5/2 kernel and a constant offset."""

    centre: np.ndarray
    scale: np.ndarray
    inputs: np.ndarray
    alpha: np.ndarray
    inverse: np.ndarray
    offset: float
    length: float
    amplitude: float
    noise: float

    @classmethod
    def empty(cls) -> Process:
        """The process that knows nothing and predicts 0."""
        none = np.empty((0, 0))
        return cls(np.zeros(0), np.ones(0), none, np.empty(0), none, 0.0, 1.0, 0.0, 0.0)

    @classmethod
    def fit(cls, inputs: np.ndarray, values: np.ndarray, noise: np.ndarray) -> Process:
        """Fit `values` [n] at `inputs` [n, d]; `noise` [n] is each value's own standard error."""
        centre, scale = inputs.mean(axis=0), inputs.std(axis=0)
        used = scale > 1e-9
        scale = np.where(used, scale, np.inf)
        points = (inputs - centre) / scale
        offset = float(np.median(values))
        distances = _distances(points, points)
        best = max(product(LENGTHS, AMPLITUDES, NOISES),
                   key=lambda s: _log_likelihood(distances, values - offset, noise, int(used.sum()), *s))
        length, amplitude, extra = best
        gram = amplitude**2 * _matern(distances / (length * np.sqrt(used.sum())))
        inverse = np.linalg.inv(gram + np.diag(noise**2 + extra**2))
        return cls(centre, scale, points, inverse @ (values - offset), inverse, offset,
                   length * float(np.sqrt(used.sum())), amplitude, extra)

    def predict(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [n] of new values (their own noise included)."""
        points = (inputs - self.centre) / self.scale
        cross = self.amplitude**2 * _matern(_distances(points, self.inputs) / self.length)
        variance = self.amplitude**2 - np.einsum("ij,ij->i", cross @ self.inverse, cross)
        return cross @ self.alpha + self.offset, np.sqrt(np.maximum(variance, 0) + self.noise**2)


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.sqrt(np.maximum(squares, 0))


def _matern(r: np.ndarray) -> np.ndarray:
    scaled = np.sqrt(5.0) * r
    return (1 + scaled + scaled**2 / 3) * np.exp(-scaled)


def _log_likelihood(distances: np.ndarray, values: np.ndarray, noise: np.ndarray, dimensions: int, length: float,
                    amplitude: float, extra: float) -> float:
    gram = amplitude**2 * _matern(distances / (length * np.sqrt(dimensions))) + np.diag(noise**2 + extra**2)
    factor = np.linalg.cholesky(gram)
    white = np.linalg.solve(factor, values)
    return float(-0.5 * white @ white - np.log(np.diag(factor)).sum())
