"""A part of a search space: what is left of its choices without some variants of blocks, the largest part that has none
of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

from hwnas.errors import SpaceError
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.coding import Coding
from hwnas.space.reading import Op, SpaceDef, StageDef, read_op, without_dead_choices

_BARE = "_se0"
_SQUEEZED = "se"  # as in a block's key


class Variant(NamedTuple):
    """A kind of block as a runtime sees it: with or without squeeze-and-excite (`gate`: se or empty), and its
    activation. As text `ir/se/relu`."""

    kind: str
    gate: str
    activation: str

    def __str__(self) -> str:
        return "/".join(filter(None, self))

    @classmethod
    def of(cls, block: BlockSpec) -> Variant:
        """That of a block."""
        return cls.named(block.kind, block.se > 0, block.activation)

    @classmethod
    def named(cls, kind: str, se: bool, activation: str) -> Variant:
        """From what a block says of itself."""
        return cls(kind, _SQUEEZED * se, activation)

    @classmethod
    def read(cls, text: str) -> Variant:
        """Inverse of `str`; ValueError for other text."""
        kind, *gate, activation = text.split("/")
        if gate not in ([], [_SQUEEZED]) or not kind or not activation:
            raise ValueError(f"no variant of a block: {text!r}")
        return cls(kind, "".join(gate), activation)


def without(space: SpaceDef, left: Collection[Variant]) -> SpaceDef:
    """The largest part of a space whose networks have no block of a variant in `left`.

    Activations are left out of the whole space, operations of a stage, squeeze-and-excite of a stage or of one of its
    operations. SpaceError names the stage in which nothing would stay.
    """
    parts = []
    for n in range(len(space.activations), 0, -1):
        for activations in combinations(space.activations, n):
            stages = [_stage(stage, activations, left) for stage in space.stages]
            if all(stage.ops for stage in stages):
                parts.append(without_dead_choices(replace(space, activations=activations, stages=tuple(stages))))
    if not parts:
        raise SpaceError(_nothing(space, left))
    return max(parts, key=lambda part: Coding(part, channels=1, classes=2).n_networks)  # the first has most activations


def _nothing(space: SpaceDef, left: Collection[Variant]) -> str:
    """Why nothing stays: the first stage that has no operation with any one activation."""
    for index, stage in enumerate(space.stages):
        if not any(_stage(stage, (activation,), left).ops for activation in space.activations):
            return f"nothing of stages[{index}] would stay"
    return "no activation would stay that every stage can have"


def _stage(stage: StageDef, activations: Sequence[str], left: Collection[Variant]) -> StageDef:
    """A stage without what is `left` out where the network has one of `activations`; without operations where nothing
    stays."""
    kept = [(op, bare) for op in stage.ops if (bare := _bare(op, stage, activations, left)) is not None]
    squeezed = [bare for op, bare in kept if op.takes_se]
    if squeezed and all(squeezed):
        return replace(stage, ops=tuple(op for op, _ in kept), ses=(0.0,))
    return replace(stage, ops=tuple(read_op(op.text + _BARE) if bare else op for op, bare in kept))


def _bare(op: Op, stage: StageDef, activations: Sequence[str], left: Collection[Variant]) -> bool | None:
    """Whether an operation can stay without squeeze-and-excite only; None where it cannot stay."""
    gates = ([""] if not op.takes_se or 0 in stage.ses else []) + [_SQUEEZED] * (op.takes_se and any(stage.ses))
    barred = [gate for gate in gates if any(Variant(op.kind, gate, activation) in left for activation in activations)]
    if barred and (barred[0] == "" or len(barred) == len(gates)):
        return None
    return bool(barred)
