# ruff: noqa: E402
from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from training_fixtures import stripes

from hwnas.accuracy import zero_cost as zero_cost_module
from hwnas.accuracy.certificate import SCORES
from hwnas.accuracy.estimator import Prepares, load_estimator
from hwnas.accuracy.zero_cost import (
    SCORE_FUNCTIONS,
    Scorer,
    _log_determinant,
    anchors,
    chosen,
    fit,
    naswot,
)
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.errors import ConfigError, DataError, TrainingError, UnknownName, UserError
from hwnas.networks.build import build
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import ACTIVATIONS
from hwnas.space.search_space import SearchSpace
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
BRIEF = {"anchors": 5, "images": 16, "threads": 1,
         "proxy": {"epochs": 1, "batch_size": 32, "train_images": 64, "validation_images": 40}}


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(256, 0), stripes(80, 1), stripes(80, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes")


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> SearchSpace:
    path = tmp_path_factory.mktemp("space") / "brief.yaml"
    path.write_text(SPACE)
    return SearchSpace.load(path, channels=1, classes=4)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))


def batch(n: int = 16, size: int = 16, channels: int = 1) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, channels, size, size, generator=generator), torch.arange(n) % 4


def network(architecture: Architecture = ARCHITECTURE, seed: int = 0) -> Any:
    with seeded(seed, 1):
        return build(architecture)


def linear_network(*widths: int, between: Any = None) -> Any:
    layers = [torch.nn.Flatten()]
    with seeded(0, 1):
        for n_in, n_out in pairwise(widths):
            layers += [torch.nn.Linear(n_in, n_out, bias=False), *([between()] if between else [])]
    return torch.nn.Sequential(*layers)


# Scores

def test_naswot_is_the_determinant_of_agreeing_units() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU())
    images, labels = batch(8, 4)
    on = (images.flatten(1) > 0).numpy().astype(float)
    kernel = on @ on.T + (1 - on) @ (1 - on).T
    expected = np.linalg.slogdet(kernel)[1]
    assert naswot(model, images, labels) == pytest.approx(expected)
    for activation in (torch.nn.ReLU6, torch.nn.Hardswish, torch.nn.SiLU):
        assert naswot(torch.nn.Sequential(torch.nn.Flatten(), activation()), images, labels) == pytest.approx(expected)
    assert naswot(model, images.flip(0), labels) == pytest.approx(expected)


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
    images, labels = batch(8, 16)
    monkeypatch.setattr("torch.linalg.slogdet", lambda kernel: (torch.tensor(luck), torch.tensor(3.0)))
    model = torch.nn.Sequential(before(), torch.nn.Flatten(), torch.nn.ReLU())
    with pytest.raises(TrainingError, match="naswot is nan for this network"):
        naswot(model, seen(images), labels)


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
def test_every_activation_has_every_score(activation: str) -> None:
    images, labels = batch(9)  # no multiple of the parts
    for score in SCORE_FUNCTIONS.values():
        assert np.isfinite(score(network(replace(ARCHITECTURE, activation=activation)), images, labels))


@pytest.mark.parametrize("name", SCORES)
def test_a_network_is_left_as_it_was_and_scores_the_same_again(name: str) -> None:
    images, labels = batch()
    model = network().eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    first = SCORE_FUNCTIONS[name](model, images, labels)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert SCORE_FUNCTIONS[name](model, images, labels) == first
    assert SCORE_FUNCTIONS[name](network(), images, labels) == first
    assert SCORE_FUNCTIONS[name](network(seed=1), images, labels) != first


def test_what_has_no_score_says_why() -> None:
    images, labels = batch(8, 4)
    with pytest.raises(TrainingError, match=r"naswot: the network has no ReLU"):
        naswot(linear_network(16, 4), images, labels)
    with pytest.raises(TrainingError, match=r"a batch of 3 images tells nothing; it needs 8"):
        naswot(linear_network(16, 4, between=torch.nn.ReLU), images[:3], labels[:3])
    with pytest.raises(TrainingError, match="naswot is nan for this network"):
        naswot(linear_network(16, 4, between=torch.nn.ReLU), images[:1].expand(8, -1, -1, -1), labels)


# From scores to a top-1

@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 20), st.integers(1, 6), st.floats(0.1, 1e6))
def test_the_map_rises_with_every_score_and_gives_fractions(seed: int, n: int, k: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    scores, top1 = rng.normal(size=(n, k)) * scale, rng.random(n)
    found = fit(scores, top1)
    at = scores[0]
    values = found(at + scale * np.linspace(-1, 1, 9)[:, None] * np.eye(k)[rng.integers(k)])
    assert (np.diff(values) > 0).all()
    assert (values > 0).all()
    assert (values < 1).all()
    assert found.std == pytest.approx(np.sqrt(np.mean((found.left_out - top1) ** 2)))


def test_what_ranks_well_is_told_closely_and_what_does_not_as_the_mean() -> None:
    rng = np.random.default_rng(0)
    top1 = rng.uniform(0.5, 0.9, 40)
    assert fit(top1[:, None] * 300, top1).std < 0.02
    noise = fit(rng.normal(size=(40, 1)), top1)
    assert noise.std == pytest.approx(top1.std(), rel=0.15)
    backwards = fit(-top1[:, None], top1)
    assert np.ptp(backwards(-top1[:, None])) < 0.01
    np.testing.assert_allclose(backwards(-top1[:, None]), np.mean(top1), atol=0.02)


def test_ties_and_edges_are_numbers() -> None:
    found = fit(np.ones((5, 1)), np.array([0.0, 1.0, 1.0, 1.0, 0.5]))
    assert np.isfinite(found(np.array([[1.0], [3.0]]))).all()


# Anchors

def test_anchors_are_spread_over_the_macs_and_decided_by_the_seed(space: SearchSpace) -> None:
    networks = chosen(space, 6, 0)
    macs = sorted(one.macs for one in networks)
    codes = np.unique(space.sample(np.random.default_rng(9), 2000), axis=0)
    every = [space.decode(space.to_params(row)).macs for row in codes]
    thirds = np.searchsorted(np.quantile(every, [1 / 3, 2 / 3]), macs)
    assert {*thirds} == {0, 1, 2}
    assert len({one.id for one in networks}) == 6
    n_all = len({space.decode(space.to_params(row)).id for row in codes})
    for n in range(4, n_all + 1, 5):  # where there are few, parts share networks
        assert len({one.id for one in chosen(space, n, 1)}) == n
    assert chosen(space, 6, 0) == networks != chosen(space, 6, 1)
    with pytest.raises(ConfigError, match=r"1000 anchors are wanted, and space brief gave \d+ .*zero_cost.anchors="):
        chosen(space, 1000, 0)


CHILD = """
import os, signal, sys
from pathlib import Path
from hwnas.accuracy.zero_cost import Anchor, anchors, chosen
from hwnas.cli.progress import Console
from hwnas.space import SearchSpace
done = []
def measure(network):
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(network)
    return Anchor(network.id, 0.5, seconds=1.0)
space = SearchSpace.load(sys.argv[1], channels=1, classes=4)
anchors(Path(sys.argv[2]), chosen(space, 6, 0), measure, Console(quiet=True))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_it_goes_on_after_the_last_anchor(space: SearchSpace, tmp_path: Path) -> None:
    path = tmp_path / "anchors.json"
    killed = subprocess.run([sys.executable, "-c", CHILD, str(space.source), str(path)], check=False)
    assert killed.returncode == -9
    asked: list[str] = []

    def measure(one: Architecture) -> zero_cost_module.Anchor:
        asked.append(one.id)
        return zero_cost_module.Anchor(one.id, 0.7, seconds=2.0)

    networks = chosen(space, 6, 0)
    found = anchors(path, networks, measure, Console(quiet=True))
    assert asked == [one.id for one in networks[3:]]
    assert [one.top1 for one in found] == [0.5] * 3 + [0.7] * 3
    assert [one.id for one in found] == [one.id for one in networks]
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2], lambda text: "[]", lambda text: text.replace("hwnas-anchors/1", "other/2"),
    lambda text: text.replace('"top1": 0.5', '"top1": 7'), lambda text: text.replace('"id": "', '"id": "0'),
    lambda text: text.replace('"failed"', '"fallen"'), lambda text: text.replace('"scores": {}', '"scores": []'),
    lambda text: text.replace("0.5", "NaN")])
def test_a_torn_or_foreign_file_is_named(space: SearchSpace, tmp_path: Path, damage: Any) -> None:
    path, networks = tmp_path / "anchors.json", chosen(space, 5, 0)

    def measure(one: Architecture) -> zero_cost_module.Anchor:
        return zero_cost_module.Anchor(one.id, 0.5)

    anchors(path, networks, measure, Console(quiet=True))
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=r"anchors\.json: .*Delete it"):
        anchors(path, networks, measure, Console(quiet=True))


def test_a_full_disk_is_one_line_and_loses_no_anchor(space: SearchSpace, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    path, networks = tmp_path / "anchors.json", chosen(space, 5, 0)
    synced: list[int] = []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 4:  # the file and its folder, twice
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def measure(one: Architecture) -> zero_cost_module.Anchor:
        return zero_cost_module.Anchor(one.id, 0.5)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*anchors\.json: No space left .* Free space"):
            anchors(path, networks, measure, Console(quiet=True))
    assert len(json.loads(path.read_text())["networks"]) == 2
    assert len(anchors(path, networks, measure, Console(quiet=True))) == 5


# The estimator

def told(dataset: Dataset, space: SearchSpace, **options: Any) -> tuple[Any, str]:
    """A prepared estimator and what it said."""
    estimator = load_estimator("zero_cost", dataset=dataset, space=space, config={**BRIEF, **options})
    assert isinstance(estimator, Prepares)
    stream = io.StringIO()
    estimator.prepare(Console(stream=stream))
    return estimator, stream.getvalue()


def test_it_keeps_the_contract_and_trains_its_anchors_once(dataset: Dataset, space: SearchSpace,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    first, said = told(dataset, space)
    check_estimator(first, space.reference)
    assert "Kendall tau" in said
    assert "params" in said
    assert first.setup_seconds > 0
    estimate = first.evaluate(space.reference, (), 3)
    assert (estimate.source, estimate.curve) == ("zero_cost", ())
    assert estimate.std > 0
    monkeypatch.setattr(zero_cost_module.Proxy, "evaluate", None)  # no training from here on
    again, _ = told(dataset, space)
    assert again.setup_seconds == first.setup_seconds
    assert (first.setup_here, again.setup_here) == (True, False)
    assert again.evaluate(space.reference, (), 3).value == estimate.value
    for score in ("params", "macs"):
        other, _ = told(dataset, space, score=score)
        assert 0 < other.evaluate(space.reference, (), 3).value < 1
        assert other.fingerprint != first.fingerprint


def test_a_score_that_is_no_better_than_counting_says_so(dataset: Dataset, space: SearchSpace,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def by_parameters(proxy: Any, one: Architecture, history: Any, seed: int) -> Any:
        return zero_cost_module.Estimate(min(0.9, one.params / 20_000), 0, 1, 0.01, "proxy", 1.0)

    monkeypatch.setattr(zero_cost_module.Proxy, "evaluate", by_parameters)
    monkeypatch.setattr(Scorer, "_score", lambda self, one, name, seed: -float(one.params))
    _, said = told(dataset, space, score="naswot")
    assert "note: zero_cost.score=naswot ranks the anchors no better (tau -1.00) than params (tau 1.00)" in said
    assert "note:" not in told(dataset, space, score="params")[1]
    monkeypatch.setattr(zero_cost_module.Proxy, "evaluate", lambda *_: zero_cost_module.Estimate(0.2, 0, 1, 0, "proxy"))
    assert "nor parameters or MACs order the anchors" in told(dataset, space, score="naswot", seed=1)[1]


def test_anchors_that_diverge_are_named(dataset: Dataset, space: SearchSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(proxy: Any, one: Architecture, history: Any, seed: int) -> Any:
        raise TrainingError("loss is nan in step 3.")

    monkeypatch.setattr(zero_cost_module.Proxy, "evaluate", diverges)
    with pytest.raises(DataError, match=r"0 of 5 anchors could be trained and scored \(loss is nan in step 3\.\)"):
        told(dataset, space)


def test_scores_average_initial_weights_on_a_mixed_batch(dataset: Dataset) -> None:
    part = dataset.train
    order = np.argsort(part.labels, kind="stable")
    scorer = Scorer(replace(dataset, train=part.take(order)), 32, 2)
    both, seconds = scorer.scores(ARCHITECTURE, ("naswot", "macs"), 5)
    single = Scorer(replace(dataset, train=part.take(order)), 32, 1)
    ones = [single.scores(ARCHITECTURE, ("naswot",), seed)[0]["naswot"] for seed in (5, 5 + 1_000_003)]
    assert both["naswot"] == pytest.approx(np.mean(ones))
    assert both["macs"] == pytest.approx(np.log(ARCHITECTURE.macs))
    assert seconds["macs"] == 0 < seconds["naswot"]
    _, labels = scorer._at(16)
    assert all(len(set(labels[start:start + 8].tolist())) > 1 for start in range(0, 32, 8))
    with pytest.raises(ValueError, match="3 channels"):
        scorer.scores(replace(ARCHITECTURE, channels=3), ("macs",))


@pytest.mark.parametrize(("config", "error", "said"), [
    ({"score": "nasbot"}, UnknownName, "unknown zero_cost.score 'nasbot'. Did you mean naswot"),
    ({"anchor": 3}, UnknownName, "key of zero_cost"),
    ({"anchors": 3}, ConfigError, "zero_cost.anchors must be a whole number from 4"),
    ({"images": 4}, ConfigError, "zero_cost.images must be a whole number from 8"),
    ({"images": 300}, ConfigError, "zero_cost.images=300, but stripes has 256 training images"),
    ({"seeds": True}, ConfigError, "zero_cost.seeds must be a whole number"),
    ({"proxy": 3}, ConfigError, "zero_cost.proxy must be a section"),
    ({"proxy": {"epoch": 3}}, UnknownName, "key of proxy")])
def test_wrong_options_are_told_before_anything_is_trained(dataset: Dataset, space: SearchSpace, config: dict[str, Any],
                                                           error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        load_estimator("zero_cost", dataset=dataset, space=space, config=config)


def test_it_needs_a_space_and_preparing(dataset: Dataset, space: SearchSpace) -> None:
    with pytest.raises(ConfigError, match="needs a search space"):
        load_estimator("zero_cost", dataset=dataset)
    with pytest.raises(ValueError, match="call prepare"):
        load_estimator("zero_cost", dataset=dataset, space=space).evaluate(space.reference, (), 0)


def test_names_and_certificates_need_no_torch() -> None:
    code = "import sys, hwnas.accuracy.certificate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
