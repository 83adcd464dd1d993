"""timm's own words for networks: what it loads from the folder answers as the network does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hwnas.errors import ConfigError
from hwnas.networks.around import obvious_cuts
from hwnas.networks.baselines import Baseline, original
from hwnas.networks.export import randomise
from hwnas.networks.network import FoundNetwork, Network, Shape, TimmNetwork
from hwnas.networks.timm_words import Unsaid, _as_blocks, write_timm
from hwnas.networks.weights import import_timm
from hwnas.space.architecture import Architecture

CLASSES = ("left", "right", "up")


def found(*blocks: str, stem: int = 2, head: int = 16, activation: str = "relu") -> FoundNetwork:
    return FoundNetwork(Architecture(tuple((block,) for block in blocks), 12, stem, head, activation, 32, 3, 3))


def cut(name: str, known: str) -> FoundNetwork:
    return FoundNetwork(obvious_cuts(name, Shape(3, 64, 3), ())[known])


def timm_network(name: str, channels: int = 3, **options: object) -> TimmNetwork:
    return TimmNetwork(Baseline(name, **options), Shape(channels, 32, 3))


def write(network: Network, folder: Path) -> tuple[str, float, float]:
    """What timm calls the network, how far a logit of what it loads lies from ours, and how large ours are."""
    import torch

    model, shape = randomise(network.build(), 0).eval(), network.shape
    facts = {"input_size": list(shape.image), "mean": [0.5] * shape.channels, "std": [0.2] * shape.channels,
             "num_classes": 3, "label_names": list(CLASSES)}
    write_timm(folder, model, network, facts)
    theirs = import_timm().create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn((3, *shape.image), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours = model(images)
        return json.loads((folder / "config.json").read_text())["architecture"], float(
            (ours - theirs(images)).abs().max()), float(ours.abs().max())


@pytest.mark.parametrize("network", [
    timm_network("test_resnet"), timm_network("test_efficientnet", 1, pad_type="same"),
    timm_network("test_vit")], ids=str)
def test_a_whole_network_has_timms_name(network: TimmNetwork, tmp_path: Path) -> None:
    name, apart, largest = write(network, tmp_path)
    assert name == network.name
    assert apart <= 1e-5 * max(1.0, largest)


@pytest.mark.parametrize("network", [
    timm_network("mobilenetv1_025"),
    found("ds_r1_k3_s1_c20", "ir_r1_k5_s2_e4_c24_se0.25", "er_r1_k3_s2_e4_c40", "cn_r1_k3_s1_c40"),
    found("ir_r2_k3_s2_e4_c12", head=0, activation="swish")], ids=str)
def test_architectures_are_told_by_their_blocks(network: Network, tmp_path: Path) -> None:
    """Other epsilons, heads or none, squeeze-and-excite, odd widths."""
    name, apart, largest = write(network, tmp_path)
    assert name == "mobilenetv5_base"
    assert apart <= 1e-4 * max(1.0, largest)


@pytest.mark.parametrize(("name", "known"), [
    ("test_efficientnet+same", "cut_early"), ("tf_mobilenetv3_small_minimal_100", "cut_short_narrow"),
    pytest.param("efficientnet_b0", "cut_early", marks=pytest.mark.soak)])
def test_cuts_are_told_by_their_blocks(name: str, known: str, tmp_path: Path) -> None:
    """TensorFlow's padding, heads before and behind the pooling, blocks that are left out."""
    told, apart, largest = write(cut(name, known), tmp_path)
    assert told == "mobilenetv5_base"
    assert apart <= 1e-4 * max(1.0, largest)


def test_a_gate_that_timm_has_no_word_for_is_said() -> None:
    with pytest.raises(Unsaid, match="another gate"):
        _as_blocks(original("mobilenetv3_small_050"), timm_network("mobilenetv3_small_050"))


@pytest.mark.parametrize(("network", "said"), [
    (found("ds_r1_k3_s1_c16", stem=1), "its stem has stride 1"),
    (timm_network("resnet10t", stem_stride=1), "ResNet is not made of")], ids=str)
def test_what_timm_has_no_word_for_is_said(network: Network, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        write(network, tmp_path)
    assert "format=uint8" in str(caught.value)
