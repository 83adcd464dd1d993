# ruff: noqa: E402
from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
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
from hwnas.accuracy.multi_fidelity import MultiFidelity, load
from hwnas.accuracy.untrained import Anchor, Scale, _log_determinant, choose_anchors, naswot, train_anchors
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.errors import ConfigError, DataError, TrainingError, UserError
from hwnas.networks.build import build
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import ACTIVATIONS
from hwnas.space.search_space import SearchSpace
from hwnas.stats import binomial_std
from hwnas.testing import check_estimator
from hwnas.training.loop import seeded

SPACE = """\
image_size: 16
stem: {width: 8, stride: 2}
head: 0
activation: relu
stages:
  - {channels: 8, repeats: [1, 2], stride: 2, op: [ds, ir_e3], kernel: [3, 5]}
  - {channels: [16, 24], repeats: 1, stride: 2, op: [conv, ir_e3], kernel: 3}
"""
ARCHITECTURE = Architecture((("ds_r1_k3_s2_c8",), ("ir_r2_k3_s2_e3_c16_se0.25",)), 8, 1, 0, "relu", 16, 1, 4)
SCALE = Scale.of([0.5, 0.6, 0.7, 0.8], [1.0, 2.0, 3.0, 4.0])
TOP1, SCORE = st.floats(0, 1), st.floats(-1e9, 1e9)


def logit(top1: float) -> float:
    return math.log(top1 / (1 - top1))


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> SearchSpace:
    path = tmp_path_factory.mktemp("space") / "brief.yaml"
    path.write_text(SPACE)
    return SearchSpace.load(path, channels=1, classes=4)


def batch(n: int = 16, size: int = 16) -> torch.Tensor:
    return torch.randn(n, 1, size, size, generator=torch.Generator().manual_seed(1))


def network(architecture: Architecture = ARCHITECTURE, seed: int = 0) -> Any:
    with seeded(seed, 1):
        return build(architecture)


# Scores

def test_naswot_is_the_determinant_of_agreeing_units() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU())
    images = batch(8, 4)
    on = (images.flatten(1) > 0).numpy().astype(float)
    kernel = on @ on.T + (1 - on) @ (1 - on).T
    expected = np.linalg.slogdet(kernel)[1]
    assert naswot(model, images) == pytest.approx(expected)
    for activation in (torch.nn.ReLU6, torch.nn.Hardswish, torch.nn.SiLU):
        assert naswot(torch.nn.Sequential(torch.nn.Flatten(), activation()), images) == pytest.approx(expected)
    assert naswot(model, images.flip(0)) == pytest.approx(expected)


class Noise(torch.nn.Module):
    """What another processor's kernels may do: each image's maps get a rounding error of their own."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return maps + 1e-7 * torch.randn(maps.shape, generator=torch.Generator().manual_seed(0))


def twice(images: torch.Tensor) -> torch.Tensor:
    images = images.clone()
    images[5] = images[2]
    return images


@pytest.mark.parametrize("seen", [lambda images: images[:1].expand(8, -1, -1, -1), twice, torch.zeros_like])
@pytest.mark.parametrize("luck", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("before", [torch.nn.Identity, Noise])
def test_an_image_given_twice_has_no_naswot_whatever_rounding_makes_of_it(
        monkeypatch: pytest.MonkeyPatch, before: type, luck: float,
        seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
    images = batch(8, 16)
    monkeypatch.setattr("torch.linalg.slogdet", lambda kernel: (torch.tensor(luck), torch.tensor(3.0)))
    model = torch.nn.Sequential(before(), torch.nn.Flatten(), torch.nn.ReLU())
    with pytest.raises(TrainingError, match="naswot is nan for this network"):
        naswot(model, seen(images))


@pytest.mark.parametrize("n", [8, 32, 100])
@pytest.mark.parametrize("largest", [7, 333, 4099, 100_003, 16_000_003])
def test_counts_without_full_rank_have_no_determinant(monkeypatch: pytest.MonkeyPatch, n: int, largest: int) -> None:
    """Images that look alike, pairs that do, and fewer different codes than images; `largest` units."""
    monkeypatch.setattr("torch.linalg.slogdet", lambda kernel: (torch.tensor(1.0), torch.tensor(3.0)))
    draws = np.random.default_rng(n)
    same = np.full((n, n), float(largest))
    codes = draws.random((n // 2, 61)) < 0.5
    pairs = np.repeat(codes, 2, axis=0)
    few = draws.random((n, 5)) < 0.5
    for kernel in (same, *((largest // 7) * (on @ on.T + (1 - on) @ (1 - on).T)
                           for on in (pairs.astype(float), few.astype(float)))):
        assert np.isnan(_log_determinant(torch.tensor(kernel, dtype=torch.double)))


@pytest.mark.parametrize("n_units", [64, 1_000_000, 2**24])
def test_images_of_which_one_unit_tells_two_apart_have_a_determinant(n_units: int) -> None:
    """n images that disagree with each other in 2 units of `n_units`, by one of its own for each."""
    n = 32
    kernel = torch.full((n, n), n_units - 2.0, dtype=torch.double) + 2 * torch.eye(n, dtype=torch.double)
    expected = (n - 1) * np.log(2) + np.log(2 + n * (n_units - 2.0))
    assert _log_determinant(kernel) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_has_a_score(activation: str) -> None:
    assert np.isfinite(naswot(network(replace(ARCHITECTURE, activation=activation)), batch(9)))


def test_a_network_is_left_as_it_was_and_scores_the_same_again() -> None:
    images, model = batch(), network().eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    first = naswot(model, images)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert naswot(model, images) == naswot(network(), images) == first != naswot(network(seed=1), images)


def test_what_has_no_score_says_why() -> None:
    images, bare = batch(8, 4), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    active = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU())
    with pytest.raises(TrainingError, match=r"naswot: the network has no ReLU"):
        naswot(bare, images)
    with pytest.raises(TrainingError, match=r"a batch of 3 images tells nothing; it needs 8"):
        naswot(active, images[:3])


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


# Anchors

def test_anchors_are_spread_over_the_macs_and_the_same_again(space: SearchSpace) -> None:
    networks = choose_anchors(space, 6)
    macs = sorted(one.macs for one in networks)
    codes = np.unique(space.sample(np.random.default_rng(9), 2000), axis=0)
    every = [space.decode(space.to_params(row)).macs for row in codes]
    thirds = np.searchsorted(np.quantile(every, [1 / 3, 2 / 3]), macs)
    assert {*thirds} == {0, 1, 2}
    assert len({one.id for one in networks}) == 6
    n_all = len({space.decode(space.to_params(row)).id for row in codes})
    for n in range(4, n_all + 1, 5):  # where there are few, parts share networks
        assert len({one.id for one in choose_anchors(space, n)}) == n
    assert choose_anchors(space, 6) == networks
    with pytest.raises(ConfigError, match=r"1000 anchors are wanted, .* gave \d+ .*multi_fidelity.anchors="):
        choose_anchors(space, 1000)


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2], lambda text: "[]", lambda text: text.replace("hwnas-anchors/2", "other/2"),
    lambda text: text.replace('"top1": 0.5', '"top1": 7'), lambda text: text.replace('"id": "', '"id": "0'),
    lambda text: text.replace('"failed"', '"fallen"'), lambda text: text.replace('"score": 0.0', '"score": []'),
    lambda text: text.replace("0.5", "NaN")])
def test_a_torn_or_foreign_file_is_named(space: SearchSpace, tmp_path: Path, damage: Any) -> None:
    path, networks = tmp_path / "anchors.json", choose_anchors(space, 5)

    def measure(one: Architecture) -> Anchor:
        return Anchor(one.id, 0.5)

    train_anchors(path, networks, measure, Console(quiet=True))
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=r"anchors\.json: .*Delete it"):
        train_anchors(path, networks, measure, Console(quiet=True))


def test_a_full_disk_is_one_line_and_what_was_trained_before_it_is_not_trained_again(
        space: SearchSpace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, networks = tmp_path / "anchors.json", choose_anchors(space, 5)
    synced: list[int] = []
    asked: list[str] = []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 4:  # the file and its folder, twice
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def measure(one: Architecture) -> Anchor:
        asked.append(one.id)
        return Anchor(one.id, 0.5 + len(asked) / 100)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*anchors\.json: No space left .* Free space"):
            train_anchors(path, networks, measure, Console(quiet=True))
    asked.clear()
    found = train_anchors(path, networks, measure, Console(quiet=True))
    assert asked == [one.id for one in networks[2:]]
    assert [one.id for one in found] == [one.id for one in networks]
    assert [one.top1 for one in found] == pytest.approx([0.51, 0.52, 0.51, 0.52, 0.53])
    assert not list(tmp_path.glob(".*.tmp"))


# The estimator


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(256, 0), stripes(80, 1), stripes(80, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))


CONFIG = {"rungs": [1, 2], "train_images": 64, "validation_images": 40, "batch_size": 16, "threads": 1, "anchors": 5,
          "image_size": 8}


def made(dataset: Dataset, space: SearchSpace, **more: Any) -> MultiFidelity:
    return load({**CONFIG, **more}, dataset, space)


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
    alone = made(dataset, space, untrained=0)
    alone.prepare(Console(quiet=True))  # nothing to do
    found, trained = estimator.evaluate(network, (), 0), alone.evaluate(network, (), 0)
    assert (alone.setup_seconds, found.curve, trained.value) == (0, trained.curve, trained.curve[-1])
    assert estimator.untrained is not None
    score = estimator.untrained.score(network, 0)
    assert (found.value, found.std) == estimator.untrained.drawn(trained.value, trained.std, score)
    assert found.low < found.value < found.high
    other = made(dataset, space, untrained=10)  # the same anchors, whatever they count
    other.prepare(Console(quiet=True))
    assert (other.setup_here, other.setup_seconds) == (False, estimator.setup_seconds)
    # A forecast is drawn as well before it is held against the front: of two that train alike, one is stopped.
    assert other.untrained is not None
    middle = other.untrained.drawn(0.25, 0.05, None)[0]
    earlier = [Earlier((1.0,), middle, 0.001, (0.95 + 0.001 * one, 0.95 + 0.001 * one)) for one in range(20)]
    for score, stopped in ((-1e6, True), (1e6, False)):
        other.untrained.score = lambda architecture, seed, score=score: score  # type: ignore[method-assign,misc]
        assert other.evaluate_among(network, (2.0,), earlier, 0).stopped is stopped


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
