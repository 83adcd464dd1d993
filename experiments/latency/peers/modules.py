"""Parts as torch modules, of the same layers as in whole networks."""

from __future__ import annotations

from hwnas.space.blocks.block import BlockSpec

# isort: split
# hwnas comes before timm, which imports torchvision.
from timm.layers import SqueezeExcite, create_classifier, create_conv2d, get_act_layer, get_norm_act_layer
from torch import Tensor, nn

from experiments.latency.peers.parts import Kernel


class _Head(nn.Module):
    def __init__(self, block: BlockSpec) -> None:
        super().__init__()
        self.conv_head = _conv(block.in_channels, block.out_channels, 1, 1, block.activation) if block.kernel else None
        self.global_pool, self.classifier = create_classifier(block.out_channels, block.classes, pool_type="avg")

    def forward(self, x: Tensor) -> Tensor:
        if self.conv_head is not None:
            x = self.conv_head(x)
        logits: Tensor = self.classifier(self.global_pool(x))
        return logits


class _Addition(nn.Module):
    """A 1x1 convolution and its input added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _conv(channels, channels, 1, 1, "")

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.conv(x) + x
        return total


def block_module(block: BlockSpec) -> nn.Module:
    """A block as whole networks have it."""
    if block.kind == "stem":
        return _conv(block.in_channels, block.out_channels, block.kernel, block.stride, block.activation)
    if block.kind == "head":
        return _Head(block)
    return block.rules.build(block)


def kernel_module(one: Kernel) -> nn.Module:
    """A fused kernel by itself."""
    match one.kind:
        case "se":
            assert one.before is not None
            return nn.Sequential(kernel_module(one.before), SqueezeExcite(one.in_channels, rd_channels=one.hidden))
        case "add":
            return _Addition(one.in_channels)
        case "pool_linear":
            return _Head(BlockSpec("head", one.in_channels, one.in_channels, one.size, 0, classes=one.out_channels))
    return _conv(one.in_channels, one.out_channels, one.kernel, one.stride, one.activation, one.kind == "depthwise")


def _conv(n_in: int, n_out: int, kernel: int, stride: int, activation: str, depthwise: bool = False) -> nn.Module:
    conv = create_conv2d(n_in, n_out, kernel, stride=stride, padding="", depthwise=depthwise)
    norm = get_norm_act_layer(nn.BatchNorm2d, get_act_layer(activation or "relu"))
    return nn.Sequential(conv, norm(n_out, apply_act=bool(activation)))
