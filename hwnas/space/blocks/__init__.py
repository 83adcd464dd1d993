"""Blocks: every kind that a network may consist of. Classes in this folder define them; the table has them by name.

To add a kind, write a class in a file of this folder (convnext.py is an example), and add it to the table.
"""

from __future__ import annotations

from hwnas.space.blocks.block import KINDS, TracedBlock
from hwnas.space.blocks.convnext import ConvNext
from hwnas.space.blocks.mobile import (
    Convolution,
    DepthwiseSeparable,
    FusedResidual,
    Head,
    Identity,
    InvertedResidual,
    Stem,
)

# New kinds go last: each of the first ones has a fixed column in latency models (hwnas.latency.features).
KINDS.update({kind.name: kind for kind in (
    Stem(), Convolution(), DepthwiseSeparable(), InvertedResidual(), FusedResidual(), Identity(), Head(),
    ConvNext("batch"), ConvNext("layer"), TracedBlock())})
