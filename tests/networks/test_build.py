"""build: timm's own networks word for word, and every count against the built modules."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from hwnas.networks.baselines import count_macs, count_params
from hwnas.networks.network import build
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace


def _at_224(*stages: str, activation: str = "relu") -> Architecture:
    return Architecture(tuple((stage,) for stage in stages), 32, 2, 1280, activation, 224, 3, 1000)


TIMM = {
    "mnasnet_100": _at_224(
        "ds_r1_k3_s1_c16_noskip", "ir_r3_k3_s2_e3_c24", "ir_r3_k5_s2_e3_c40", "ir_r3_k5_s2_e6_c80",
        "ir_r2_k3_s1_e6_c96", "ir_r4_k5_s2_e6_c192", "ir_r1_k3_s1_e6_c320_noskip"),
    "semnasnet_100": _at_224(
        "ds_r1_k3_s1_c16_noskip", "ir_r2_k3_s2_e6_c24", "ir_r3_k5_s2_e3_c40_se0.25", "ir_r4_k3_s2_e6_c80",
        "ir_r2_k3_s1_e6_c112_se0.25", "ir_r3_k5_s2_e6_c160_se0.25", "ir_r1_k3_s1_e6_c320"),
    "mobilenetv2_100": _at_224(
        "ds_r1_k3_s1_c16", "ir_r2_k3_s2_e6_c24", "ir_r3_k3_s2_e6_c32", "ir_r4_k3_s2_e6_c64", "ir_r3_k3_s1_e6_c96",
        "ir_r3_k3_s2_e6_c160", "ir_r1_k3_s1_e6_c320", activation="relu6"),
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_networks_in_our_words_are_timms(name: str) -> None:
    architecture, theirs = TIMM[name], timm.create_model(name)
    ours = build(architecture)
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()]
    assert architecture.params == count_params(theirs)
    assert architecture.macs == count_macs(theirs, (3, 224, 224))
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize(("name", "image_size", "n"),
                         [("mnasnet_small", 32, 5), ("mnasnet", 64, 3), ("fused", 64, 3), ("nas_bench_macro", 32, 4),
                          ("convnext_small", 16, 3)])
def test_counts_are_those_of_the_built_network(name: str, image_size: int, n: int) -> None:
    space = SearchSpace.load(name, channels=1, classes=7, image_size=image_size)
    for row in space.sample(np.random.default_rng(n), n):
        architecture = space.decode(space.to_params(row))
        network = build(architecture)
        assert network.training
        assert count_params(network) == architecture.params
        assert count_macs(network, (1, image_size, image_size)) == architecture.macs
        for i, stage in enumerate(architecture.staged_blocks()[1:-1]):
            assert [count_params(block) for block in network.blocks[i]] == [block.params for block in stage], i


@pytest.mark.parametrize("stages", [
    (("id_s2_c24",), ("cn_k3_c24_skip",), ("ds_k3_c24_se0.25",), ("er_k5_s2_e3_c32_se0.5",), ("id_c32",),
     ("ir_r2_k3_e4_c32_se0.25_noskip",)),
    (("cn_r2_k5_s2_c24_skip",), ("er_r2_k3_e3_c24", "ds_k3_c40_se0.5")),
])
@pytest.mark.parametrize("head", [0, 48])
def test_every_kind_of_block_counts_right(stages: tuple[tuple[str, ...], ...], head: int) -> None:
    architecture = Architecture(stages, 20, 1, head, "hard_swish", 30, 2, 3)
    network = build(architecture)
    assert count_params(network) == architecture.params
    assert count_macs(network, (2, 30, 30)) == architecture.macs
    seen: list[int] = []
    for stage in network.blocks:
        if len(stage):
            stage.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[-1]))
    assert network(torch.zeros(2, 2, 30, 30)).shape == (2, 3)
    assert seen == [b.out_size for stage in architecture.staged_blocks()[1:-1] for b in stage[-1:]]


@pytest.mark.soak
def test_nas_bench_macro_has_the_published_parameters_and_macs(data_root: Path) -> None:
    table = data_root.parent / "benchmarks" / "nas_bench_macro.csv"
    if not table.is_file():
        pytest.skip(f"{table} is absent")
    space = SearchSpace.load("nas_bench_macro", channels=3, classes=10)
    operations = space.parameters[0].choices
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == space.size == 6561
    for row in rows[::3]:
        network = space.decode({f"stage{i}.op": operations[int(digit)] for i, digit in enumerate(row["arch"])})
        assert (network.params, network.macs) == (int(row["params"]), int(row["flops"])), row["arch"]
