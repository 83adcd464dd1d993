"""MacroNet: a network built block by block from its BlockSpecs, for spaces with `id` blocks (NAS-Bench-Macro)."""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hwnas.system.torchvision_ops import declare_missing

declare_missing()  # before the first import of timm

import torch
from timm.layers import ConvNormAct, create_classifier, create_conv2d, get_act_layer, get_norm_act_layer
from timm.models._efficientnet_blocks import (
    ConvBnAct,
    DepthwiseSeparableConv,
    EdgeResidual,
    InvertedResidual,
    SqueezeExcite,
)
from timm.models._efficientnet_builder import efficientnet_init_weights
from torch import Tensor, nn

from hwnas.space.architecture import Architecture
from hwnas.space.blocks import BlockSpec

BlockBuilder = Callable[[BlockSpec, float], nn.Module]


def _convolution(block: BlockSpec, drop_path: float) -> nn.Module:
    network: nn.Module = ConvBnAct(
        block.in_channels, block.out_channels, block.kernel, block.stride, skip=block.skip, drop_path_rate=drop_path,
        act_layer=get_act_layer(block.activation))
    return network


def _identity(block: BlockSpec, drop_path: float) -> nn.Module:
    """A strided 1x1 convolution and batch norm, no activation."""
    network: nn.Module = ConvNormAct(block.in_channels, block.out_channels, 1, block.stride, apply_act=False)
    return network


def _expanding(cls: type[nn.Module], kernel: str, block: BlockSpec, drop_path: float) -> nn.Module:
    arguments: dict[str, Any] = {kernel: block.kernel, "act_layer": get_act_layer(block.activation)}
    if block.kind != "ds":
        arguments["exp_ratio"] = block.expansion
    if block.se:
        ratio = block.se / (block.expansion if block.kind != "ds" else 1.0)
        arguments["se_layer"] = partial(SqueezeExcite, rd_ratio=ratio)
    return cls(block.in_channels, block.out_channels, stride=block.stride, noskip=not block.skip,
               drop_path_rate=drop_path, **arguments)


_BUILDERS: dict[str, BlockBuilder] = {
    "cn": _convolution,
    "id": _identity,
    "ds": partial(_expanding, DepthwiseSeparableConv, "dw_kernel_size"),
    "ir": partial(_expanding, InvertedResidual, "dw_kernel_size"),
    "er": partial(_expanding, EdgeResidual, "exp_kernel_size"),
}


class MacroNet(nn.Module):
    """Stem, `blocks.i.j` (stage i, block j; a stage may be empty), head: float32 [n, c, h, w] -> logits.

    `in_chans` and `num_classes` replace the architecture's, as timm's models allow.
    """

    def __init__(self, architecture: Architecture, *, num_classes: int | None = None, in_chans: int | None = None,
                 drop_rate: float = 0.0, drop_path_rate: float = 0.0, global_pool: str = "avg") -> None:
        super().__init__()
        self.num_classes = architecture.classes if num_classes is None else num_classes
        self.drop_rate, self.grad_checkpointing = drop_rate, False
        _, *stages, head = architecture.staged_blocks()
        norm_act = get_norm_act_layer(nn.BatchNorm2d, get_act_layer(architecture.activation))
        width = architecture.stem_width
        self.conv_stem = create_conv2d(in_chans or architecture.channels, width, 3, stride=architecture.stem_stride,
                                       padding="")
        self.bn1 = norm_act(width, inplace=True)
        depth, total, built = 0, sum(map(len, stages)), []
        for stage in stages:
            built.append(nn.Sequential(*(
                _BUILDERS[block.kind](block, drop_path_rate * (depth + index) / total)
                for index, block in enumerate(stage))))
            depth += len(stage)
        self.blocks = nn.Sequential(*built)
        self.num_features = self.head_hidden_size = head[0].out_channels
        self.conv_head: nn.Module = nn.Identity()
        self.bn2: nn.Module = nn.Identity()
        if architecture.head:
            self.conv_head = create_conv2d(head[0].in_channels, self.num_features, 1, padding="")
            self.bn2 = norm_act(self.num_features, inplace=True)
        self.global_pool, self.classifier = create_classifier(
            self.num_features, self.num_classes, pool_type=global_pool)
        efficientnet_init_weights(self)

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        classifier: nn.Module = self.classifier
        return classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer."""
        self.num_classes = num_classes
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        self.global_pool, self.classifier = create_classifier(self.num_features, num_classes, pool_type=pool)

    def forward_features(self, x: Tensor) -> Tensor:
        """Maps before pooling."""
        x = self.bn1(self.conv_stem(x))
        x = self.blocks(x)
        maps: Tensor = self.bn2(self.conv_head(x))
        return maps

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pooled features, or logits."""
        x = self.global_pool(x)
        if self.drop_rate > 0.0:
            x = torch.nn.functional.dropout(x, p=self.drop_rate, training=self.training)
        if not pre_logits:
            x = self.classifier(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes]."""
        return self.forward_head(self.forward_features(x))
