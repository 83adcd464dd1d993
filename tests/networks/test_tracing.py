"""What can be cut out of any network: what is found, what a cut keeps of the answers, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from around_fixtures import answers, choices_of, cut_of, space_around
from torch import nn

from hwnas.errors import CandidateError, ConfigError
from hwnas.networks import cutting, tracing
from hwnas.networks.around import find_cuts, obvious_cuts
from hwnas.networks.baselines import original
from hwnas.networks.cutting import build_cut, cut_further, cut_model
from hwnas.networks.export import export_onnx
from hwnas.networks.network import FoundNetwork, Shape, read_architecture
from hwnas.networks.tracing import trace

PX = 64


def layers_of(model: nn.Module) -> list[tuple[int, ...]]:
    """Weights' shapes of all convolutions and matrix products that are left."""
    return sorted(tuple(module.weight.shape[:2]) for module in model.modules() if isinstance(
        module, nn.Conv2d | nn.Linear))


@pytest.mark.parametrize("name", ["resnet18", "regnety_002", *(
    pytest.param(name, marks=pytest.mark.soak) for name in (
        "mobilenetv4_conv_small", "repvgg_a0",
        "resnet50", "mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100", "mobilenetv4_conv_medium",
        "efficientnet_b0", "tf_efficientnet_lite0", "hgnet_tiny", "efficientnetv2_rw_t", "convnext_atto",
        "convnext_tiny", "convnextv2_atto", "mobileone_s0", "lcnet_050", "fbnetv3_b", "semnasnet_100", "starnet_s1",
        "hgnetv2_b0", "cs3darknet_focus_s", "dpn68", "focalnet_tiny_srf"))])
def test_the_least_of_a_network_is_what_it_says(name: str) -> None:
    space = space_around(name)
    least = cut_of(space, image_size=space.image_sizes[-1],
                      **{name: min(of) for name, of in choices_of(space).items()})
    model = build_cut(least)
    with torch.inference_mode():
        assert model.eval()(torch.zeros(1, 3, least.image_size, least.image_size)).shape == (1, 10)
    assert len(least.operators) == len(layers_of(model))
    told = sorted((n_out, 1 if role == "depthwise" else n_in) for _, role, n_in, n_out, *_ in least.operators)
    assert told == layers_of(model)
    assert least.params < space.known["whole"].params


def silence(model: Any, layers: dict[str, str], kept: int) -> None:
    """Zero what these layers, each with its norm, write beyond the first `kept` channels."""
    with torch.no_grad():
        for layer, norm in layers.items():
            model.get_submodule(layer).weight[kept:] = 0
            for values in (model.get_submodule(norm).weight, model.get_submodule(norm).bias):
                values[kept:] = 0


@pytest.mark.parametrize(("tie", "layers", "kept"), [
    ("inner4", {f"layer1.{index}.conv1": f"layer1.{index}.bn1" for index in (0, 1)}, 32),
    ("stream4", {"layer2.0.downsample.0": "layer2.0.downsample.1", **{
        f"layer2.{index}.conv2": f"layer2.{index}.bn2" for index in (0, 1)}}, 64)])
def test_channels_that_say_nothing_are_cut_without_a_loss(tie: str, layers: dict[str, str], kept: int) -> None:
    space = space_around("resnet18")
    torch.manual_seed(0)
    model = original("resnet18", 3, 10)
    if tie == "stream4":  # the stride of the image's maps there
        traced = trace("resnet18", 3, 10)
        tie = next(group.tie for group in traced.groups if "layer2.0.conv2" in traced.writers[group.name])
    silence(model, layers, kept)
    before = answers(model)
    network = cut_of(space, **{f"width__{tie}": 0.5})
    after = answers(cut_model(model, network))
    assert torch.allclose(before, after, atol=1e-4)


def test_a_block_that_changes_nothing_is_cut_without_a_loss() -> None:
    model: Any = original("resnet18", 3, 10)
    with torch.no_grad():
        for block in (model.layer1[1], model.layer3[1]):
            block.bn2.weight.zero_()
            block.bn2.bias.zero_()
    before = answers(model)
    network = cut_of(space_around("resnet18"), layer1=0, layer3=0)
    assert torch.allclose(before, answers(cut_model(model, network)), atol=1e-4)
    assert len(network.operators) == 17


@pytest.mark.parametrize("name", ["mobilenetv1_025", "resnet18"])  # without and with paths around blocks
def test_every_known_cut_can_be_cut_out_of_the_whole_network(name: str) -> None:
    known = space_around(name).known
    whole = known["whole"]
    torch.manual_seed(0)
    weights = build_cut(whole).state_dict()
    for part in known.values():
        model = cut_further(weights, whole, part)
        assert answers(model).isfinite().all()
        told = sorted((n_out, 1 if role == "depthwise" else n_in) for _, role, n_in, n_out, *_ in part.operators)
        assert told == layers_of(model)


def test_the_obvious_cuts_of_a_network() -> None:
    cuts = obvious_cuts("resnet18", Shape(3, PX, 10), ())
    assert [*cuts] == ["cut_short", "cut_early", "cut_early_two", "cut_thin", "cut_short_narrow"]
    assert dict(cuts["cut_early"].chosen) | {"depth": 3, "layer1": 0, "layer3": 0} == dict(cuts["cut_early"].chosen)
    network = FoundNetwork(cuts["cut_early"], None, "cut_early")
    assert (network.id, network.name, network.is_baseline) == ("resnet18-cut_early-64px", "resnet18-cut_early", True)
    assert read_architecture(network.describe(), "it") == network
    with pytest.raises(ConfigError, match="attend to each other"):
        obvious_cuts("mobilevitv2_050", Shape(3, PX, 10), ())


def test_a_cut_of_a_cut_begins_with_its_weights() -> None:
    space = space_around("resnet18")
    torch.manual_seed(0)
    first = cut_of(space, width__inner8=0.5, layer4=0)
    parent = build_cut(first)
    assert torch.allclose(answers(parent), answers(cut_further(parent.state_dict(), first, first)))
    part = cut_of(space, width__inner8=0.25, layer4=0, layer2=0)
    child = cut_further(parent.state_dict(), first, part)
    own, held = child.state_dict(), parent.state_dict()
    assert torch.equal(own["layer1.0.conv1.weight"], held["layer1.0.conv1.weight"])
    rows = {tuple(row.flatten().tolist()) for row in held["layer2.0.conv1.weight"]}
    assert len(own["layer2.0.conv1.weight"]) == 32
    assert all(tuple(row.flatten().tolist()) in rows for row in own["layer2.0.conv1.weight"])


@pytest.mark.parametrize("name", ["repvgg_a0", pytest.param("mobileone_s0", marks=pytest.mark.soak),
                                  pytest.param("repvit_m1", marks=pytest.mark.soak)])
def test_branches_of_a_cut_are_fused_when_it_is_exported(name: str, tmp_path: Path) -> None:
    known = space_around(name).known
    model = build_cut(known.get("cut_short_narrow", known["cut_short"]))  # RepViT's channels cannot be cut
    export_onnx(model, tmp_path / "cut.onnx", (3, PX, PX))
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "cut.onnx")).graph.node]
    assert model.training
    assert kinds.count("Conv") < len([module for module in model.modules() if isinstance(module, nn.Conv2d)])
    images = torch.randn((2, 3, PX, PX), generator=torch.Generator().manual_seed(1))
    said = onnxruntime.InferenceSession(str(tmp_path / "cut.onnx")).run(None, {"images": images.numpy()})[0]
    assert torch.allclose(answers(model), torch.from_numpy(said), atol=1e-3)


@pytest.mark.soak
def test_every_process_sees_the_same_network() -> None:
    """Where modules lie in memory, and so a graph's order, differs from process to process."""
    names = ("resnet18", "hgnetv2_b0")
    lines = f"from hwnas.networks.tracing import trace; print([trace(name, 3, 10) for name in {names}])"
    told = subprocess.run([sys.executable, "-c", lines], env={**os.environ, "PYTHONHASHSEED": "1"}, text=True,
                          capture_output=True, check=True).stdout
    assert told == f"{[trace(name, 3, 10) for name in names]}\n"


def test_channels_that_cannot_be_cut_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = cutting.apply_cut
    cutting._find_operators.cache_clear()

    def fail(model: nn.Module, traced: Any, chosen: Any) -> nn.Module:
        if "width.inner8" in chosen:
            raise RuntimeError("shapes do not fit")
        return cut(model, traced, chosen)

    monkeypatch.setattr(cutting, "apply_cut", fail)
    traced, cuts = find_cuts.__wrapped__("resnet18", 3, 10)
    assert [*traced.choices] == ["depth", "layer1", "layer2", "layer3", "layer4"]
    assert [*cuts] == ["cut_short", "cut_early", "cut_early_two", "cut_short_narrow"]

    def fail_always(model: nn.Module, traced: Any, chosen: Any) -> nn.Module:
        if chosen.items() <= traced.choose({}).items():  # the whole network
            return model
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(cutting, "apply_cut", fail_always)
    cutting._find_operators.cache_clear()
    with pytest.raises(ConfigError, match="no alike blocks in a row"):
        find_cuts.__wrapped__("resnet18", 3, 10)


@pytest.mark.parametrize(("name", "words"), [
    ("mobilevit_xxs", "reads tokens"),
    ("ghostnetv2_100", "not square"), ("mobilevitv2_050", "attend to each other")])
def test_networks_that_cannot_be_told_are_refused_in_one_line(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        trace(name, 3, 10)
    assert "\n" not in str(caught.value)


def test_a_network_that_is_not_what_it_says_is_not_built() -> None:
    network = cut_of(space_around("resnet18"), layer1=0)
    with pytest.raises(CandidateError, match="runs otherwise"):
        build_cut(replace(network, chosen=tuple((name, kept + (name == "layer1")) for name, kept in network.chosen)))
    with pytest.raises(CandidateError, match="runs otherwise"):
        build_cut(replace(network, chosen=(*network.chosen[:-1], ("width.other", 0.5))))


@pytest.mark.parametrize("fault", ["error", "without end"])
def test_where_channels_cannot_be_followed_blocks_may_go_all_the_same(monkeypatch, fault: str) -> None:
    def fail(*_: object) -> None:
        raise TypeError("unsupported operand")  # as Torch-Pruning says of CSPDarkNets and dual-path networks

    if fault == "error":
        monkeypatch.setattr(tracing, "build_graph", fail)
    else:
        monkeypatch.setattr(tracing, "MOST_DEPENDENCIES", 2)  # as in FocalNets, which never end
    traced = trace.__wrapped__("test_resnet", 3, 10)
    assert traced.groups == ()
    assert traced.choices["depth"] == (4, 3, 2)
