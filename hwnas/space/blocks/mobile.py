"""The blocks of timm's mobile networks (MobileNets, MnasNets, EfficientNets); stem and head of all networks."""

from __future__ import annotations

from functools import partial
from typing import Any

from hwnas.lazy import nn, timm
from hwnas.space.blocks.block import BlockKind, BlockSpec, Convolutions


class Stem(BlockKind):
    """The first convolution, batch norm and activation. Every network has one."""

    name = "stem"
    takes_kernel, reads_image = False, True


class Convolution(BlockKind):
    """`cn`: convolution, batch norm, activation."""

    name = "cn"
    words, adds_input = ("conv", "cn"), False

    def build(self, block: BlockSpec) -> nn.Module:
        network: nn.Module = timm.models._efficientnet_blocks.ConvBnAct(
            block.in_channels, block.out_channels, block.kernel, block.stride, skip=block.skip,
            act_layer=timm.layers.get_act_layer(block.activation))
        return network


class Identity(BlockKind):
    """`id`: nothing if the shape stays the same, otherwise a strided 1x1 convolution and batch norm that change it."""

    name = "id"
    words, takes_kernel, vanishes, adds_input, in_timm, activations = ("id",), False, True, False, False, 0

    def convolutions(self, block: BlockSpec) -> Convolutions:
        return (("pointwise", block.in_channels, block.out_channels, 1, block.size, block.out_size),)

    def build(self, block: BlockSpec) -> nn.Module:
        network: nn.Module = timm.layers.ConvNormAct(block.in_channels, block.out_channels, 1, block.stride,
                                                     apply_act=False)
        return network


class DepthwiseSeparable(BlockKind):
    """`ds`: depthwise convolution, squeeze-and-excite if any, 1x1 projection."""

    name = "ds"
    words, takes_se = ("ds",), True

    def convolutions(self, block: BlockSpec) -> Convolutions:
        i, o, s, t = block.in_channels, block.out_channels, block.size, block.out_size
        return (("depthwise", i, i, block.kernel, s, t), *_squeeze(block), ("pointwise", i, o, 1, t, t))

    def build(self, block: BlockSpec) -> nn.Module:
        return _residual("DepthwiseSeparableConv", block, dw_kernel_size=block.kernel)


class InvertedResidual(BlockKind):
    """`ir`: 1x1 expansion, depthwise convolution, squeeze-and-excite if any, 1x1 projection (MobileNetV2)."""

    name = "ir"
    words, expands, takes_se, activations = ("ir",), True, True, 2

    def convolutions(self, block: BlockSpec) -> Convolutions:
        i, o, m, s, t = block.in_channels, block.out_channels, block.mid_channels, block.size, block.out_size
        return (("pointwise", i, m, 1, s, s), ("depthwise", m, m, block.kernel, s, t), *_squeeze(block),
                ("pointwise", m, o, 1, t, t))

    def build(self, block: BlockSpec) -> nn.Module:
        return _residual("InvertedResidual", block, dw_kernel_size=block.kernel, exp_ratio=block.expansion)


class FusedResidual(BlockKind):
    """`er`: fused ("edge") inverted residual: one dense convolution instead of expansion and depthwise."""

    name = "er"
    words, expands, takes_se = ("er",), True, True

    def convolutions(self, block: BlockSpec) -> Convolutions:
        i, o, m, s, t = block.in_channels, block.out_channels, block.mid_channels, block.size, block.out_size
        return (("dense", i, m, block.kernel, s, t), *_squeeze(block), ("pointwise", m, o, 1, t, t))

    def build(self, block: BlockSpec) -> nn.Module:
        return _residual("EdgeResidual", block, exp_kernel_size=block.kernel, exp_ratio=block.expansion)


class Head(BlockKind):
    """The last 1x1 convolution (`kernel` 0: none), global pooling and linear layer. Every network has one."""

    name = "head"
    takes_kernel, ends = False, True

    def convolutions(self, block: BlockSpec) -> Convolutions:
        i, o, s = block.in_channels, block.out_channels, block.size
        pointwise = (("pointwise", i, o, 1, s, s),) if block.kernel else ()
        return (*pointwise, ("linear", o, block.classes, 1, 1, 1))


def _squeeze(block: BlockSpec) -> Convolutions:
    m, squeezed = block.mid_channels, block.se_channels
    return (("se", m, squeezed, 1, 1, 1), ("se", squeezed, m, 1, 1, 1)) if block.se else ()


def _residual(layer: str, block: BlockSpec, **arguments: Any) -> nn.Module:
    """Build timm's block of the class `layer`, which may have squeeze-and-excite and a residual."""
    if block.se:
        arguments["se_layer"] = partial(timm.models._efficientnet_blocks.SqueezeExcite, rd_ratio=block.se_ratio)
    network: nn.Module = getattr(timm.models._efficientnet_blocks, layer)(
        block.in_channels, block.out_channels, stride=block.stride, noskip=not block.skip,
        act_layer=timm.layers.get_act_layer(block.activation), **arguments)
    return network
