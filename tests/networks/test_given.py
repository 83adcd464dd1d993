"""Networks given as torch modules: named, built, cut and exported as timm's own, or refused in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import hwnas
from hwnas.errors import ConfigError
from hwnas.networks.around import describe_cuts, find_cuts, space_of_cuts
from hwnas.networks.baselines import check_timm, original
from hwnas.networks.cutting import build_cut, make_cut
from hwnas.networks.export import export_onnx
from hwnas.networks.given import register_module
from hwnas.networks.tracing import trace
from hwnas.networks.weights import IMAGENET, PretrainedOptions, find_pretrained, import_timm

PX = 32


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, maps: Tensor) -> Tensor:
        return maps + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(maps)))))


class Wider(nn.Module):
    """As Block, on half of the side and with twice the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, 2 * channels, 1, bias=False), nn.BatchNorm2d(2 * channels)

    def forward(self, maps: Tensor) -> Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(maps))))))


class Outside(nn.Module):
    """Blocks to whose outputs the network adds what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.answer = nn.Conv2d(1, 16, 3, 2, 1), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1))
                                    for _ in range(4))
        self.others = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, images: Tensor) -> Any:
        maps = torch.relu(self.stem(images))
        for block in self.others:
            maps = maps + block(maps)
        for block in self.blocks:
            added = block(maps)
            added += maps
            maps = added
        return self.answer(maps.mean((2, 3)))


class Flat(nn.Module):
    """Blocks of three sizes in one row, as torchvision writes its MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(1, 16, 3, 2, 1)]
        for channels in (16, 32):
            parts += [Block(channels), Block(channels), Block(channels), Wider(channels)]
        self.features, self.answer = nn.Sequential(*parts), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Any:
        return self.answer(self.features(images).mean((2, 3)))


class Own(nn.Module):
    """A network as a team writes one; a part of it differs by `change`."""

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, 2, 1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(3)))
        self.answer = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Any:
        return self.answer(self.blocks(torch.relu(self.stem(images))).mean((2, 3)))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HWNAS_WEIGHTS", raising=False)
    return tmp_path / "home"


def test_a_module_is_cut_with_its_weights_and_keeps_its_head(tmp_path: Path) -> None:
    module = Own()
    name = register_module(module, mean=[0.4], std=[0.2])
    assert register_module(module, mean=[0.4], std=[0.2]) == name
    assert register_module(module, mean=[0.5], std=[0.2]) != name
    pretrained, _ = find_pretrained(name, PretrainedOptions(), 1)
    assert (pretrained.mean, pretrained.std) == ((0.4,), (0.2,))
    space = space_of_cuts([describe_cuts(name, 1, 10, PX)], 1, 10)
    images = torch.randn(2, 1, PX, PX, generator=torch.Generator().manual_seed(1))
    whole = build_cut(space.known["whole"], pretrained).eval()
    assert torch.equal(whole(images), module.eval()(images))
    cut = build_cut(space.known["cut_short"], pretrained)
    assert torch.equal(cut.get_submodule("answer").weight, module.answer.weight)
    export_onnx(cut, tmp_path / "cut.onnx", (1, PX, PX))
    said = onnxruntime.InferenceSession(str(tmp_path / "cut.onnx")).run(None, {"images": images.numpy()})[0]
    assert torch.allclose(cut.eval()(images), torch.from_numpy(said), atol=1e-4)


def test_other_classes_get_a_new_head_other_channels_are_refused_and_the_module_stays_as_it_is() -> None:
    module = Own()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    name = register_module(module)
    assert original(name, 1, 4)(torch.zeros(1, 1, PX, PX)).shape == (1, 4)
    with pytest.raises(ConfigError, match="reads images of 1 channels, and these have 3"):
        original(name, 3, 10)
    assert module.training
    assert type(module) is Own
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_what_runs_makes_the_name() -> None:
    """An edited cell of a notebook has the same layers and seed, and another network."""
    one, other = Own(), changed(with_tanh)
    other.load_state_dict(one.state_dict())
    assert register_module(one) != register_module(other)
    one.act = nn.Module()  # nothing that runs
    one.act.extra_repr = lambda: str(id(one))  # type: ignore[method-assign]
    again = Own()
    again.load_state_dict(one.state_dict())
    assert register_module(one) == register_module(again)


def test_a_frozen_module_is_trained_as_a_whole() -> None:
    network = original(register_module(Own().requires_grad_(False)), 1, 10)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_a_timm_network_for_grey_images_has_timms_numbers_as_one() -> None:
    name = register_module(import_timm().create_model("test_efficientnet", in_chans=1, num_classes=10))
    pretrained, _ = find_pretrained(name, PretrainedOptions(), 1)
    assert pretrained.mean == pytest.approx((np.mean(IMAGENET[0]),))


def test_mean_and_std_may_be_arrays() -> None:
    module, mean, std = Own(3), [0.4, 0.5, 0.6], [0.2, 0.2, 0.2]
    assert register_module(module, mean=np.array(mean), std=np.array(std)) == register_module(module, mean, std)


@pytest.mark.parametrize("numbers", [{"mean": [0.5]}, {"mean": [], "std": []}, {"mean": 0.5, "std": 0.5},
                                     {"mean": [0.5], "std": [float("nan")]}, {"mean": [0.5] * 3, "std": [0.5] * 3}])
def test_numbers_that_normalise_nothing_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be 1 finite numbers each"):
        register_module(Own(), **numbers)


def test_a_process_that_was_not_given_it_is_told_to_give_it_again_and_several_are_refused(tmp_path: Path) -> None:
    check_timm(register_module(Own()))
    with pytest.raises(ConfigError, match=r"^around: module_0123456789ab .*hwnas\.register_module\(module\)"):
        check_timm("module_0123456789ab", "around")
    with pytest.raises(ConfigError, match=r"workers=2: module_\w+ is in this process alone"):
        hwnas.search("xeon_int8", "digits", around=Own(), workers=2, out=tmp_path / "run", quiet=True)


def changed(forward: Callable[[Own, Tensor], Any]) -> nn.Module:
    return type("Changed", (Own,), {"forward": forward})()


def softmax(self: Own, images: Tensor) -> Any:
    return Own.forward(self, images).softmax(1)


def in_a_tuple(self: Own, images: Tensor) -> Any:
    return (Own.forward(self, images),)


def by_the_images(self: Own, images: Tensor) -> Any:
    maps = torch.relu(self.stem(images))
    return self.answer((self.blocks(maps) if images.mean() < 1 else maps).mean((2, 3)))


def with_tanh(self: Own, images: Tensor) -> Any:
    return self.answer(self.blocks(torch.tanh(self.stem(images))).mean((2, 3)))


def two_in_training(self: Own, images: Tensor) -> Any:
    logits = Own.forward(self, images)
    return (logits, logits) if self.training else logits


def twice(self: Own, images: Tensor) -> Any:
    return self.answer(self.blocks(self.blocks(torch.relu(self.stem(images)))).mean((2, 3)))


def of_one_size(self: Own, images: Tensor) -> Any:
    return self.answer(self.blocks(torch.relu(self.stem(images))).flatten(1))


def compiled() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        return cast(nn.Module, torch.jit.trace(Own().eval(), (torch.zeros(1, 1, PX, PX),)))


def large_head() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.AdaptiveAvgPool2d(4), nn.Conv2d(16, 10, 4), nn.Flatten())


def shared() -> nn.Module:
    model = Own()
    model.blocks[1].conv1 = model.blocks[0].conv1
    return model


@pytest.mark.parametrize(("make", "why"), [
    (lambda: changed(softmax), "not what a softmax"), (lambda: changed(in_a_tuple), "got a tuple"),
    (lambda: changed(by_the_images), "images decide what it runs"),
    (lambda: changed(two_in_training), "in training, got a tuple"), (lambda: changed(twice), "more than once"),
    (large_head, "a kernel of one pixel"), (lambda: changed(of_one_size), "cannot be run on images"),
    (shared, "are one parameter"), (compiled, "it is compiled"), (lambda: nn.Linear(3, 2), "has no convolution"),
    (dict, "it is a dict")])
def test_what_cannot_be_cut_or_exported_is_refused_in_one_line(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        register_module(make())
    assert "\n" not in str(raised.value)


def test_a_block_whose_output_its_parent_adds_to_its_input_does_not_go() -> None:
    traced = trace(register_module(Outside().eval()), 1, 10)
    assert not traced.runs


class Norms(Flat):
    """A head that norms vectors, as fastai's does."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Sequential(nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10))  # type: ignore[assignment]


def test_a_head_that_norms_vectors_is_cut_with_the_widths(tmp_path: Path) -> None:
    name = register_module(Norms().eval())
    _, cuts = find_cuts(name, 1, 10)
    assert {"cut_early", "cut_short_narrow"} <= cuts.keys()
    space = space_of_cuts([describe_cuts(name, 1, 10, PX)], 1, 10)
    export_onnx(build_cut(space.known["cut_early"]), tmp_path / "model.onnx", (1, PX, PX))


class Gated(Flat):
    """Two branches whose maps are multiplied at the end, so that no stage of one may go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Conv2d(1, 32, 3, 4, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1))

    def forward(self, images: Tensor) -> Any:
        return self.answer((self.features(images) * self.gate(images)).mean((2, 3)))


def test_widths_are_cut_where_no_stage_may_go() -> None:
    _, cuts = find_cuts(register_module(Gated().eval()), 1, 10)
    assert any(name.startswith("width.") for kept in cuts.values() for name in kept)


def test_blocks_of_one_row_are_runs_between_those_that_stay() -> None:
    name = register_module(Flat().eval())
    traced, cuts = find_cuts(name, 1, 10)
    assert [run.blocks for run in traced.runs] == [("features.2", "features.3"),
                                                   ("features.5", "features.6", "features.7")]
    assert any(choice.startswith("width.") for choice in traced.choices)
    whole = make_cut(traced, {}, 32).macs
    assert all(make_cut(traced, kept, 32).macs < whole for kept in cuts.values())
