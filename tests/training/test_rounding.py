"""int8's rounding in a training: which layers it touches, by how much, and what gradients see of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from hwnas.training.rounding import Rounding


def images(n: int = 8) -> torch.Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 4 - 1


def convolution() -> nn.Conv2d:
    torch.manual_seed(1)
    return nn.Conv2d(3, 6, 3, bias=False)


@pytest.mark.parametrize(("narrow", "largest"), [(False, 127), (True, 64)])
def test_layers_answer_by_rounded_weights_and_inputs(narrow: bool, largest: int) -> None:
    layer, x = convolution(), images()
    with torch.no_grad(), Rounding(narrow):
        rounded = layer(x)
    scale = layer.weight.detach().abs().flatten(1).amax(1).view(-1, 1, 1, 1) / largest
    step = (x.max() - x.min()) / 255
    weight = (layer.weight.detach() / scale).round() * scale
    zero = (-x.min() / step).round()
    expected = nn.functional.conv2d(((x / step + zero).round().clamp(0, 255) - zero) * step, weight)
    assert torch.allclose(rounded, expected, atol=1e-5)
    assert not torch.allclose(rounded, layer(x), atol=1e-3)
    assert torch.equal(layer(x), convolution()(x))  # outside nothing is rounded, and weights are as they were


def test_rounding_is_the_same_before_and_behind_the_folding_of_a_norm() -> None:
    layer, norm = convolution(), nn.BatchNorm2d(6).eval()
    nn.init.uniform_(norm.weight, 0.2, 3)
    nn.init.uniform_(norm.running_var, 0.1, 5)
    with torch.no_grad(), Rounding():
        assert torch.allclose(norm(layer(images())), fuse_conv_bn_eval(layer.eval(), norm)(images()), atol=1e-4)


def test_gates_are_not_rounded_but_the_classifier_is() -> None:
    gate, classifier = nn.Conv2d(3, 6, 1), nn.Linear(3, 6)
    pooled = images().mean((2, 3))
    with torch.no_grad():
        with Rounding():
            gated, classified = gate(pooled[:, :, None, None]), classifier(pooled)
        assert torch.equal(gated, gate(pooled[:, :, None, None]))
        assert not torch.equal(classified, classifier(pooled))


def test_gradients_pass_straight_through() -> None:
    def gradient(rounds: bool) -> torch.Tensor:
        layer, x = convolution(), images().requires_grad_()
        with Rounding() if rounds else torch.enable_grad():
            layer(x).sum().backward()
        assert layer.weight.grad is not None
        assert x.grad is not None
        return x.grad

    assert torch.allclose(gradient(True), gradient(False), atol=0.02)
    assert gradient(True).abs().sum() > 0
