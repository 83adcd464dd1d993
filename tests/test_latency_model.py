"""The latency model: recovers additive truths, widens where it knows nothing, and covers what it promises."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.errors import MissingLatency
from hwnas.latency.features import NAMES, block_features, network_features
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.model import Fit, LatencyModel, conformal_quantile
from hwnas.latency.table import LatencyTable, TableKey, TimedNetwork
from hwnas.space import SearchSpace
from hwnas.target import Target


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=10)


def true_ms(architecture) -> float:
    """A machine: a call per convolution, MACs by kind, and a fixed cost, none of them the model's own features."""
    total = 0.02
    for block in architecture.blocks():
        for role, n_in, n_out, kernel, _, out in block.convolutions():
            macs = (1 if role == "depthwise" else n_in) * n_out * kernel**2 * out**2
            total += 0.002 + macs * (4e-8 if role == "depthwise" else 8e-9) * (1.2 if kernel == 5 else 1.0)
    return total


def table_of(space, architectures, noise: float = 0.01, name: str | None = None) -> LatencyTable:
    rng = np.random.default_rng(0)
    key = TableKey.of(Target("t", "null", "int8"), space.image_sizes, space.channels, space.classes)
    networks = []
    for one in architectures:
        ms = true_ms(one) * float(np.exp(noise * rng.standard_normal()))
        turns = tuple(Turn((ms * (1 + 0.001 * i),), 0.1) for i in range(8))
        networks.append(TimedNetwork(name or space.name, one, Measurement(turns, 0.1, Protocol())))
    return LatencyTable(key, {"name": "here"}, "null 1", "2026-01-01", Protocol(), space.reference, 0.1, 0.0, networks)


def sample(space, n, seed):
    found = {}
    for row in space.sample(np.random.default_rng(seed), 2 * n):
        one = space.decode(space.to_params(row))
        found.setdefault(one.id, one)
    return list(found.values())[:n]


def test_networks_never_seen_are_predicted_and_covered(space):
    model = LatencyModel.fit(table_of(space, sample(space, 64, 1)), space)
    new = sample(space, 200, 2)
    truth = np.array([true_ms(one) for one in new])
    found = model.predict_architectures(new)
    assert np.mean(np.abs(found.mean / truth - 1)) < 0.05
    assert np.mean((found.low <= truth) & (truth <= found.high)) > 0.8
    assert np.all(found.low < found.mean)
    assert np.all(found.mean < found.high)


def test_codes_and_architectures_are_predicted_alike(space):
    model = LatencyModel.fit(table_of(space, sample(space, 40, 1)), space)
    codes = space.sample(np.random.default_rng(3), 50)
    by_codes = model.predict(codes)
    by_architectures = model.predict_architectures([space.decode(space.to_params(row)) for row in codes])
    for name in ("mean", "low", "high", "std"):
        np.testing.assert_allclose(getattr(by_codes, name), getattr(by_architectures, name), rtol=1e-9)


def test_a_network_unlike_those_measured_gets_a_wider_interval(space):
    small = sorted(sample(space, 200, 1), key=lambda one: one.macs)
    model = LatencyModel.fit(table_of(space, small[:50]), space)
    like, unlike = model.predict_architectures([small[25], small[-1]]).high / model.predict_architectures(
        [small[25], small[-1]]).mean
    assert unlike > like


def test_the_stored_error_is_of_networks_held_out(space):
    """Pure noise cannot be predicted: an error measured on the fitted networks themselves would be smaller."""
    table = table_of(space, sample(space, 60, 1), noise=0.3)
    error = LatencyModel.held_out_error(table, space)
    features = np.array([network_features(one.architecture.blocks()) for one in table.networks])
    measured = np.array([one.measurement.latency_ms for one in table.networks])
    fitted, _ = Fit.of(features, measured).predict(features)
    assert error["n"] == 60
    assert error["mean_error"] > np.mean(np.abs(fitted / measured - 1))
    assert 0.8 <= error["coverage"] <= 1


def test_too_few_networks_of_the_space_is_an_error_with_the_command_that_measures(space):
    with pytest.raises(MissingLatency, match=r"python -m hwnas\.profile"):
        LatencyModel.fit(table_of(space, sample(space, 11, 1)), space)
    with pytest.raises(MissingLatency, match="0 networks of space mnasnet_small"):
        LatencyModel.fit(table_of(space, sample(space, 30, 1), name="other"), space)


def test_costs_are_never_negative(space):
    rng = np.random.default_rng(0)
    features = np.array([network_features(one.blocks()) for one in sample(space, 30, 1)])
    fit = Fit.of(features, np.exp(rng.standard_normal(30)))
    assert np.all(fit.costs >= 0)
    assert np.all(fit.predict(features)[0] > 0)


@pytest.mark.parametrize(("q", "expected"), [(0.05, 0.0), (0.5, 5.0), (0.95, 9.0), (0.9, 9.0), (0.8, 8.0)])
def test_conformal_quantiles_are_rounded_outwards(q, expected):
    assert conformal_quantile(np.arange(10.0), q) == expected


def test_features_add_up_and_see_every_choice(space):
    one, *_ = sample(space, 1, 4)
    np.testing.assert_allclose(network_features(one.blocks()), sum(block_features(block) for block in one.blocks()))
    assert len(block_features(one.blocks()[0])) == len(NAMES) == len(set(NAMES))
    se = [block for other in sample(space, 40, 5) for block in other.blocks() if block.se]
    assert se[0].se_channels > 0
    assert block_features(se[0])[NAMES.index("pooled_elements")] > 0
