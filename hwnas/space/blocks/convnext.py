"""ConvNeXt's block: depthwise convolution and norm, 1x1 expansion and activation, 1x1 projection, residual."""

from __future__ import annotations

from typing import Any, Literal

from hwnas.lazy import timm, torch
from hwnas.space.blocks.block import BlockKind, BlockSpec, Convolutions


class ConvNext(BlockKind):
    """ConvNeXt's block (Liu et al., CVPR 2022): `cx` with batch norms, `cxl` with a layer norm.

    The depthwise convolution comes first, so that it has few channels (kernel 7 and expansion 4 in the paper).
    `cx` has a batch norm after each convolution; runtimes fold them, and everything runs in int8. It is MobileNetV4's
    "universal inverted bottleneck" without its second depthwise convolution (Qin et al., ECCV 2024). `cxl` normalises
    over channels after the depthwise convolution, in fp32 in an int8 file too. To choose one, see
    docs/decisions/convnext-block.md. There is no layer scale: only very deep networks need it.
    """

    expands, in_timm = True, False

    def __init__(self, norm: Literal["batch", "layer"]) -> None:
        self._layer_norm = norm == "layer"
        self.name = "cxl" if self._layer_norm else "cx"
        self.words = (self.name,)
        # Nodes and their names, fitted to 14 files of convnext_small: fewer activations, longer names, layer norms.
        self.file_bytes = (940.0, 1450.0) if self._layer_norm else (-60.0, 550.0)

    def convolutions(self, block: BlockSpec) -> Convolutions:
        i, o, m, s, t = block.in_channels, block.out_channels, block.mid_channels, block.size, block.out_size
        return (("depthwise", i, i, block.kernel, s, t), ("pointwise", i, m, 1, t, t), ("pointwise", m, o, 1, t, t))

    def norm_elements(self, block: BlockSpec) -> int:
        """Return the elements of the layer norm; batch norms are folded."""
        return block.in_channels * block.out_size**2 if self._layer_norm else 0

    def norm_params(self, block: BlockSpec) -> int:
        """Return the parameters of the layer norm and the biases of both pointwise convolutions, or of batch norms."""
        if self._layer_norm:
            return 2 * block.in_channels + block.mid_channels + block.out_channels
        return super().norm_params(block)

    def build(self, block: BlockSpec) -> torch.nn.Module:
        activation = timm.layers.get_act_layer(block.activation)
        network: Any = timm.models._efficientnet_blocks.UniversalInvertedResidual(
            block.in_channels, block.out_channels, dw_kernel_size_start=block.kernel, dw_kernel_size_mid=0,
            stride=block.stride, exp_ratio=block.expansion, noskip=not block.skip,
            layer_scale_init_value=None, act_layer=activation)
        if self._layer_norm:  # replace timm's batch norms; the place of the second one also holds the activation
            network.dw_start.bn = timm.layers.LayerNorm2d(block.in_channels)
            network.pw_exp.conv = torch.nn.Conv2d(block.in_channels, block.mid_channels, 1)
            network.pw_exp.bn = activation(inplace=True)
            network.pw_proj.conv = torch.nn.Conv2d(block.mid_channels, block.out_channels, 1)
            network.pw_proj.bn = torch.nn.Identity()
        built: torch.nn.Module = network
        return built
