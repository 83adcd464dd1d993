# ruff: noqa: E402
from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau
from training_fixtures import stripes

from hwnas.accuracy.estimator import Earlier, Prepares
from hwnas.accuracy.multi_fidelity import MultiFidelity, Scale
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.errors import ConfigError, DataError, TrainingError
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import binomial_std
from hwnas.testing import check_estimator

SCALE = Scale.of([0.5, 0.6, 0.7, 0.8], [1.0, 2.0, 3.0, 4.0])
TOP1, SCORE = st.floats(0, 1), st.floats(-1e9, 1e9)


def logit(top1: float) -> float:
    return math.log(top1 / (1 - top1))


# What a score stands for


def test_a_score_in_the_middle_stands_for_the_middle_and_one_width_for_one_width() -> None:
    middle = (logit(0.6) + logit(0.7)) / 2
    assert logit(SCALE.drawn(0.9, 0.01, 2.5, 1.0)[0]) == pytest.approx((logit(0.9) + middle) / 2)
    above = SCALE.drawn(0.9, 0.01, 2.5 + SCALE.score_width, 1.0)[0]
    assert logit(above) == pytest.approx((logit(0.9) + middle + SCALE.top1_width) / 2)
    rng = np.random.default_rng(0)
    wide = Scale.of(1 / (1 + np.exp(-rng.normal(1, 0.3, 4000))), rng.normal(0, 2, 4000))
    assert (wide.top1_width, wide.score_width) == (pytest.approx(0.3, rel=0.05), pytest.approx(2, rel=0.05))


@settings(max_examples=60, deadline=None)
@given(TOP1, SCORE, TOP1, SCORE, st.floats(0, 5))
def test_more_top1_and_a_higher_score_are_never_told_worse(top1: float, score: float, other: float, second: float,
                                                           weight: float) -> None:
    low, high = (SCALE.drawn(one, binomial_std(one, 200), two, weight)
                 for one, two in zip(sorted((top1, other)), sorted((score, second)), strict=True))
    assert 0 < low[0] <= high[0] + 1e-9
    assert high[0] < 1


@settings(max_examples=60, deadline=None)
@given(TOP1, st.none() | SCORE, st.floats(0, 5), st.integers(1, 10**6))
def test_an_error_stays_one_and_shrinks_as_the_trainings_share_does(top1: float, score: float | None, weight: float,
                                                                   n: int) -> None:
    value, std = SCALE.drawn(top1, binomial_std(top1, n), score, weight)
    assert 0 < value < 1
    assert 0 < std < 0.5
    inside = SCALE.drawn(0.6, 0.01, 2.5, weight)
    assert inside[1] == pytest.approx(0.01 / (1 + weight), rel=0.1)
    assert SCALE.drawn(0.6, 0.01, score, 0.0) == (pytest.approx(0.6), pytest.approx(0.01))


def test_no_score_stands_for_the_middle() -> None:
    assert SCALE.drawn(0.9, 0.01, None, 0.5) == SCALE.drawn(0.9, 0.01, SCALE.score_middle, 0.5)


def test_scores_that_are_all_equal_decide_nothing_and_a_failed_anchor_little() -> None:
    flat = Scale.of([0.5, 0.6, 0.7], [2.0, 2.0, 2.0])
    assert flat.drawn(0.6, 0.01, 9.0, 1.0) == flat.drawn(0.6, 0.01, 2.0, 1.0)
    top1, scores = [0.6 + 0.01 * one for one in range(12)], [float(one) for one in range(12)]
    odd = Scale.of([0.1, *top1[1:]], scores)
    assert odd.top1_width < 3 * Scale.of(top1, scores).top1_width  # a standard deviation would be five times as wide


def test_two_noisy_tellings_rank_better_together() -> None:
    taus = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        truth = rng.normal(0, 1, 60)
        top1 = 1 / (1 + np.exp(-(1 + 0.2 * (truth + rng.normal(0, 0.8, 60)))))
        scores = 100 + 9 * (truth + rng.normal(0, 1.2, 60))
        scale = Scale.of(top1[:8], scores[:8])
        drawn = [scale.drawn(one, 0.01, score, 0.5)[0] for one, score in zip(top1, scores, strict=True)]
        taus.append([kendalltau(values, truth).statistic for values in (drawn, top1, scores)])
    together, training, untrained = np.mean(taus, axis=0)
    assert together > training + 0.03
    assert together > untrained + 0.03


# The estimator


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(256, 0), stripes(80, 1), stripes(80, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes")


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=4, image_size=16)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))


CONFIG = {"rungs": [1, 2], "train_images": 64, "validation_images": 40, "batch_size": 16, "threads": 1, "anchors": 5,
          "image_size": 8}


def made(dataset: Dataset, space: SearchSpace, **more: Any) -> MultiFidelity:
    return MultiFidelity.from_config({**CONFIG, **more}, dataset, space)


def candidate(space: SearchSpace, seed: int = 7) -> Architecture:
    return space.decode(space.to_params(space.sample(np.random.default_rng(seed), 1)[0]))


def test_it_keeps_the_contract_and_trains_its_anchors_once(dataset: Dataset, space: SearchSpace) -> None:
    estimator, network = made(dataset, space), candidate(space)
    assert isinstance(estimator, Prepares)
    with pytest.raises(ValueError, match="call prepare"):
        estimator.evaluate(network)
    estimator.prepare(Console(quiet=True))
    assert estimator.setup_here
    assert estimator.setup_seconds > 0
    check_estimator(estimator, network)
    again = made(dataset, space)
    again.prepare(Console(quiet=True))
    assert (again.setup_here, again.setup_seconds) == (False, estimator.setup_seconds)
    assert again.evaluate(network, (), 3).value == estimator.evaluate(network, (), 3).value
    other = made(dataset, space, untrained=2.0)  # the same anchors, whatever they count
    other.prepare(Console(quiet=True))
    assert not other.setup_here


@pytest.mark.soak
def test_its_value_lies_between_what_training_and_score_say(dataset: Dataset, space: SearchSpace) -> None:
    estimator, alone, network = made(dataset, space), made(dataset, space, untrained=0), candidate(space)
    estimator.prepare(Console(quiet=True))
    alone.prepare(Console(quiet=True))  # nothing to do
    assert alone.setup_seconds == 0
    found, trained = estimator.evaluate(network, (), 0), alone.evaluate(network, (), 0)
    assert found.curve == trained.curve  # the curve is the training's own
    assert trained.value == trained.curve[-1]
    assert estimator.untrained is not None
    score = estimator.untrained.score(network, 0)
    assert (found.value, found.std) == estimator.untrained.drawn(trained.value, trained.std, score)
    whole = made(dataset, space, untrained=100)
    whole.prepare(Console(quiet=True))
    stands_for = whole.evaluate(network, (), 0).value  # hardly any training in it
    assert min(trained.value, stands_for) < found.value < max(trained.value, stands_for)
    assert found.low < found.value < found.high
    estimator.untrained.score = lambda architecture, seed: None  # type: ignore[method-assign]
    middle = estimator.untrained.drawn(trained.value, trained.std, None)
    assert (estimator.evaluate(network, (), 0).value, found.curve) == (middle[0], trained.curve)


def test_a_forecast_is_drawn_as_well_before_it_is_held_against_the_front(dataset: Dataset, space: SearchSpace) -> None:
    """Of two that train alike, one is stopped for its score and the other is not."""
    estimator, network = made(dataset, space, untrained=10), candidate(space)
    estimator.prepare(Console(quiet=True))
    assert estimator.untrained is not None
    middle = estimator.untrained.drawn(0.25, 0.05, None)[0]
    earlier = [Earlier((1.0,), middle, 0.001, (0.95 + 0.001 * one, 0.95 + 0.001 * one)) for one in range(20)]
    for score, stopped in ((-1e6, True), (1e6, False)):
        estimator.untrained.score = lambda architecture, seed, score=score: score  # type: ignore[method-assign,misc]
        assert estimator.evaluate_among(network, (2.0,), earlier, 0).stopped is stopped


def test_too_few_anchors_are_one_line_with_the_reason(dataset: Dataset, space: SearchSpace) -> None:
    def broken(architecture: Architecture) -> Any:
        raise TrainingError("out of memory.")

    with pytest.raises(DataError, match=r"0 of 5 anchors could be .*out of memory.*untrained=0") as caught:
        replace(made(dataset, space), build=broken).prepare(Console(quiet=True))
    assert "\n" not in str(caught.value)


def test_images_that_look_alike_give_no_score_and_say_so(space: SearchSpace) -> None:
    part = stripes(80, 0)
    part.images[:] = part.images[0]
    alike = Dataset("alike", part, part, part, ("a", "b", "c", "d"), 1, 16, (0.3,), (0.2,), "alike")
    with pytest.raises(DataError, match=r"0 of 5 anchors could be scored .*naswot is nan.*untrained=0"):
        made(alike, space).prepare(Console(quiet=True))


def test_a_space_of_fewer_networks_than_anchors_trains_them_all_or_says_what_to_set(dataset: Dataset, tmp_path: Path
                                                                                  ) -> None:
    def of(repeats: int) -> SearchSpace:
        file = tmp_path / f"few{repeats}.yaml"
        file.write_text("image_size: 16\nstem: {width: 8, stride: 1}\nhead: 0\nactivation: relu\nstages:\n  - "
                        f"{{channels: 8, repeats: {[*range(1, repeats + 1)]}, stride: 1, op: [ds], kernel: 3, se: 0, "
                        "skip: true}\n")
        return SearchSpace.load(str(file), channels=1, classes=4)

    few = made(dataset, of(4))
    few.prepare(Console(quiet=True))
    assert few.untrained is not None
    assert few.untrained.n_anchors == 4
    with pytest.raises(ConfigError, match=r"has 2 networks.* Set multi_fidelity\.untrained=0"):
        made(dataset, of(2)).prepare(Console(quiet=True))


def test_what_only_stops_trainings_needs_no_other_anchors(dataset: Dataset, space: SearchSpace) -> None:
    one, other, longer = (made(dataset, space, **more).untrained
                          for more in ({}, {"quantile": 0.8, "rungs": [2]}, {"rungs": [1, 3]}))
    assert one is not None
    assert other is not None
    assert longer is not None
    assert one.path == other.path != longer.path
