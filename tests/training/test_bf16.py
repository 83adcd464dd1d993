"""Mixed precision: what computes in bf16, on which machine, and that it is no other training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hwnas.training import place
from hwnas.training.mixed_precision import mixed_precision
from hwnas.training.recipe import FULL_TRAINING, PROXY, other_than_full


def test_layers_compute_in_bf16_but_for_grouped_convolutions() -> None:
    dense, grouped, linear = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 4)
    images = torch.rand(2, 8, 6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with mixed_precision("cpu"):
        maps = dense(images)
        apart = grouped(maps)
        answers = linear(apart.mean((2, 3)))
        direct = nn.functional.conv2d(maps, grouped.weight, grouped.bias, padding=1, groups=8)
    assert (maps.dtype, apart.dtype, answers.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert torch.equal(apart, grouped(maps.float()))
    assert torch.equal(apart, direct)
    answers.float().sum().backward()
    for layer in (dense, grouped, linear):
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
    assert dense(images).dtype == torch.float32  # outside nothing is changed


@pytest.mark.parametrize(("flags", "expected"), [
    (("avx512f", "avx512_bf16"), True), (("amx_bf16",), True), (("avx512f", "avx512_vnni"), False)])
def test_a_cpu_with_bf16_trains_in_it(flags: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    host = replace(place.Host.detect(), flags=flags)
    monkeypatch.setattr(place.Host, "detect", lambda: host)
    assert place.resolved_precision("auto", "cpu") == ("bf16" if expected else "fp32")
    assert place.resolved_precision("fp32", "cpu") == "fp32"
    assert place.resolved_precision("auto", "cuda") == "fp32"  # there it is asked for


def test_what_a_machine_chooses_is_no_other_recipe() -> None:
    chosen, fp32, asked = (replace(PROXY, precision=each) for each in ("auto", "fp32", "bf16"))
    assert chosen.fingerprint == fp32.fingerprint != asked.fingerprint
    assert chosen.deciding() == fp32.deciding() != asked.deciding()
    assert other_than_full(replace(FULL_TRAINING, precision="fp32")) == {"precision": "fp32"}


def test_weights_of_grouped_convolutions_may_be_computed() -> None:
    images, scale = torch.rand(2, 4, 5, 5), nn.Linear(1, 1)
    with mixed_precision("cpu"):
        weight = scale(torch.ones(4 * 9, 1)).reshape(4, 1, 3, 3)
        maps = nn.functional.conv2d(images, weight=weight, groups=4)
    assert (weight.dtype, maps.dtype) == (torch.bfloat16, torch.float32)
