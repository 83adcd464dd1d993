"""Which network can be cut from which, as architectures say it. Its weights: `hwnas.networks.carry`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hwnas.space.architecture import Architecture, BlockDef
from hwnas.space.family import Member


def is_part_of(part: Architecture, whole: Architecture) -> bool:
    """Whether `part` can be cut from `whole`: it has no stage, block, channel, kernel or pixel more.

    A head behind other stages than `whole` has begins anew, so that any head will do there.
    """
    if isinstance(part, Member):
        return part.is_part_of(whole)
    if (part.around, part.stem_stride, part.channels, part.classes) != (
            whole.around, whole.stem_stride, whole.channels, whole.classes) or (
            part.head and part.pooled != whole.pooled):
        return False
    parts, wholes = part.block_defs(), whole.block_defs()
    same_depth = len(parts) == len(wholes)
    return (part.image_size <= whole.image_size and part.stem_width <= whole.stem_width and len(parts) <= len(wholes)
            and (not same_depth or part.head <= whole.head)
            and all(_is_part_of_stage(stage, theirs) for stage, theirs in zip(parts, wholes, strict=False)))


def _is_part_of_stage(part: Sequence[BlockDef], whole: Sequence[BlockDef]) -> bool:
    blocks, theirs = single_blocks(part), single_blocks(whole)
    return len(blocks) <= len(theirs) and all(
        block.rules.in_timm and their.kind in (block.kind, *block.rules.cut_from)
        and block.stride == their.stride and block.channels <= their.channels and block.kernel <= their.kernel
        and block.expansion <= their.expansion and block.se in (0, their.se)
        for block, their in zip(blocks, theirs, strict=False))


def fit_head(part: Architecture, whole: Architecture) -> Architecture:
    """`part` with a head no wider than that of `whole`, where it stands behind the same stages: so it can be cut."""
    if len(part.stages) != len(whole.stages):
        return part
    return replace(part, head=min(part.head, whole.head))


def single_blocks(stage: Sequence[BlockDef]) -> list[BlockDef]:
    """A stage's blocks one by one, each with its own stride."""
    return [replace(run, repeats=1, stride=1 if at or index else run.stride)
            for index, run in enumerate(stage) for at in range(run.repeats)]
