"""What a search space allows, as checked data: the operations, kernels, channels ... that each stage may choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from hwnas.space.blocks import KINDS, BlockKind, round_to_divisor

Path = tuple[str | int, ...]
Value: TypeAlias = str | int | float | bool
GLOBALS = ("image_size", "width", "stem.width", "stem.stride", "activation", "head")
FIELDS = ("op", "kernel", "se", "skip", "channels", "repeats")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a stage; `kernel` is None where the stage's own kernel applies."""

    text: str = field(compare=False)
    kind: str
    expansion: float
    kernel: int | None

    @property
    def rules(self) -> BlockKind:
        """What its kind says."""
        return KINDS[self.kind]

    @property
    def takes_kernel(self) -> bool:
        """Whether the stage's kernel matters to it."""
        return self.kernel is None

    @property
    def takes_repeats(self) -> bool:
        """Whether repeats and a residual matter to it (one that vanishes comes once)."""
        return not self.rules.vanishes

    @property
    def takes_se(self) -> bool:
        """Whether squeeze-and-excite matters to it (timm drops it on plain convolutions)."""
        return self.rules.takes_se


@dataclass(frozen=True, slots=True)
class StageDef:
    """What may be chosen in one stage; every tuple holds at least one value, no two of them equal."""

    ops: tuple[Op, ...]
    kernels: tuple[int, ...]
    ses: tuple[float, ...]
    skips: tuple[bool, ...]
    channels: tuple[int, ...]
    repeats: tuple[int, ...]
    stride: int


@dataclass(frozen=True, slots=True)
class SpaceDef:
    """What may be chosen in a space. `widths` multiply stem and stages, not the head."""

    image_sizes: tuple[int, ...]
    widths: tuple[float, ...]
    stem_widths: tuple[int, ...]
    stem_strides: tuple[int, ...]
    activations: tuple[str, ...]
    heads: tuple[int, ...]
    stages: tuple[StageDef, ...]
    divisor: int

    def scaled(self, channels: int, width: float) -> int:
        """Channels under a width multiplier; a fixed one is already in them."""
        return channels if len(self.widths) == 1 else round_to_divisor(channels * width, self.divisor)

    def may_meet(self, left: tuple[int, ...], right: tuple[int, ...]) -> bool:
        """Whether two choices of channels can come out equal in one network."""
        return any({self.scaled(c, w) for c in left} & {self.scaled(c, w) for c in right} for w in self.widths)


def fields(space: SpaceDef) -> list[tuple[str, tuple[Value, ...]]]:
    """Name and choices of every field: those of the whole network, then each stage's."""
    values: list[tuple[Value, ...]] = [space.image_sizes, space.widths, space.stem_widths, space.stem_strides,
                                       space.activations, space.heads]
    found = list(zip(GLOBALS, values, strict=True))
    for index, stage in enumerate(space.stages):
        values = [tuple(op.text for op in stage.ops), stage.kernels, stage.ses, stage.skips, stage.channels,
                  stage.repeats]
        found += [(f"stage{index}.{name}", choices) for name, choices in zip(FIELDS, values, strict=True)]
    return found


def without_dead_choices(space: SpaceDef) -> SpaceDef:
    """Fields that no network of the space could ever use lose all values but the first: they are no parameters."""
    stages = []
    before: tuple[int, ...] = space.stem_widths
    for stage in space.stages:
        shapes_meet = stage.stride == 1 and space.may_meet(before, stage.channels)
        residual = any(op.takes_repeats for op in stage.ops) and (max(stage.repeats) > 1 or shapes_meet)
        stages.append(replace(
            stage,
            kernels=stage.kernels if any(op.takes_kernel for op in stage.ops) else stage.kernels[:1],
            ses=stage.ses if any(op.takes_se for op in stage.ops) else stage.ses[:1],
            skips=stage.skips if residual else stage.skips[:1],
            repeats=stage.repeats if any(op.takes_repeats for op in stage.ops) else stage.repeats[:1]))
        before = stage.channels
    return replace(space, stages=tuple(stages))


def faults(space: SpaceDef) -> Iterator[tuple[Path, str]]:
    """What is wrong with a space as a whole: (key path, complaint)."""
    stride = max(space.stem_strides)
    for stage in space.stages:
        stride *= stage.stride
    if min(space.image_sizes) < stride:
        yield ("image_size",), (f"{min(space.image_sizes)} is too small for the total stride of {stride}: the smallest "
                                f"size of this space is {stride} px")
    before = space.stem_widths
    for index, stage in enumerate(space.stages):
        narrowest = min(space.scaled(c, w) for c in (*before, *stage.channels) for w in space.widths)
        for se in stage.ses if any(op.takes_se for op in stage.ops) else ():
            if se and 0.9 * se * narrowest < 0.6:
                yield ("stages", index, "se"), f"{se:g} leaves no channel of {narrowest}"
        before = stage.channels
    yield from _aliases(space)


def _aliases(space: SpaceDef) -> Iterator[tuple[Path, str]]:
    """Where two settings would be one network in a way that canonical codes cannot undo."""
    before: StageDef | None = None
    follows = False
    for index, stage in enumerate(space.stages):
        path: Path = ("stages", index)
        for op in stage.ops:
            if op.kernel is None and any(o.kind == op.kind and o.expansion == op.expansion and o.kernel in stage.kernels
                                         for o in stage.ops):
                yield (*path, "op"), f"lists {op.text!r} with one of the stage's kernels twice"
        before_channels = before.channels if before else space.stem_widths
        joined = stage.stride == 1 and space.may_meet(before_channels, stage.channels)
        has_id = any(op.rules.vanishes for op in stage.ops)
        if joined and has_id and not (len(stage.channels) == 1 and before_channels == stage.channels):
            yield (*path, "channels"), ("must be one value, and the same as in the stage before, "
                                        "where 'id' may change nothing")
        if joined and before is not None:
            depth_varies = len(before.repeats) > 1 or len(stage.repeats) > 1
            if depth_varies and _operations(before) & _operations(stage):
                yield path, ("may have the channels and the operation of the stage before at stride 1, so that two "
                             "settings of repeats are one network: make them one stage, or use other channels or "
                             "stride 2")
            if follows and stage != before and (has_id or any(op.rules.vanishes for op in before.ops)):
                yield path, "must have the same choices as the stage before: 'id' makes them one network otherwise"
        before, follows = stage, joined


def _operations(stage: StageDef) -> set[tuple[str, float, int]]:
    """Everything the stage may repeat: (kind, expansion, kernel)."""
    return {(op.kind, op.expansion, kernel) for op in stage.ops if op.takes_repeats
            for kernel in ((op.kernel,) if op.kernel else stage.kernels)}
