"""Codes: the integers that say which network of a space is meant."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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

    takes_kernel: NDArray[np.bool_]  # by operation: the stage's kernel matters to it
    takes_se: NDArray[np.bool_]
    takes_repeats: NDArray[np.bool_]  # as does a residual
    several: NDArray[np.bool_]
    same: NDArray[np.bool_]
    sizes: tuple[int, ...]
    size_index: Codes
    radix: tuple[int, ...]


class BlockCoding:
    """The tables behind a space's codes."""

    def __init__(self, space: SpaceDef, channels: int, classes: int) -> None:
        self.space, self.channels, self.classes, self.fields = space, channels, classes, fields(space)
        self.image_sizes = space.image_sizes
        self.values = [space.stem_widths, *(stage.channels for stage in space.stages)]
        self._stages = self._stage_tables()
        self._head_sizes, self._head_size_index = self._sizes(len(space.stages))
        n_activations = len(space.activations)
        # A segment is what stands in one unit (stem, a stage, head) of a network. Its number is that of its digits.
        self._radices = [(len(space.image_sizes), len(self.values[0]), len(space.stem_strides), n_activations),
                         *(stage.radix for stage in self._stages),
                         (len(self._head_sizes), len(self.values[-1]), n_activations, len(space.heads))]
        self._offsets = np.concatenate([[0], np.cumsum([prod(radix) for radix in self._radices])]).astype(np.int64)
        self.n_segments = int(self._offsets[-1])

    def _sizes(self, index: int) -> tuple[tuple[int, ...], Codes]:
        """Map sizes that stage `index` may read, and their index by [image size code, stem stride code]."""
        table = -(-np.array(self.image_sizes)[:, None] // np.array(self.space.stem_strides))
        for stage in self.space.stages[:index]:
            table = -(-table // stage.stride)
        sizes = np.unique(table)
        return tuple(int(s) for s in sizes), np.searchsorted(sizes, table).astype(np.int64)

    def _stage_tables(self) -> list[_Stage]:
        tables = []
        for index, stage in enumerate(self.space.stages):
            sizes, size_index = self._sizes(index)
            before, here = np.array(self.values[index]), np.array(self.values[index + 1])
            tables.append(_Stage(
                np.array([op.kernel is None for op in stage.ops]), np.array([op.rules.takes_se for op in stage.ops]),
                np.array([not op.rules.vanishes for op in stage.ops]), np.array(stage.repeats) > 1,
                (before[:, None] == here[None, :]) & (stage.stride == 1), sizes, size_index,
                (len(sizes), len(self.space.activations), len(before), len(here), len(stage.ops), len(stage.kernels),
                 len(stage.ses), len(stage.skips), len(stage.repeats))))
        return tables

    def content(self) -> dict[str, Any]:
        """Return what tells the space from others, with two options that spaces once had and their values then."""
        return {"definition": {**asdict(self.space), "widths": [1.0], "divisor": 8}}

    def canonical(self, full: Codes) -> Codes:
        """Codes in which fields that change nothing are 0. Networks with equal rows are equal; few others are."""
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
        return np.ascontiguousarray(columns.T)

    def architecture(self, full: Codes) -> Architecture:
        """The network of one row."""
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
        digits: list[tuple[Codes, ...]] = [(image, here, stride, activation)]
        for index, table in enumerate(self._stages):
            op, kernel, se, skip, channels, repeats = columns[_first(index):_first(index + 1)]
            before, here = here, channels
            digits.append((table.size_index[image, stride], activation, before, here, op, kernel, se, skip, repeats))
        digits.append((self._head_size_index[image, stride], here, activation, columns[HEAD]))
        return np.stack([offset + np.ravel_multi_index(each, radix) for offset, each, radix
                         in zip(self._offsets[:-1], digits, self._radices, strict=True)], axis=1)

    def segment_blocks(self, segment: int) -> tuple[BlockSpec, ...]:
        """The blocks of one segment id; IndexError for another number."""
        if not 0 <= segment < self.n_segments:
            raise IndexError(f"segment {segment} is not in 0 .. {self.n_segments - 1}")
        space, unit = self.space, int(np.searchsorted(self._offsets, segment, side="right")) - 1
        digits = [int(digit) for digit in np.unravel_index(segment - self._offsets[unit], self._radices[unit])]
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


def block_def(stage: StageDef, codes: tuple[int, ...], in_channels: int, out_channels: int) -> BlockDef:
    """One stage's string from its codes (in the order of `reading.FIELDS`); unused parts have timm's default form."""
    op, repeats = stage.ops[codes[OP]], stage.repeats[codes[REPEATS]]
    if op.rules.vanishes:  # it comes once
        return BlockDef(op.kind, 1, 1, stage.stride, 1.0, out_channels, 0.0, False)
    residual = repeats > 1 or (stage.stride == 1 and in_channels == out_channels)
    skip = stage.skips[codes[SKIP]] if residual else op.rules.adds_input
    return BlockDef(op.kind, repeats, op.kernel or stage.kernels[codes[KERNEL]], stage.stride, op.expansion,
                    out_channels, stage.ses[codes[SE]] if op.rules.takes_se else 0.0, skip)
