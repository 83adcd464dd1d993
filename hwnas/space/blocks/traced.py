"""Blocks of a traced network: whatever operators one of its modules runs, listed one by one."""

from __future__ import annotations

from hwnas.space.blocks.block import BlockKind, BlockSpec, Convolutions


class TracedBlock(BlockKind):
    """`traced`: the operators that were met when a network ran once; see `hwnas.networks.traced`."""

    name = "traced"
    takes_kernel, in_timm = False, False

    def convolutions(self, block: BlockSpec) -> Convolutions:
        """Those that the block lists."""
        return block.operators
