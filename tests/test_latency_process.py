"""The Gaussian process against scikit-learn's, and its conduct where nothing is known."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.latency.process import Process


def test_posterior_is_scikit_learns_at_the_same_settings():
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    rng = np.random.default_rng(0)
    inputs, new = rng.normal(size=(40, 3)), rng.normal(size=(7, 3))
    values, noise = 0.1 * np.sin(inputs[:, 0]) + 0.05 * inputs[:, 1], np.full(40, 0.01)
    ours = Process.fit(inputs, values, noise)
    kernel = ConstantKernel(ours.amplitude**2, "fixed") * Matern(ours.length, "fixed", nu=2.5)
    theirs = GaussianProcessRegressor(kernel, alpha=noise**2 + ours.noise**2, optimizer=None)
    theirs.fit((inputs - ours.centre) / ours.scale, values - ours.offset)
    mean, std = theirs.predict((new - ours.centre) / ours.scale, return_std=True)
    found_mean, found_std = ours.predict(new)
    np.testing.assert_allclose(found_mean, mean + ours.offset, atol=1e-8)
    np.testing.assert_allclose(found_std, np.sqrt(std**2 + ours.noise**2), atol=1e-6)


def test_far_away_it_returns_to_the_offset_and_says_it_does_not_know():
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(30, 2))
    fitted = Process.fit(inputs, 0.2 * inputs[:, 0], np.full(30, 0.01))
    near, far = fitted.predict(inputs[:1]), fitted.predict(inputs[:1] + 1e3)
    assert far[0][0] == pytest.approx(fitted.offset, abs=1e-9)
    assert far[1][0] > near[1][0]


def test_constant_inputs_are_ignored():
    rng = np.random.default_rng(2)
    inputs = np.column_stack([rng.normal(size=20), np.ones(20)])
    fitted = Process.fit(inputs, inputs[:, 0] * 0.1, np.full(20, 0.01))
    moved = inputs + np.array([0.0, 5.0])
    np.testing.assert_allclose(fitted.predict(moved)[0], fitted.predict(inputs)[0])
