"""Architecture -> torch network: block by block of timm's layers, or cut out of another network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.lazy import LazyModule, nn
from hwnas.networks.cutting import build_cut
from hwnas.space.architecture import Architecture, Cut

if TYPE_CHECKING:
    import hwnas.networks.modules as modules
    from hwnas.networks.weights import Pretrained
else:
    modules = LazyModule("hwnas.networks.modules")


def build(architecture: Architecture, pretrained: Pretrained | None = None) -> nn.Module:
    """The network in train mode, float32 [n, c, h, w] in, logits [n, classes] out: with timm's initial weights (seed
    torch first), or what a cut keeps of `pretrained` ones. DataError where these do not fit."""
    if isinstance(architecture, Cut):
        return build_cut(architecture, pretrained)
    return modules.BlockNet(architecture).train()
