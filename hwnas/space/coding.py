"""Codes: the integers that say which network of a space is meant, and which one a network is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwnas.errors import SpaceError
from hwnas.space.architecture import Architecture, BlockDef, blocks_of
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.reading import FIELDS, GLOBALS, SpaceDef, StageDef, fields

Codes = NDArray[np.int64]
IMAGE_SIZE, STEM_WIDTH, STEM_STRIDE, ACTIVATION, HEAD = range(len(GLOBALS))
OP, KERNEL, SE, SKIP, CHANNELS, REPEATS = range(6)


def _first(stage: int) -> int:
    """Column of a stage's first field."""
    return len(GLOBALS) + len(FIELDS) * stage


class _Stage(NamedTuple):
    """Look-up tables of one stage, indexed by its codes."""

    takes_kernel: NDArray[np.bool_]
    takes_se: NDArray[np.bool_]
    takes_repeats: NDArray[np.bool_]
    several: NDArray[np.bool_]
    same: NDArray[np.bool_]
    sizes: tuple[int, ...]
    size_index: Codes
    radix: tuple[int, ...]


class Segments:
    """Numbers of what a network's units may be, one unit behind the other: each unit has as many as its `radix` says
    of its digits."""

    def __init__(self, radices: Sequence[tuple[int, ...]]) -> None:
        self._radices = radices
        self._offsets = np.concatenate([[0], np.cumsum([prod(radix) for radix in radices])]).astype(np.int64)
        self.n = int(self._offsets[-1])

    def number(self, unit: int, digits: Iterable[Codes]) -> Codes:
        """Those of one unit in many networks, by their digits."""
        return np.asarray(self._offsets[unit] + np.ravel_multi_index(tuple(digits), self._radices[unit]))

    def read(self, segment: int) -> tuple[int, list[int]]:
        """Unit and digits of a number; IndexError outside 0 .. n - 1."""
        if not 0 <= segment < self.n:
            raise IndexError(f"segment {segment} is not in 0 .. {self.n - 1}")
        unit = int(np.searchsorted(self._offsets, segment, side="right")) - 1
        place = segment - int(self._offsets[unit])
        return unit, [int(digit) for digit in np.unravel_index(place, self._radices[unit])]


class BlockCoding:
    """The tables behind a space's codes."""

    def __init__(self, space: SpaceDef, channels: int, classes: int) -> None:
        self.space, self.channels, self.classes, self.fields = space, channels, classes, fields(space)
        self.image_sizes = space.image_sizes
        self.values = [space.stem_widths, *(stage.channels for stage in space.stages)]
        self._stages = self._stage_tables()
        radices: list[tuple[int, ...]] = [
            (len(space.image_sizes), len(self.values[0]), len(space.stem_strides), len(space.activations))]
        radices += [stage.radix for stage in self._stages]
        self._head_sizes, self._head_size_index = self._sizes(len(space.stages))
        radices.append((len(self._head_sizes), len(self.values[-1]), len(space.activations), len(space.heads)))
        self.segment_ids = Segments(radices)
        self.runs = self._id_runs()

    def _sizes(self, index: int) -> tuple[tuple[int, ...], Codes]:
        """Map sizes that stage `index` may read, and their index by [image size code, stem stride code]."""
        space = self.space

        def size(image: int, stride: int) -> int:
            for step in (stride, *(stage.stride for stage in space.stages[:index])):
                image = -(-image // step)
            return image

        table = np.array([[size(image, stride) for stride in space.stem_strides] for image in space.image_sizes])
        sizes = np.unique(table)
        return tuple(int(s) for s in sizes), np.searchsorted(sizes, table).astype(np.int64)

    def _stage_tables(self) -> list[_Stage]:
        tables = []
        for index, stage in enumerate(self.space.stages):
            sizes, size_index = self._sizes(index)
            before, here = np.array(self.values[index]), np.array(self.values[index + 1])
            tables.append(_Stage(
                np.array([op.takes_kernel for op in stage.ops]), np.array([op.takes_se for op in stage.ops]),
                np.array([op.takes_repeats for op in stage.ops]), np.array(stage.repeats) > 1,
                (before[:, None] == here[None, :]) & (stage.stride == 1), sizes, size_index,
                (len(sizes), len(self.space.activations), len(before), len(here), len(stage.ops), len(stage.kernels),
                 len(stage.ses), len(stage.skips), len(stage.repeats))))
        return tables

    def _id_runs(self) -> list[list[int]]:
        """Runs of neighbouring stages with equal choices in which `id` changes nothing: there their order makes no
        difference."""
        runs: list[list[int]] = []
        for index, stage in enumerate(self.space.stages):
            before = self.space.stem_widths if index == 0 else self.space.stages[index - 1].channels
            if not (any(op.rules.vanishes for op in stage.ops) and stage.stride == 1 and before == stage.channels):
                continue
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        return runs

    def content(self) -> dict[str, Any]:
        """Return what tells the space from others, with two options that spaces once had and their values then."""
        return {"definition": {**asdict(self.space), "widths": [1.0], "divisor": 8}}

    def canonical(self, full: Codes) -> Codes:
        """Codes in which equal networks are equal rows: inactive fields are 0, aliases take their first form."""
        columns = np.array(full.T, order="C")
        for index, table in enumerate(self._stages):
            stage = columns[_first(index):_first(index + 1)]
            op = stage[OP]
            stage[REPEATS] *= table.takes_repeats[op]
            stage[KERNEL] *= table.takes_kernel[op]
            stage[SE] *= table.takes_se[op]
            before = columns[_first(index - 1) + CHANNELS] if index else columns[STEM_WIDTH]
            residual = table.several[stage[REPEATS]] | table.same[before, stage[CHANNELS]]
            stage[SKIP] *= residual & table.takes_repeats[op]
        for run in self.runs:
            if len(run) > 1:
                self._sort_run(columns, run)
        return np.ascontiguousarray(columns.T)

    def _sort_run(self, columns: Codes, run: list[int]) -> None:
        """Identities that change nothing go last."""
        block = columns[_first(run[0]):_first(run[-1] + 1)].reshape(len(run), len(FIELDS), -1)
        vanishes = ~self._stages[run[0]].takes_repeats[block[:, OP]]
        order = np.argsort(vanishes, axis=0, kind="stable")
        block[:] = np.take_along_axis(block, order[:, None, :], axis=0)

    def architecture(self, full: Codes) -> Architecture:
        """The network of one canonical row."""
        space, codes = self.space, [int(code) for code in full]
        units = [codes[STEM_WIDTH], *(codes[_first(i) + CHANNELS] for i in range(len(space.stages)))]
        widths = [values[unit] for values, unit in zip(self.values, units, strict=True)]
        return Architecture(
            stages=tuple((str(block_def(stage, tuple(codes[_first(i):_first(i + 1)]), widths[i], widths[i + 1])),)
                         for i, stage in enumerate(space.stages)),
            stem_width=widths[0], stem_stride=space.stem_strides[codes[STEM_STRIDE]], head=space.heads[codes[HEAD]],
            activation=space.activations[codes[ACTIVATION]], image_size=space.image_sizes[codes[IMAGE_SIZE]],
            channels=self.channels, classes=self.classes)

    def segments(self, full: Codes) -> Codes:
        """Segment ids [n, stages + 2] of canonical codes."""
        columns = np.ascontiguousarray(full.T)
        image, stride, activation = columns[IMAGE_SIZE], columns[STEM_STRIDE], columns[ACTIVATION]
        here = columns[STEM_WIDTH]
        ids = [self.segment_ids.number(0, (image, here, stride, activation))]
        for index, table in enumerate(self._stages):
            op, kernel, se, skip, channels, repeats = columns[_first(index):_first(index + 1)]
            before, here = here, channels
            ids.append(self.segment_ids.number(index + 1, (
                table.size_index[image, stride], activation, before, here, op, kernel, se, skip, repeats)))
        ids.append(self.segment_ids.number(len(self._stages) + 1, (
            self._head_size_index[image, stride], here, activation, columns[HEAD])))
        return np.stack(ids, axis=1)

    def segment_blocks(self, segment: int) -> tuple[BlockSpec, ...]:
        """The blocks of one segment id; IndexError for another number."""
        space, (unit, digits) = self.space, self.segment_ids.read(segment)
        if unit == 0:
            return (BlockSpec("stem", self.channels, self.values[0][digits[1]], space.image_sizes[digits[0]], 3,
                              space.stem_strides[digits[2]], activation=space.activations[digits[3]]),)
        if unit == len(self._stages) + 1:
            width, head = self.values[-1][digits[1]], space.heads[digits[3]]
            return (BlockSpec("head", width, head or width, self._head_sizes[digits[0]], 1 if head else 0,
                              activation=space.activations[digits[2]], classes=self.classes),)
        size, activation, before, here, op, kernel, se, skip, repeats = digits
        in_channels = self.values[unit - 1][before]
        block = block_def(space.stages[unit - 1], (op, kernel, se, skip, 0, repeats), in_channels,
                          self.values[unit][here])
        return blocks_of([block], in_channels, self._stages[unit - 1].sizes[size], space.activations[activation])

    def match(self, architecture: Architecture) -> Codes:
        """All fields' codes of `architecture`; SpaceError names the first thing that does not fit."""
        space = self.space
        for name, value, expected in (("channels", architecture.channels, self.channels),
                                      ("classes", architecture.classes, self.classes),
                                      ("around", architecture.around, ""),
                                      ("stages", len(architecture.stages), len(space.stages))):
            if value != expected:
                raise _not_here(architecture, name, value, expected)
        codes = {name: _index(architecture, name, value, choices) for name, value, choices in (
            ("image size", architecture.image_size, space.image_sizes),
            ("stem stride", architecture.stem_stride, space.stem_strides),
            ("activation", architecture.activation, space.activations), ("head", architecture.head, space.heads))}
        stem = _index(architecture, "stem width", architecture.stem_width, space.stem_widths)
        stages = _match_stages(self, architecture)
        return np.array([codes["image size"], stem, codes["stem stride"], codes["activation"], codes["head"], *stages],
                        dtype=np.int64)


def block_def(stage: StageDef, codes: tuple[int, ...], in_channels: int, out_channels: int) -> BlockDef:
    """One stage's string from its codes (in the order of `reading.FIELDS`); unused parts have timm's default form."""
    op, repeats = stage.ops[codes[OP]], stage.repeats[codes[REPEATS]]
    if not op.takes_repeats:
        return BlockDef(op.kind, 1, 1, stage.stride, 1.0, out_channels, 0.0, False)
    residual = repeats > 1 or (stage.stride == 1 and in_channels == out_channels)
    skip = stage.skips[codes[SKIP]] if residual else op.rules.adds_input
    return BlockDef(op.kind, repeats, op.kernel or stage.kernels[codes[KERNEL]], stage.stride, op.expansion,
                    out_channels, stage.ses[codes[SE]] if op.takes_se else 0.0, skip)


def _match_stages(coding: BlockCoding, architecture: Architecture) -> list[int]:
    """Codes of all stages."""
    all_codes: list[int] = []
    before = architecture.stem_width
    for index, (stage, defs) in enumerate(zip(coding.space.stages, architecture.block_defs(), strict=True)):
        channels = _index(architecture, f"stage{index}.channels", defs[-1].channels, stage.channels)
        codes = _match_stage(stage, defs, channels, before)
        if codes is None:
            raise _not_here(architecture, f"stage{index}", "+".join(map(str, defs)), "a choice of that stage")
        all_codes += codes
        before = defs[-1].channels
    return all_codes


def _match_stage(stage: StageDef, defs: Sequence[BlockDef], channels: int, before: int) -> list[int] | None:
    """Codes of one stage that give the same blocks as `defs` on `before` input channels, if there are any."""
    first, repeats = defs[0], sum(block.repeats for block in defs)
    wanted = blocks_of(defs, before, 1, "relu")
    for op_code, op in enumerate(stage.ops):
        if (op.kind, op.expansion, stage.stride) != (first.kind, first.expansion, first.stride):
            continue
        if not op.takes_repeats:
            return [op_code, 0, 0, 0, channels, 0]
        if repeats not in stage.repeats:
            continue
        for kernel, se, skip in product(range(len(stage.kernels) if op.takes_kernel else 1),
                                        range(len(stage.ses) if op.takes_se else 1), range(len(stage.skips))):
            codes = [op_code, kernel, se, skip, channels, stage.repeats.index(repeats)]
            if blocks_of([block_def(stage, tuple(codes), before, defs[-1].channels)], before, 1, "relu") == wanted:
                return codes
    return None


def _index(architecture: Architecture, name: str, value: Any, choices: Sequence[Any]) -> int:
    if value not in choices:
        raise _not_here(architecture, name, value, " or ".join(map(str, choices)))
    return choices.index(value)


def _not_here(architecture: Architecture, name: str, value: Any, rule: Any) -> SpaceError:
    return SpaceError(f"architecture {architecture.id} is not of this space: {name} is {value}, not {rule}.")
