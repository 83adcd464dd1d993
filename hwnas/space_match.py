"""Finding the codes of a given network: the inverse of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hwnas.architecture import Architecture, BlockDef
from hwnas.errors import SpaceError
from hwnas.space_codes import Codes, Coding, block_def
from hwnas.space_def import StageDef


def match(coding: Coding, architecture: Architecture) -> Codes:
    """All fields' codes of `architecture`; SpaceError names the first thing that does not fit."""
    space = coding.space
    for name, value, expected in (("channels", architecture.channels, coding.channels),
                                  ("classes", architecture.classes, coding.classes),
                                  ("stages", len(architecture.stages), len(space.stages))):
        if value != expected:
            raise SpaceError(f"architecture {architecture.id} is not of this space: {name} is {value}, not {expected}.")
    codes = {name: _index(architecture, name, value, choices) for name, value, choices in (
        ("image size", architecture.image_size, space.image_sizes),
        ("stem stride", architecture.stem_stride, space.stem_strides),
        ("activation", architecture.activation, space.activations), ("head", architecture.head, space.heads))}
    complaint: SpaceError | None = None
    for width in range(len(space.widths)):
        try:
            stem, stages = _match_units(coding, architecture, width)
        except SpaceError as error:
            complaint = complaint or error
            continue
        return np.array([codes["image size"], width, stem, codes["stem stride"], codes["activation"], codes["head"],
                         *stages], dtype=np.int64)
    assert complaint is not None
    raise complaint


def _match_units(coding: Coding, architecture: Architecture, width: int) -> tuple[int, list[int]]:
    """Codes of the stem's width and of all stages, under one width multiplier."""
    space = coding.space
    scale = space.widths[width]
    stem = _index(architecture, "stem width", architecture.stem_width,
                  [space.scaled(c, scale) for c in space.stem_widths])
    found: list[int] = []
    before = architecture.stem_width
    for index, (stage, defs) in enumerate(zip(space.stages, architecture.block_defs(), strict=True)):
        if len(defs) != 1:
            raise _not_here(architecture, f"stage{index}", "+".join(map(str, defs)), "one arch-def string")
        block = defs[0]
        channels = _index(architecture, f"stage{index}.channels", block.channels,
                          [space.scaled(c, scale) for c in stage.channels])
        codes = _match_stage(stage, block, channels, before)
        if codes is None:
            raise _not_here(architecture, f"stage{index}", str(block), "a choice of that stage")
        found += codes
        before = block.channels
    return stem, found


def _match_stage(stage: StageDef, block: BlockDef, channels: int, before: int) -> list[int] | None:
    """Codes of one stage that give the same blocks as `block` on `before` input channels, if there are any."""
    for op_code, op in enumerate(stage.ops):
        if op.kind != block.kind or op.expansion != block.expansion or stage.stride != block.stride:
            continue
        if op.kind == "id":
            return [op_code, 0, 0, 0, channels, 0]
        kernel = _find(stage.kernels, block.kernel) if op.takes_kernel else 0
        se = _find(stage.ses, block.se) if op.takes_se else 0
        repeats = _find(stage.repeats, block.repeats)
        if None in (kernel, se, repeats):
            continue
        for skip in range(len(stage.skips)):
            codes = [op_code, kernel or 0, se or 0, skip, channels, repeats or 0]
            made = block_def(stage, tuple(codes), before, block.channels)
            if tuple(made.blocks(before, 1, "relu")) == tuple(block.blocks(before, 1, "relu")):
                return codes
    return None


def _find(choices: Sequence[Any], value: Any) -> int | None:
    return choices.index(value) if value in choices else None


def _index(architecture: Architecture, name: str, value: Any, choices: Sequence[Any]) -> int:
    if value not in choices:
        raise _not_here(architecture, name, value, " or ".join(map(str, choices)))
    return choices.index(value)


def _not_here(architecture: Architecture, name: str, value: Any, rule: str) -> SpaceError:
    return SpaceError(f"architecture {architecture.id} is not of this space: {name} is {value}, not {rule}.")
