# ruff: noqa: E402
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from study_fixtures import OBJECTIVE, Scores, TinySpace, opened, predict, searched
from training_fixtures import stripes

from hwnas.accuracy.estimator import Earlier, Estimate, EvaluatesAmong, load_estimator
from hwnas.accuracy.multi_fidelity import (
    MULTI_FIDELITY,
    FidelityOptions,
    Forecast,
    Halving,
    MultiFidelity,
    among_best,
    dominated,
    forecast,
    hopeless,
)
from hwnas.data.dataset import Dataset
from hwnas.errors import ConfigError, TrainingError, UnknownName
from hwnas.samplers.informed import STOPPED_STD, _top1
from hwnas.search.trial import SearchOptions, reuse_trials
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import binomial_std
from hwnas.study.objective import Objective
from hwnas.study.record import trial_rows
from hwnas.testing import check_estimator

ARCHITECTURE = Architecture((("ds_r1_k3_s2_c8",), ("ir_r1_k3_s2_e3_c16",)), 8, 1, 0, "relu", 16, 1, 4)
SHORT = replace(MULTI_FIDELITY, batch_size=16, threads=1)
RUNGS = FidelityOptions(rungs=(1, 2, 4), untrained=0)
RULE = Halving(3)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(256, 0), stripes(80, 1), stripes(80, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes")


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=4, image_size=16)


def logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, float)))


def networks(n: int, seed: int = 0, noise: float = 0.1, signal: float = 1.0) -> list[Earlier]:
    """Whole curves of three rungs whose logits rise by a half and a quarter; costs do not matter to them."""
    rng = np.random.default_rng(seed)
    first = rng.normal(1.0, 0.5, n)
    second = 1.5 + signal * (first - 1.0) + rng.normal(0, noise, n)
    third = 1.75 + signal * (second - 1.5) + rng.normal(0, noise, n)
    curves = logistic(np.column_stack([first, second, third]))
    return [Earlier((cost,), curve[-1], 0.01, tuple(curve)) for cost, curve in zip(rng.uniform(1, 4, n), curves,
                                                                                   strict=True)]


# What a rung says of the top


@pytest.mark.parametrize(("rung", "risen"), [(1, 0.75), (2, 0.25)])
def test_the_top_is_told_from_a_lower_rung_with_an_error_that_is_true(rung: int, risen: float) -> None:
    z = []
    for seed in range(60):
        history, new = networks(24, seed), networks(1, 1000 + seed)[0]
        found = forecast(new.curve[:rung], history, RULE)
        assert found is not None
        assert found.mean == pytest.approx(logistic(math.log(new.curve[rung - 1] / (1 - new.curve[rung - 1])) + risen),
                                           abs=0.05)
        z.append((new.value - found.mean) / found.std)
    assert 0.7 < np.std(z) < 1.4
    assert abs(np.mean(z)) < 0.5


def test_a_rung_that_does_not_rank_says_nothing_of_the_next() -> None:
    history = networks(40, noise=0.4, signal=0.0)
    good, bad = (forecast((value,), history, RULE) for value in (0.95, 0.3))
    assert good is not None
    assert bad is not None
    assert abs(good.mean - bad.mean) < 0.05
    assert good.std > 0.03  # and the error is that of not knowing


def test_one_outlier_moves_the_line_little() -> None:
    history = networks(20)
    odd = [*history, Earlier((1.0,), 0.1, 0.01, (0.9, 0.9, 0.1))]
    one, other = (forecast((0.8,), among, RULE) for among in (history, odd))
    assert one is not None
    assert other is not None
    assert abs(one.mean - other.mean) < 0.02
    assert other.std > one.std


def test_what_was_let_on_does_not_flatter_what_was_not() -> None:
    """Only networks with a good second rung were trained to the top; the first rung's forecast must not take theirs."""
    whole = networks(200, noise=0.3)
    kept = [one if one.curve[1] > 0.8 else replace(one, curve=one.curve[:2], stopped=True) for one in whole]
    assert 40 < sum(one.stopped for one in kept) < 160
    full, cut = (forecast((0.6,), among, RULE) for among in (whole, kept))
    assert full is not None
    assert cut is not None
    assert cut.mean == pytest.approx(full.mean, abs=0.03)


def test_little_history_equal_values_and_perfect_ones_are_borne() -> None:
    assert forecast((0.5,), networks(7), RULE) is None
    some = [*networks(20), *(replace(one, curve=one.curve[:1]) for one in networks(20))]
    assert forecast((0.5,), some[:7] + some[20:], RULE) is None  # 27 saw the first rung, 7 the step to the second
    for curve in ((0.1, 0.1, 0.1), (1.0, 1.0, 1.0), (0.0, 0.5, 1.0)):
        found = forecast((0.5,), [Earlier((1.0,), curve[-1], 0.0, curve)] * 10, RULE)
        assert found is not None
        assert found.mean == pytest.approx(curve[-1], abs=2e-3)
        assert 0 <= found.std < 1e-6


SHARE = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]) | st.floats(0, 1)
CURVES = st.lists(st.lists(SHARE, min_size=1, max_size=3), max_size=25)


@settings(max_examples=80, deadline=None)
@given(CURVES, st.lists(SHARE, min_size=1, max_size=2), st.floats(1e-6, 1e6))
def test_whatever_was_seen_a_verdict_is_a_top1_with_an_error(curves: list[list[float]], own: list[float],
                                                             cost: float) -> None:
    earlier = [Earlier((1.0 + i % 3,), curve[-1], 0.01, tuple(curve), len(curve) < 3)
               for i, curve in enumerate(curves)]
    found = forecast(own, earlier, RULE)
    enough = all(sum(len(curve) > rung for curve in curves) >= RULE.min_history for rung in range(len(own), 3))
    assert (found is not None) is enough
    if found is not None:
        assert 0 < found.mean < 1
        assert 0 <= found.std < math.inf
    verdict = hopeless(own, (cost,), earlier, RULE)
    assert verdict is None or verdict == found


# Who must not train on


def test_a_forecast_is_held_against_networks_that_cost_no_more() -> None:
    better = Earlier((2.0,), 0.9, 0.01, (0.7, 0.8, 0.9))
    low = Forecast(0.85, 0.02)  # 0.9 - 0.85 > 1.28 * hypot(0.02, 0.01)
    assert dominated(low, (2.0,), [better], RULE)
    assert not dominated(low, (1.9,), [better], RULE)
    assert not dominated(Forecast(0.85, 0.04), (2.0,), [better], RULE)
    assert dominated(Forecast(0.85, 0.04), (2.0,), [better], replace(RULE, quantile=0.8))
    assert not dominated(low, (2.0,), [replace(better, std=0.04)], RULE)
    assert not dominated(low, (2.0,), [replace(better, curve=better.curve[:2], stopped=True)], RULE)
    assert not dominated(low, (2.0, 1.0), [replace(better, costs=(1.0, 1.1))], RULE)
    assert dominated(low, (2.0, 1.1), [replace(better, costs=(1.0, 1.1))], RULE)


def test_the_best_third_of_similar_cost_goes_on() -> None:
    near = [Earlier((2.0 + 0.001 * i,), 0.0, 0.01, (0.50 + 0.01 * i,)) for i in range(12)]
    far = [Earlier((50.0,), 0.0, 0.01, (0.99,))] * 30
    assert among_best((0.58,), (2.0,), near + far, 3)  # three of the twelve are better
    assert not among_best((0.57,), (2.0,), near + far, 3)
    assert not among_best((0.58,), (50.0,), near + far, 3)
    assert among_best((0.0,), (2.0,), [], 3)


def test_stopped_only_when_it_can_neither_enter_the_front_nor_leads_its_rung() -> None:
    history = networks(40)
    poor, fair = (0.4,), (sorted(one.curve[0] for one in history)[-3],)
    found = hopeless(poor, (4.0,), history, RULE)
    assert found is not None
    assert found == forecast(poor, history, RULE)
    assert hopeless(poor, (0.5,), history, RULE) is None  # nothing is as cheap
    assert hopeless(fair, (4.0,), history, RULE) is None
    assert hopeless(poor, (4.0,), history[:7], RULE) is None
    assert hopeless((0.4, 0.4, 0.4), (4.0,), history, RULE) is None  # there is no rung above
    assert hopeless(poor, (4.0,), history, RULE, lambda found: Forecast(0.99, 0.01)) is None  # told by more than curves
    assert hopeless(poor, (4.0,), history, RULE, lambda found: Forecast(found.mean - 0.1, found.std)) == found


# Trainings


def history_of(value: float) -> list[Earlier]:
    """Cheap networks that had reached about `value` after the first rung, and 0.97 at the top."""
    return [Earlier((1.0,), 0.97 + 0.001 * i, 0.01, (value + 0.002 * i, value + 0.01 + 0.002 * i, 0.97 + 0.001 * i))
            for i in range(10)]


def test_it_keeps_the_contract_and_a_stopped_one_is_told_what_it_would_have_reached(dataset: Dataset) -> None:
    estimator, earlier = MultiFidelity(dataset, SHORT, RUNGS), history_of(0.95)
    check_estimator(estimator, ARCHITECTURE)
    assert isinstance(estimator, EvaluatesAmong)
    whole = estimator.evaluate_among(ARCHITECTURE, (0.5,), earlier, 0)  # cheaper than all of them
    assert (whole.curve_epochs, whole.stopped, whole.extrapolated) == ((1, 2, 4), False, False)
    assert len(whole.curve) == 3
    assert whole.value == whole.curve[-1] > 0.4
    assert whole.std == pytest.approx(binomial_std(whole.value, 80))
    found = estimator.evaluate_among(ARCHITECTURE, (2.0,), earlier, 0)
    assert (found.curve_epochs, found.stopped, found.extrapolated) == ((1,), True, True)
    assert found.curve == whole.curve[:1]  # what it trained is the same training
    predicted = forecast(found.curve, earlier, estimator.options.halving)
    assert predicted is not None
    assert found.value == predicted.mean
    assert found.std == pytest.approx(math.hypot(predicted.std, binomial_std(predicted.mean, 80)))


def test_divergence_names_epoch_and_learning_rate(dataset: Dataset) -> None:
    class Late(torch.nn.Module):
        """Breaks in its 20th step: the second epoch of 16 steps."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.steps = torch.nn.Linear(256, 4), 0

        def forward(self, images: Any) -> Any:
            self.steps += self.training
            return self.linear(images.flatten(1)) * (math.inf if self.steps == 20 else 1)

    with pytest.raises(TrainingError, match=r"loss is (nan|inf) in epoch 2 of 4, step 4 of 16, learning rate 0\.0"):
        MultiFidelity(dataset, SHORT, RUNGS, lambda architecture: Late()).evaluate(ARCHITECTURE, (), 0)


@pytest.mark.parametrize("train_images", [4, 9])
def test_fewer_images_than_a_batch_are_trained(dataset: Dataset, train_images: int) -> None:
    options = replace(RUNGS, train_images=train_images, validation_images=8, image_size=8)
    found = MultiFidelity(dataset, SHORT, options).evaluate(ARCHITECTURE, (), 0)
    assert len(found.curve) == 3
    assert found.std == pytest.approx(binomial_std(found.value, 8))


def test_config_sets_recipe_rungs_and_rule(dataset: Dataset, space: SearchSpace) -> None:
    found = load_estimator("multi_fidelity", dataset=dataset, space=space,
                           config={"rungs": [2, 5], "lr": 0.01, "eta": 4})
    assert isinstance(found, MultiFidelity)
    assert (found.options.rungs, found.recipe.epochs, found.recipe.lr, found.options.eta) == ((2, 5), 5, 0.01, 4)
    assert (found.recipe.min_steps, found.recipe.max_steps) == (0, 0)
    others = [load_estimator("multi_fidelity", dataset=dataset, space=space, config=config)
              for config in ({}, {"rungs": [1, 4]}, {"quantile": 0.8}, {"lr": 0.5}, {"untrained": 1}, {"anchors": 5})]
    assert len({found.fingerprint, *(other.fingerprint for other in others)}) == 7
    with pytest.raises(ConfigError, match=r"needs a search space.*multi_fidelity\.untrained=0"):
        load_estimator("multi_fidelity", dataset=dataset)
    load_estimator("multi_fidelity", dataset=dataset, config={"untrained": 0})


@pytest.mark.parametrize(("wrong", "said"), [
    *(({"rungs": rungs}, "rungs must be ascending whole numbers of epochs") for rungs in (
        [3, 1], [], "1,3", [1, 1], [0, 1], [1, 2.5], 3)),
    ({"eta": 1}, r"multi_fidelity\.eta must be a whole number from 2 to 100, got 1"),
    ({"untrained": -0.5}, r"multi_fidelity\.untrained must be a number from 0 to 100, got -0\.5"),
    ({"epochs": 3}, r"multi_fidelity\.epochs is decided by the rungs\. Give epochs as multi_fidelity\.rungs"),
    ({"max_steps": 3}, r"multi_fidelity\.max_steps is decided by the rungs"),
    ({"lr": 1000}, r"multi_fidelity\.lr must be a number from 1e-08 to 100")])
def test_a_wrong_option_is_named_in_one_line(dataset: Dataset, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_estimator("multi_fidelity", dataset=dataset, config=wrong)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_refused_with_those_that_are_near(dataset: Dataset) -> None:
    with pytest.raises(UnknownName, match=r"unknown key of multi_fidelity 'wieght_decay'.* Did you mean weight_decay"):
        load_estimator("multi_fidelity", dataset=dataset, config={"wieght_decay": 1})


# The door, as a search goes through it


class Halved(Scores):
    """Scores that ask for the others: what costs 2 ms or more is stopped, with an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.among: list[tuple[tuple[float, ...], list[Earlier]]] = []

    def evaluate_among(self, architecture: Architecture, costs: Sequence[float], earlier: Sequence[Earlier],
                       seed: int) -> Estimate:
        self.among.append((tuple(costs), list(earlier)))
        whole = self.evaluate(architecture, (), seed)
        if costs[0] < 1.5:
            return replace(whole, curve_epochs=(3, 9))
        return replace(whole, curve=whole.curve[:1], curve_epochs=(3,), stopped=True, extrapolated=True, std=0.03)


def test_a_search_tells_its_networks_and_keeps_what_was_said(tmp_path: Path) -> None:
    objective = Objective(target_ms=1.5, kind="cap")
    scores = Halved()
    searched(opened(tmp_path, objective=objective), 5, estimator=scores, objective=objective)
    study = opened(tmp_path, objective=objective)  # what was seen is read from the study, so that it survives a kill
    searched(study, 8, estimator=scores, objective=objective)
    rows = [row for row in trial_rows(study) if row["outcome"] == "evaluated"]
    assert [len(earlier) for _, earlier in scores.among] == list(range(8))
    for (costs, _), row in zip(scores.among, rows, strict=True):
        assert costs == (pytest.approx(row["latency_ms_predicted"]),)
        assert row["epochs"] == (3 if row["stopped"] else 9)
        assert bool(row["extrapolated"]) is row["stopped"]
    told = scores.among[-1][1]
    assert {one.stopped for one in told} == {True, False}
    for one, row in zip(told, rows[:-1], strict=True):
        assert (one.costs, one.value, one.std) == ((row["latency_ms_predicted"],), row["top1_proxy"], row["top1_std"])
        assert len(one.curve) == (1 if one.stopped else 2)
    # The sampler takes a prediction's own error, but not that of an early epoch.
    for trial in study.trials:
        if trial.user_attrs.get("stopped"):
            assert _top1(trial) == (trial.user_attrs["top1_proxy"], 0.03)
            trial.user_attrs.pop("extrapolated")
            assert _top1(trial) == (trial.user_attrs["top1_proxy"], STOPPED_STD)


def test_a_search_for_two_costs_tells_both(tmp_path: Path) -> None:
    objective = Objective(target_ms=1.5, known=("latency_ms", "size_mb"))
    study, scores = opened(tmp_path, objective=objective), Halved()
    searched(study, 3, estimator=scores, objective=objective)
    for (costs, _), trial in zip(scores.among, study.trials, strict=True):
        assert costs == (trial.user_attrs["latency_ms_predicted"], trial.user_attrs["size_mb_predicted"])
    assert [one.costs for one in scores.among[-1][1]] == [costs for costs, _ in scores.among[:-1]]


def test_what_another_targets_front_stopped_may_enter_this_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    earlier = opened(tmp_path / "a")
    searched(earlier, 8, estimator=Halved())
    whole = [trial for trial in earlier.trials if trial.user_attrs.get("stopped") is False]  # duplicates say nothing
    assert 0 < len(whole) < 8
    study, scores = opened(tmp_path / "b"), Halved()
    assert reuse_trials(study, tmp_path / "a", TinySpace(), predict, SearchOptions(9, OBJECTIVE)) == len(whole)
    assert [trial.user_attrs["curve_epochs"] for trial in study.trials] == [[3, 9]] * len(whole)
    searched(study, 1, estimator=scores)
    assert [one.value for one in scores.among[0][1]] == [trial.user_attrs["top1_proxy"] for trial in whole]
