"""A network cut from a trained one: which can be cut from which, and what of its weights the cut begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hwnas.networks.around import select_weights, single_blocks
from hwnas.networks.build import build
from hwnas.space.architecture import Architecture, BlockDef

_DENSE = "er"  # what an inverted residual may become


def is_part_of(part: Architecture, whole: Architecture) -> bool:
    """Whether `part` can be cut from `whole`: it has no stage, block, channel, kernel or pixel more.

    A head behind other stages than `whole` has begins anew, so that any head will do there.
    """
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
        block.rules.in_timm and (block.kind == their.kind or (block.kind == _DENSE and their.kind == "ir"))
        and block.stride == their.stride and block.channels <= their.channels and block.kernel <= their.kernel
        and block.expansion <= their.expansion and block.se in (0, their.se)
        for block, their in zip(blocks, theirs, strict=False))


def fit_head(part: Architecture, whole: Architecture) -> Architecture:
    """`part` with a head no wider than that of `whole`, where it stands behind the same stages: so it can be cut."""
    if len(part.stages) != len(whole.stages):
        return part
    return replace(part, head=min(part.head, whole.head))


def cut_network(weights: Mapping[str, Tensor], whole: Architecture, part: Architecture) -> nn.Module:
    """`part` in train mode, with what it keeps of `weights`, the trained state of `whole`; its classifier too, where
    that reads the same channels. All else is random (seed torch first).

    Args:
        weights: the state of the network `whole`, by name.
        whole: the network that is cut; `part` is a part of it.
        part: the network to build.
    """
    with torch.random.fork_rng(devices=[]):
        source: Any = build(whole)
    source.load_state_dict(dict(weights))
    target = build(part)
    state = target.state_dict()
    with torch.no_grad():
        for name, tensor in select_weights(source.eval(), target).items():
            state[name].copy_(tensor)
    return target.train()
