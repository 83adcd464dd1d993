"""Cuts of a pretrained network: the space they make, and what they keep of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from around_fixtures import choices_of, cut_of, space_around
from safetensors.torch import save_file

from hwnas.errors import ConfigError, DataError
from hwnas.networks.around import _fitting, around_of, describe_cuts, find_start
from hwnas.networks.baselines import count_macs, count_params, original
from hwnas.networks.cutting import build_cut, cut_further
from hwnas.networks.export import randomise
from hwnas.networks.network import FoundNetwork
from hwnas.networks.tracing import trace
from hwnas.networks.weights import Pretrained, PretrainedOptions, find_pretrained
from hwnas.space.architecture import Architecture
from hwnas.training.loop import seeded

PX = 64
NAMES = ("test_efficientnet", "mobilenetv2_035+same", "tf_mobilenetv3_small_075")
LONGER = ("mnasnet_small", "tinynet_e", "mobilenetv1_025+same", "fbnetc_100", "lcnet_050")


def soaked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.soak) for name in names]


def trained(around: str) -> Any:
    """The network with statistics unlike fresh ones."""
    with seeded(0, 1):
        return randomise(original(around), 0)


def saved(model: Any, around: str, folder: Path, channels: int = 3) -> Pretrained:
    save_file(model.state_dict(), folder / f"{around.partition('+')[0]}.safetensors")
    return find_pretrained(around.partition("+")[0], PretrainedOptions(folder=folder), channels)[0]


@pytest.mark.parametrize(("around", "px"), [
    *((name, 64) for name in (*NAMES[:2], "mobilenetv1_100")), *((name, 32) for name in NAMES[::2]),
    *(pytest.param(name, px, marks=pytest.mark.soak) for name, px in (
        (NAMES[1], 32), (NAMES[2], 64), *((name, px) for name in LONGER for px in (32, 64))))])
def test_every_cut_is_what_it_says(around: str, px: int) -> None:
    space = space_around(around, px)
    assert max(space.image_sizes) == px
    rng, choices = np.random.default_rng(0), {"image_size": space.image_sizes, **choices_of(space)}
    for _ in range(2):
        cut = cut_of(space, **{name: of[rng.integers(len(of))] for name, of in choices.items()})
        model = build_cut(cut).eval()
        assert model(torch.zeros(1, 3, cut.image_size, cut.image_size)).shape == (1, 10)
        assert count_params(model) == cut.params
        assert count_macs(model, (3, cut.image_size, cut.image_size)) == cut.macs
        assert Architecture.parse(str(cut), 3, 10) == cut


@pytest.mark.parametrize("around", [*NAMES, *soaked(*LONGER)])
def test_the_whole_network_begins_as_it_is(around: str, tmp_path: Path) -> None:
    source = trained(around).eval()
    whole = space_around(around).known["whole"]
    model: Any = build_cut(whole, saved(source, around, tmp_path)).eval()
    images = torch.rand(2, 3, PX, PX)
    with torch.no_grad():
        ours, theirs = (each.forward_head(each.forward_features(images), pre_logits=True) for each in (model, source))
    assert torch.equal(ours, theirs)
    assert model.get_classifier().out_features == 10


@pytest.mark.parametrize("around", ["test_efficientnet", "convnext_atto", *soaked("mobilenetv3_small_050", "resnet18")])
def test_a_network_without_its_last_stages_keeps_the_first_and_a_head_that_begins_anew(around, tmp_path):
    source = trained(around).eval()
    pretrained, space = saved(source, around, tmp_path), space_around(around)
    depths = [int(depth) for depth in choices_of(space)["depth"]]
    cut = cut_of(space, depth=depths[1])
    model = build_cut(cut, pretrained).eval()
    own, stages = model.state_dict(), trace(around, 3, 10).stages
    gone = stages[depths[1]:]
    assert not any(name.startswith(gone) for name in own)
    for name in own:
        if name.startswith(stages):
            assert torch.equal(own[name], source.state_dict()[name])
    assert model(torch.rand(2, 3, PX, PX)).isfinite().all()
    behind = cut_of(space, depth=depths[2])
    kept = cut_further(own, cut, behind).state_dict()
    assert all(torch.equal(kept[name], own[name]) for name in kept if name.startswith(stages))


def test_what_only_stages_have_that_are_left_out_makes_no_other_network() -> None:
    space = space_around("mobilenetv2_035+same")
    least = min(choices_of(space)["depth"])
    few = [cut_of(space, depth=least, **{"blocks.5": kept}) for kept in (0, 2)]
    assert few[0] == few[1]
    assert cut_of(space, **{"blocks.5": 0}) != cut_of(space, **{"blocks.5": 2})


def test_sizes_that_are_asked_for_are_searched_but_for_those_too_small() -> None:
    assert space_around("mobilenetv2_035+same", 96, (64, 80, 128)).image_sizes == (96, 80, 64)
    assert min(space_around("convnext_atto").image_sizes) >= 32
    with pytest.raises(ConfigError, match=r"too small, or .* multiple of 32"):
        describe_cuts("convnext_atto", 3, 10, 16)


def test_sizes_for_which_a_pooling_cannot_be_exported_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pooled = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 4, 1), torch.nn.AdaptiveAvgPool2d(4))
    monkeypatch.setattr("hwnas.networks.around.original", lambda around, channels: pooled)
    assert _fitting("pooled", 3, 0, (64, 32, 24, 16, 8)) == (64, 32, 16)


def test_names_tell_networks_and_sizes_apart_and_paddings_that_timm_does_not_know() -> None:
    names = [space_around(around, px).name for around in NAMES[:2] for px in (64, 96)]
    assert len({*names}) == len(names)
    assert names[0].startswith("around_test_efficientnet_")
    assert around_of("mobilenetv2_035", "same") == "mobilenetv2_035+same"
    assert around_of("tf_efficientnet_lite0", "same") == "tf_efficientnet_lite0"
    assert around_of("mobilenetv2_035", "") == "mobilenetv2_035"


def test_the_first_cut_of_a_process_begins_as_any_later_one(tmp_path: Path) -> None:
    around = "test_efficientnet"
    cut, pretrained = space_around(around).known["cut_early"], saved(trained(around), around, tmp_path)
    trace.cache_clear()
    begun = []
    for _ in range(2):
        with seeded(5, 1):
            begun.append(FoundNetwork(cut, pretrained).start().state_dict())
    assert all(torch.equal(tensor, begun[1][name]) for name, tensor in begun[0].items())


def test_weights_of_another_padding_are_refused(tmp_path: Path) -> None:
    save_file(trained("mnasnet_small").state_dict(), tmp_path / "mnasnet_small.safetensors", {"pad": "same"})
    options = PretrainedOptions(folder=tmp_path)
    assert find_start("mnasnet_small+same", options, 3).file == "mnasnet_small.safetensors"
    with pytest.raises(DataError, match="ask for another padding"):
        find_start("mnasnet_small", options, 3)
