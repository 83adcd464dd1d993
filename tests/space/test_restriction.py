"""A space without some variants of blocks: none of them is left, and nothing else is lost that could stay."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest
import yaml

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture
from hwnas.space.restriction import Variant
from hwnas.space.search_space import SearchSpace

SPACES = {
    "single": """\
image_size: 32
stem: {width: 16, stride: 1}
head: 64
activation: swish
stages:
  - {op: [ds, conv, ir_e2], channels: [16, 24], se: [0, 0.25], repeats: [1, 2]}
  - {op: [ir_e3, conv_k3, ir_e2_k5], channels: 32, repeats: [1, 2], stride: 2, se: [0.25, 0, 0.5]}
  - {op: [ir_e3, conv_k3, ds_k5], channels: 40, stride: 2, se: 0.25}
""",
    "mixed": """\
image_size: 32
stem: {width: 16, stride: 1}
head: 64
activation: [relu, hard_swish, gelu]
stages:
  - {op: [ds, conv], channels: 16, se: [0, 0.25]}
  - {op: [ir_e3, cx_e2, ds], channels: [24, 40], repeats: [1, 2], stride: 2, se: [0, 0.25]}
known:
  plain: {op: [ds, ir_e3], channels: [16, 24], repeats: 1, se: 0, activation: hard_swish, skip: true}
""",
    "bare": """\
image_size: 32
stem: {width: 16, stride: 1}
head: 64
stages:
  - {op: [ds, ir_e3_k5_se0, er_e3_k3], channels: 16, se: [0, 0.25], repeats: [1, 2, 3]}
  - {op: [conv_k3, ir_e3], channels: 24, stride: 2, se: 0.25, repeats: [1, 2]}
""",
}


@cache
def space_of(name: str) -> SearchSpace:
    return SearchSpace.of_content(yaml.safe_load(SPACES[name]), name, channels=3, classes=10)


def networks_of(space: SearchSpace) -> dict[str, Architecture]:
    codes = np.array([*itertools.product(*(range(len(each.choices)) for each in space.parameters))], dtype=np.int64)
    made = (space.decode(space.to_params(row)) for row in np.unique(space.canonical_codes(codes), axis=0))
    return {network.id: network for network in made}


def variants(network: Architecture) -> set[Variant]:
    return {Variant.of(block) for stage in network.staged_blocks()[1:-1] for block in stage}


@cache
def all_of(name: str) -> dict[str, Architecture]:
    return networks_of(space_of(name))


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(12, 40))])
@pytest.mark.parametrize("name", SPACES)
def test_what_is_left_out_never_comes_and_all_else_stays(seed: int, name: str) -> None:
    space, networks = space_of(name), all_of(name)
    every = sorted({variant for network in networks.values() for variant in variants(network)})
    left = {*random.Random(seed).sample(every, seed % len(every))}
    left |= {each for each in every if Variant(each.kind, "", each.activation) in left}  # no gate mends a block
    able = {key for key, network in networks.items() if not variants(network) & left}
    try:
        part = space.without(left)
    except SpaceError:
        assert len(able) < 2 or name != "single"  # others may have parts that are no product of choices
        return
    ours = networks_of(part)
    assert {*ours} <= able
    assert name != "single" or {*ours} == able
    assert len(ours) == part.n_architectures
    assert part.unrestricted is space
    assert (part.name, part.source, part.text) == (space.name, space.source, space.text)
    assert all(part.find(network) is not None for network in part.known.values())
    if not left & {variant for network in networks.values() for variant in variants(network)}:
        assert part is space


def test_the_part_is_the_largest_of_its_activations() -> None:
    space = space_of("mixed")
    part = space.without({Variant("ds", gate, "gelu") for gate in ("", "se")})
    assert part.definition.activations == ("relu", "hard_swish")  # and not conv alone with all three
    assert part.without([]) is part
    assert part.fingerprint != space.fingerprint


def test_known_networks_stay_under_the_name_of_what_they_became() -> None:
    space = space_of("mixed")
    part = space.without({variant for network in all_of("mixed").values() for variant in variants(network)
                          if variant.activation == "hard_swish"})
    assert [*part.known] == ["plain_relu"]
    assert part.known["plain_relu"].activation == "relu"
    gone = space.without([Variant("ir", gate, activation) for gate in ("", "se")
                          for activation in space.definition.activations])
    assert not gone.known
    assert gone.reference.id in networks_of(gone)


def test_nothing_left_is_one_line_with_the_stage() -> None:
    space = space_of("bare")
    with pytest.raises(SpaceError, match=r"^space bare: nothing of stages\[0\] would stay$"):
        space.without([Variant(kind, "", "relu") for kind in ("ds", "ir", "er")])
    with pytest.raises(SpaceError, match=r"^space mixed: no activation would stay that every stage can have$"):
        space_of("mixed").without(
            [Variant(kind, gate, activation) for kinds, activations in (
                (("ds", "cn", "conv"), ("relu",)), (("ir", "cx", "ds"), ("hard_swish", "gelu")))
             for kind in kinds for activation in activations for gate in ("", "se")])


@pytest.mark.parametrize("text", ["ir/se/relu", "cx/gelu", "ir/hard_swish"])
def test_variants_read_what_they_print(text: str) -> None:
    assert str(Variant.read(text)) == text


@pytest.mark.parametrize("text", ["", "ir", "ir/sh/relu", "/relu", "ir/se/x/y"])
def test_other_text_is_no_variant(text: str) -> None:
    with pytest.raises(ValueError, match=r"no variant|unpack"):
        Variant.read(text)
