"""What a runtime executes of a block: its convolutions, what each costs and where it lies among others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hwnas.blocks import BlockSpec
from hwnas.latency.features import operator_features

_WIDTHS = (16, 32, 64)  # channels of a vector register or a matrix tile's row in fp32, bf16 and int8


class Operator(NamedTuple):
    """One convolution or matrix product: equal ones run the same kernel on the same shapes."""

    role: str
    in_channels: int
    out_channels: int
    kernel: int
    size: int
    out_size: int

    @property
    def features(self) -> np.ndarray:
        """Its own physical features, in the order of `features.NAMES`."""
        return _features(self)

    @property
    def coordinates(self) -> np.ndarray:
        """Where it lies among operators of its role: sizes in octaves, kernel, stride, how full its last lanes are."""
        stride = self.size / self.out_size if self.out_size else 1.0
        fill = [2.0 * (-channels % width) / width
                for width in _WIDTHS for channels in (self.in_channels, self.out_channels)]
        return np.array([np.log2(self.in_channels), np.log2(self.out_channels), np.log2(max(self.out_size, 1)),
                         self.kernel / 2, stride, *fill])


@lru_cache(maxsize=100_000)
def _features(operator: Operator) -> np.ndarray:
    return operator_features(*operator)


@lru_cache(maxsize=100_000)
def operators(block: BlockSpec) -> tuple[Operator, ...]:
    """The operators of a block, in order."""
    return tuple(Operator("stem" if block.kind == "stem" else role, *shape)
                 for role, *shape in block.convolutions())


def placed(blocks: Sequence[BlockSpec], before: str = "") -> list[tuple[BlockSpec, str]]:
    """Each block with the role of the operator before it; `before` is that of the first."""
    found = []
    for block in blocks:
        found.append((block, before))
        before = operators(block)[-1].role
    return found


def block_family(block: BlockSpec) -> str:
    """Blocks of one family differ in sizes only."""
    return f"{block.kind}/k{block.kernel}/e{block.expansion:g}/se{block.se:g}/{block.skip}/{block.activation}"


def block_coordinates(block: BlockSpec) -> np.ndarray:
    """Where a block lies in its family: channels and size in octaves, stride."""
    return np.array([np.log2(block.in_channels), np.log2(block.out_channels), np.log2(block.size), block.stride])
