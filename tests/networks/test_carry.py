"""A network cut from a trained one: which can be, and what it keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from hwnas.networks.around import space_content
from hwnas.networks.build import build
from hwnas.networks.carry import cut_network
from hwnas.networks.export import randomise
from hwnas.networks.parts import fit_head, is_part_of
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.training.loop import seeded

NAMES = ("mobilenetv2_035", "test_efficientnet", "tf_mobilenetv3_small_075")


@cache
def space_of(around: str) -> SearchSpace:
    return SearchSpace.of_content(space_content(around, 3, 10, 64), "cuts", channels=3, classes=10)


def trained(architecture: Architecture) -> nn.Module:
    """The network with weights and statistics as after a training."""
    with seeded(1, 1):
        model = build(architecture)
        randomise(model, 1)
    return model.eval()


@pytest.mark.parametrize("around", NAMES)
def test_a_network_on_smaller_images_begins_as_the_trained_one(around: str) -> None:
    whole = space_of(around).known["whole"]
    source = trained(whole)
    cut = cut_network(source.state_dict(), whole, replace(whole, image_size=48)).eval()
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(cut(images), source(images))


@pytest.mark.parametrize("around", NAMES)
def test_what_is_part_of_another_can_be_cut_from_it_and_keeps_its_classifier_where_features_are_alike(around: str
                                                                                                     ) -> None:
    space, rng = space_of(around), np.random.default_rng(0)
    whole = space.known["whole"]
    source = trained(whole)
    for codes in space.sample(rng, 12):
        part = space.decode(space.to_params(codes))
        assert is_part_of(part, whole)
        assert not is_part_of(whole, part) or part.id == whole.id
        cut = cut_network(source.state_dict(), whole, part)
        assert cut.training
        same_depth = len(part.stages) == len(whole.stages)
        if same_depth and part.head == whole.head > 0:
            torch.testing.assert_close(cut.state_dict()["classifier.bias"], source.state_dict()["classifier.bias"])
        random = build(part).state_dict()
        kept = [name for name, tensor in cut.state_dict().items() if name.startswith("blocks")
                and tensor.shape == random[name].shape]
        assert kept


def test_no_part_has_more_of_anything() -> None:
    whole = space_of("mobilenetv2_035").known["whole"]
    stages = list(whole.stages)
    larger = {
        "a block": replace(whole, stages=(*stages[:1], (stages[1][0].replace("r2", "r3"),), *stages[2:])),
        "channels": replace(whole, stages=(*stages[:-1], (stages[-1][0].replace("c112", "c128"),))),
        "a wider stem": replace(whole, stem_width=whole.stem_width + 8),
        "a wider head": replace(whole, head=whole.head + 8),
        "pixels": replace(whole, image_size=whole.image_size + 8)}
    for what, network in larger.items():
        assert network != whole, what
        assert not is_part_of(network, whole), what
        assert is_part_of(whole, network), what
    assert is_part_of(replace(whole, head=9 * whole.head, stages=whole.stages[:4]), whole), "its head begins anew"
    assert not is_part_of(replace(whole, stem_stride=1), whole)


def test_a_head_behind_the_same_stages_is_made_to_fit() -> None:
    whole = space_of("mobilenetv2_035").known["whole"]
    part = replace(whole, head=2 * whole.head)
    assert fit_head(part, whole).head == whole.head
    assert fit_head(replace(part, stages=part.stages[:4]), whole).head == part.head
