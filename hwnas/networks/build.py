"""Architecture -> torch network: timm's EfficientNet, with the stem stride and channels exactly as written.

Networks with blocks that timm has no word for are built block by block (`modules.BlockNet`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hwnas.lazy import LazyModule, nn, timm
from hwnas.networks.cutting import build_cut
from hwnas.space.architecture import Architecture, Cut

if TYPE_CHECKING:
    import hwnas.networks.modules as modules
else:
    modules = LazyModule("hwnas.networks.modules")

# timm turns strides beyond this into dilation; ours are meant as written.
_ANY_STRIDE = 1 << 30


def build(architecture: Architecture) -> nn.Module:
    """The network in train mode with timm's initial weights: float32 [n, c, h, w] in, logits [n, classes] out."""
    if isinstance(architecture, Cut):
        return build_cut(architecture)
    if not all(block.rules.in_timm for stage in architecture.block_defs() for block in stage):
        return modules.BlockNet(architecture).train()
    return modules.StridedEfficientNet(
        block_args=_block_arguments(architecture), num_classes=architecture.classes, in_chans=architecture.channels,
        stem_size=architecture.stem_width, stem_stride=architecture.stem_stride, num_features=architecture.head,
        act_layer=timm.layers.get_act_layer(architecture.activation), round_chs_fn=int,
        output_stride=_ANY_STRIDE).train()


def _block_arguments(architecture: Architecture) -> list[list[dict[str, Any]]]:
    """timm's arguments of every block, by its own reading of the words, and what timm has no words for."""
    stages: list[list[dict[str, Any]]] = timm.models._efficientnet_builder.decode_arch_def(
        [list(map(str, stage)) for stage in architecture.block_defs()])
    for arguments, stage in zip(stages, architecture.staged_blocks()[1:-1], strict=True):
        for said, block in zip(arguments, stage, strict=True):
            if "noskip" in said:
                said["noskip"] = not block.skip
    return stages
