"""Blocks: every kind that a network may consist of. A kind is one class in one file; this table finds it.

To add one: a class in a file beside this one (convnext.py is an example), and its line in the table.
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

# New kinds go last: latency models count the columns of the first ones (hwnas.latency.features).
KINDS.update({kind.name: kind for kind in (
    Stem(), Convolution(), DepthwiseSeparable(), InvertedResidual(), FusedResidual(), Identity(), Head(),
    ConvNext("batch"), ConvNext("layer"), TracedBlock())})
