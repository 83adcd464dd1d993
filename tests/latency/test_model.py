"""The latency model: recovers additive truths, widens where it knows nothing, and covers what it promises."""

from __future__ import annotations

import dataclasses
import itertools
import json
from itertools import pairwise

import numpy as np
import pytest
from table_fixtures import made_up_ms, sample_networks, table_of

from hwnas.errors import MissingLatency, TableError
from hwnas.latency.features import NAMES, Costs, Features, Operator, block_features, operator_features, usual_place
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.model import Ends, Fit, LatencyModel, interval_ends, timed_networks
from hwnas.latency.prior import stored_prior
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable
from hwnas.space.blocks.block import BlockSpec
from hwnas.stats import conformal_quantile

QUICK = 3  # folds, where the intervals are of no matter


def test_only_the_part_of_a_kernel_that_meets_the_map_is_read() -> None:
    def of(kernel: int, size: int) -> list[float]:
        row = dict(zip(NAMES, operator_features(Operator("dense", 64, 64, kernel, size, size)), strict=True))
        return [row["dense_weights"], row["weights_pad16"]]

    assert of(3, 1) == of(1, 1)
    assert of(5, 2) == of(3, 2) == of(3, 8)
    assert of(5, 3) == of(5, 8)
    halved = dict(zip(NAMES, operator_features(Operator("dense", 64, 64, 3, 2, 1)), strict=True))
    assert halved["dense_weights"] == of(2, 8)[0]  # a stride of 2 leaves it the middle and what lies behind


def test_what_squeeze_and_excite_pools_is_what_stands_before_it() -> None:
    operators = (("depthwise", 32, 32, 3, 8, 8), ("se", 32, 8, 1, 1, 1), ("se", 8, 32, 1, 1, 1),
                 ("pointwise", 32, 16, 1, 8, 8))
    with_it, without = (BlockSpec("traced", 32, 16, 8, 0, 1, activation="relu", operators=each)
                        for each in (operators, (operators[0], operators[3])))
    at = NAMES.index("pooled_elements")
    assert block_features(with_it)[at] == pytest.approx(32 * 8 * 8 * 1e-5)
    assert block_features(without)[at] == 0


@pytest.fixture(scope="module")
def fitted(space) -> tuple[LatencyTable, LatencyModel]:
    """A table of 40 networks, and its model."""
    table = table_of(space, sample_networks(space, 40, 1))
    return table, LatencyModel.fit(table, space, folds=QUICK)


def test_networks_never_seen_are_predicted_and_covered(space):
    model = LatencyModel.fit(table_of(space, sample_networks(space, 64, 1)), space)
    new = sample_networks(space, 200, 2)
    truth = np.array([made_up_ms(one) for one in new])
    found = model.predict_architectures(new)
    assert np.mean(np.abs(found.mean / truth - 1)) < 0.05
    assert np.mean((found.low <= truth) & (truth <= found.high)) > 0.8
    assert np.all(found.low < found.mean)
    assert np.all(found.mean < found.high)


def test_codes_and_architectures_are_predicted_alike(space, fitted):
    _, model = fitted
    codes = space.sample(np.random.default_rng(3), 50)
    by_codes = model.predict(codes)
    by_architectures = model.predict_architectures([space.decode(space.to_params(row)) for row in codes])
    for name in ("mean", "low", "high"):
        np.testing.assert_allclose(getattr(by_codes, name), getattr(by_architectures, name), rtol=1e-9)


def test_a_network_unlike_those_measured_gets_a_wider_interval(space):
    small = sorted(sample_networks(space, 200, 1), key=lambda one: one.macs)
    model = LatencyModel.fit(table_of(space, small[:50]), space, folds=QUICK)
    like, unlike = model.predict_architectures([small[25], small[-1]]).high / model.predict_architectures(
        [small[25], small[-1]]).mean
    assert unlike > like


def test_the_stored_error_is_of_networks_held_out(space):
    """Pure noise cannot be predicted: an error measured on the fitted networks themselves would be smaller."""
    table = table_of(space, sample_networks(space, 60, 1), noise=0.3)
    error = LatencyModel.fit(table, space).error
    timed = timed_networks(table.networks, table.quiet_ms)
    fitted, _ = Fit.of(timed).networks(timed.blocks)
    measured = timed.measured_ms
    assert error["n"] == 60
    assert error["mean_error"] > np.mean(np.abs(fitted / measured - 1))
    assert 0.8 <= error["coverage"] <= 1


def test_too_few_networks_of_the_space_is_an_error_with_the_command_that_measures(space):
    with pytest.raises(MissingLatency, match="hwnas profile target="):
        LatencyModel.fit(table_of(space, sample_networks(space, LEAST_NETWORKS - 1, 1)), space)
    with pytest.raises(MissingLatency, match="0 networks of space mnasnet_small"):
        LatencyModel.fit(table_of(space, sample_networks(space, 30, 1), name="other"), space)


def test_costs_are_never_negative(space):
    rng = np.random.default_rng(0)
    features = Features()
    design = features.design(features.of_networks([one.blocks() for one in sample_networks(space, 30, 1)]))
    costs = Costs.fit(design, np.exp(rng.standard_normal(30)), features.ridge)
    assert np.all(costs.values >= 0)
    assert np.all(costs.latency_ms(design) > 0)


def test_what_was_learnt_is_stored_and_gives_the_same_predictions(space, fitted):
    table, first = dataclasses.replace(fitted[0], networks=list(fitted[0].networks)), fitted[1]
    table.learnt = json.loads(json.dumps({space.name: first.learnt.to_dict()}))
    again = LatencyModel.fit(table, space)
    new = sample_networks(space, 20, 7)
    for name in ("mean", "low", "high"):
        np.testing.assert_allclose(getattr(again.predict_architectures(new), name),
                                   getattr(first.predict_architectures(new), name))
    table.networks.pop()  # of other networks it says nothing
    assert LatencyModel.fit(table, space, folds=QUICK).learnt.networks == 39


@pytest.mark.soak
def test_an_operator_that_is_slow_after_another_is_learnt(space, monkeypatch):
    """Matrix units cool down: dense convolutions take half as long again here after another kind of block."""
    def slow_ms(one) -> float:
        pairs = itertools.pairwise(one.blocks())
        late = [block for before, block in pairs if block.kind == "cn" and before.kind != "cn"]
        return made_up_ms(one) + 0.5 * sum(0.002 + 9e-9 * block.macs for block in late)

    table = table_of(space, sample_networks(space, 200, 1), noise=0.001, truth=slow_ms)
    new = sample_networks(space, 100, 2)
    truth = np.array([slow_ms(one) for one in new])

    def error() -> float:
        return float(np.abs(LatencyModel.fit(table, space).predict_architectures(new).mean / truth - 1).mean())

    with_context = error()
    # without a look at what comes before, all operators stand after nothing
    monkeypatch.setattr("hwnas.latency.model.placed", lambda blocks: [(block, "") for block in blocks])
    assert with_context < 0.8 * error()


@pytest.mark.soak
def test_slow_waves_are_told_from_slow_networks(space):
    """Every second wave was 5 % slower by its reference's luck: predictions are of the mean pace."""
    networks = sample_networks(space, 96, 1)
    table = table_of(space, networks, noise=0.001)
    for index, one in enumerate(table.networks):
        wave = index // 24
        factor = 1.05 if wave % 2 else 1.0
        turns = tuple(Turn(tuple(ms * factor for ms in turn.samples_ms), (100.0,)) for turn in one.measurement.turns)
        measured = Measurement(turns, 0.1 * (1 + 1e-6 * wave), Protocol())
        table.networks[index] = dataclasses.replace(one, measurement=measured)
    model = LatencyModel.fit(table, space)
    new = sample_networks(space, 60, 2)
    ratio = model.predict_architectures(new).mean / np.array([made_up_ms(one) for one in new])
    assert np.median(ratio) == pytest.approx(1.025, abs=0.012)
    assert model.error["mean_error"] < 0.015


@pytest.mark.soak
def test_one_run_has_no_pace_of_its_own(space):
    """All in one wave: nothing of the latency may hide in the wave."""
    model = LatencyModel.fit(table_of(space, sample_networks(space, 200, 1), noise=0.001), space)
    new = sample_networks(space, 60, 2)
    ratio = model.predict_architectures(new).mean / np.array([made_up_ms(one) for one in new])
    assert np.median(ratio) == pytest.approx(1.0, abs=0.01)


def test_entries_of_blocks_add_up_to_networks_and_are_sure_of_what_was_measured(space):
    networks = sample_networks(space, 80, 1)
    table = table_of(space, networks)
    fit = Fit.of(timed_networks(table.networks, table.quiet_ms))
    for one in networks[:5]:
        mean, _ = fit.entries([usual_place(block) for block in one.blocks()])
        assert np.all(mean > 0)
        assert mean.sum() == pytest.approx(made_up_ms(one), rel=0.25)
    known = networks[0].blocks()[1]
    far = dataclasses.replace(known, in_channels=512, out_channels=512)
    mean, variance = fit.entries([usual_place(block) for block in (known, far)])
    assert np.sqrt(variance[1]) / mean[1] > np.sqrt(variance[0]) / mean[0]


@pytest.mark.parametrize(("q", "expected"), [(0.05, 0.0), (0.5, 5.0), (0.95, 9.0), (0.9, 9.0), (0.8, 8.0)])
def test_conformal_quantiles_are_rounded_outwards(q, expected):
    assert conformal_quantile(np.arange(10.0), q) == expected


@pytest.mark.parametrize("log_mean", [np.zeros(90), np.repeat([-1.0, 0.0], [80, 10])])
def test_predictions_that_tie_have_one_interval(log_mean):
    scores = np.random.default_rng(0).standard_normal(90)
    ends = Ends.of(scores, log_mean, np.array(["random"] * 90))
    assert (ends.edges, ends.low) == ((), (conformal_quantile(scores, 0.05),))
    assert np.isfinite(ends.at(log_mean)).all()


@pytest.mark.parametrize("low", [-2.0, 0.0, 2.0])
def test_more_variance_between_runs_makes_every_interval_wider(low):
    ends = [interval_ends(np.array([low]), np.array([low + 1]), np.array([0.02]), run) for run in (0.0, 0.02, 0.06)]
    for (before_low, before_high), (after_low, after_high) in pairwise(ends):
        assert after_low < before_low < before_high < after_high


def test_a_damaged_fit_that_a_table_has_stored_is_one_line(space, fitted):
    table, first = dataclasses.replace(fitted[0]), fitted[1]
    stored = json.loads(json.dumps(first.learnt.to_dict()))
    for wrong in ({"ends": [-1.5, 1.5]}, {"ends": {"edges": [0.0], "low": [-1.0], "high": [1.0]}}, {"ends": {}},
                  {"variances": {}}, {"priors": 5}, {"priors": [5]}):
        table.learnt = {space.name: {**stored, **wrong}}
        for read in (LatencyModel.fit, stored_prior) if "priors" in wrong else (LatencyModel.fit,):
            with pytest.raises(TableError, match="learnt: "):
                read(table, space)


def waves_of(space, slow: float, processes: int) -> LatencyTable:
    """Four waves of 20 networks on as many processes, of which the third runs depthwise kernels `slow` times as long;
    the model must not take that for a property of networks."""
    def truth(architecture) -> float:
        depthwise = sum(n_out * kernel**2 * out**2 for block in architecture.blocks()
                        for role, _, n_out, kernel, _, out in block.convolutions() if role == "depthwise")
        return made_up_ms(architecture) + depthwise * 4e-8 * (slow - 1)

    table, odd = (table_of(space, sample_networks(space, 80, 1), truth=each) for each in (made_up_ms, truth))
    for index, network in enumerate(table.networks):
        source = odd.networks[index] if index // 20 == 2 else network
        table.networks[index] = dataclasses.replace(network, measurement=dataclasses.replace(
            source.measurement, quiet_ms=0.1 + 1e-6 * (index // 20)))
    table.processes = {space.name: processes}
    return table


def test_where_each_wave_had_a_process_a_network_is_held_out_with_its_process(space):
    alike, apart = (LatencyModel.fit(waves_of(space, 1.0, processes), space, folds=4).error for processes in (0, 4))
    assert apart["mean_error"] == pytest.approx(alike["mean_error"], rel=0.3)
    known, unknown = (LatencyModel.fit(waves_of(space, 4.0, processes), space, folds=4).error for processes in (0, 4))
    assert unknown["mean_error"] > known["mean_error"] > alike["mean_error"]
    partly = LatencyModel.fit(waves_of(space, 4.0, 3), space, folds=4).error  # waves of before had one for all
    assert partly["mean_error"] == known["mean_error"]
    assert unknown["coverage"] >= 0.85


def test_intervals_are_as_wide_as_each_third_and_the_front_need():
    rng = np.random.default_rng(0)
    scores, log_mean = rng.standard_normal(240), rng.uniform(-3, 0, 240)
    origins = np.array(["random", "front", "random", "random"] * 60)
    scores[origins == "front"] *= 3
    low, high = Ends.of(scores, log_mean, origins).at(log_mean)
    inside = (low <= scores) & (scores <= high)
    assert inside[origins == "front"].mean() >= 0.9
    origins[origins == "front"] = "random"
    low, high = Ends.of(scores, log_mean, origins).at(log_mean)
    assert ((low <= scores) & (scores <= high)).mean() < inside.mean()
    rng = np.random.default_rng(0)
    log_mean = np.linspace(-3, 0, 300)
    scores = rng.standard_normal(300) * np.repeat([0.5, 1.0, 3.0], 100)  # slow networks err most
    ends = Ends.of(scores, log_mean, np.array(["random"] * 300))
    assert len(ends.edges) == 2
    low, high = ends.at(log_mean)
    inside = (low <= scores) & (scores <= high)
    assert all(0.9 <= inside[third].mean() <= 0.93 for third in np.split(np.arange(300), 3))
    assert ends.high[2] > 4 * ends.high[0] > 0 > ends.low[0] > ends.low[2] / 4
    few = Ends.of(scores[:50], log_mean[:50], np.array(["random"] * 50))
    assert (few.edges, few.low, few.high) == ((), (conformal_quantile(scores[:50], 0.05),),
                                              (conformal_quantile(scores[:50], 0.95),))
