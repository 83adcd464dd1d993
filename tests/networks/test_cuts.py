"""Cuts of timm's networks: what stays keeps its weights, what cannot be cut is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from hwnas.errors import ConfigError  # noqa: E402
from hwnas.networks.baselines import Baseline, cuts_of  # noqa: E402
from hwnas.networks.cuts import Cut, obvious, stages  # noqa: E402
from hwnas.networks.network import Shape, TimmNetwork  # noqa: E402
from hwnas.networks.weights import PretrainedOptions, find_pretrained  # noqa: E402
from hwnas.training.loop import seeded  # noqa: E402


def whole(name: str = "test_efficientnet") -> Any:
    with seeded(0, 1):
        return Baseline(name).build(3, 10, 64)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 9999))
def test_text_round_trip(blocks: list[int], head: int) -> None:
    cut = Cut(tuple(blocks), head)
    assert Cut.parse(str(cut)) == cut


@pytest.mark.parametrize("text", ["", "0", "10", "11h", "11h0", "h64", "1 1", "11h640 ", "1" * 17, "11h123456"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a digit from 1 to 9"):
        Cut.parse(text)


@pytest.mark.parametrize(("name", "text", "head"), [
    ("mobilenetv2_050", "1111h640", 640), ("mobilenetv3_small_050", "121h200", 200), ("mobilenetv1_050", "121", None)])
def test_kept_blocks_keep_their_weights_and_what_is_left_answers(name: str, text: str, head: int | None) -> None:
    model, before = whole(name), whole(name).state_dict()
    Cut.parse(text).apply(model, name)
    assert stages(model) == tuple(map(int, text.split("h")[0]))
    after = model.state_dict()
    kept = [key for key in after if key.startswith(("conv_stem", "bn1", "blocks"))]
    assert all(torch.equal(after[key], before[key]) for key in kept)
    assert head is None or model.conv_head.out_channels == head
    assert sum(map(torch.numel, after.values())) < sum(map(torch.numel, before.values()))
    answers = model.eval()(torch.rand(2, 3, 64, 64))
    assert answers.shape == (2, 10)
    assert answers.isfinite().all()


def test_a_narrower_head_keeps_the_channels_that_its_norm_scales_most() -> None:
    model = whole()
    width = model.conv_head.out_channels // 2
    with torch.no_grad():
        model.bn2.weight.copy_(torch.arange(2 * width))
    last = model.conv_head.weight[width:].clone()
    Cut((1, 1, 1, 1, 1), width).apply(model, "it")
    assert torch.equal(model.conv_head.weight, last)
    assert torch.equal(model.bn2.weight, torch.arange(width, 2 * width).float())
    assert model.eval()(torch.rand(1, 3, 32, 32)).shape == (1, 10)


def test_a_cut_of_pretrained_weights_keeps_what_it_does_not_cut(tmp_path: Path) -> None:
    given = dict(whole().state_dict())
    save_file(given, tmp_path / "test_efficientnet.safetensors", {"norm": "mean 0.5 std 0.5"})
    weights, _ = find_pretrained("test_efficientnet", PretrainedOptions(folder=tmp_path), 3)
    network = TimmNetwork(Baseline("test_efficientnet", pretrained=weights, cut="11h128"), Shape(3, 32, 7))
    assert network.id == "test_efficientnet-cut11h128-pretrained"
    with seeded(1, 1):
        begun = network.start()
    own = begun.state_dict()
    assert all(torch.equal(own[key], given[key]) for key in own if key.startswith(("conv_stem", "bn1", "blocks")))
    assert begun(torch.rand(2, 3, 32, 32)).shape == (2, 7)


def test_the_obvious_cuts() -> None:
    assert list(map(str, obvious(whole("tf_efficientnet_lite0")))) == ["1111111", "1111h640", "1222h512"]
    assert not obvious(whole("resnet10t"))
    assert [baseline.id for baseline in cuts_of(["resnet10t", "test_efficientnet"])] == [
        "test_efficientnet-cut11h128", "test_efficientnet-cut11h102"]


@pytest.mark.parametrize(("name", "text", "said"), [
    ("resnet10t", "11", "no stages of blocks"), ("test_efficientnet", "12", "stages have 1, 1, 1, 1, 1 blocks"),
    ("test_efficientnet", "111111", "cannot be cut to 111111"),
    ("test_efficientnet", "11h999", "its head 256 channels"),
    ("mobilenetv1_050", "11h64", "its head no channels")])
def test_what_cannot_be_cut_is_said(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Baseline(name, cut=text).build(3, 10, 64)


def test_a_cut_is_part_of_the_networks_name_and_file() -> None:
    cut = Baseline("test_efficientnet", cut="11h128")
    assert Baseline.from_yaml(cut.to_yaml()) == cut
    assert str(cut) == "timm:test_efficientnet cut=11h128"


@pytest.mark.parametrize("name", ["mobilenetv4_conv_small", "fbnetv3_b"])
def test_stages_that_do_not_fit_together_are_one_line(name: str) -> None:
    first = Cut((1,) * len(stages(whole(name))))
    assert first not in obvious(whole(name))
    with pytest.raises(ConfigError, match="the stages left do not fit together") as caught:
        first.apply(whole(name), name)
    assert "\n" not in str(caught.value)
