"""Codes: rows of integers, each of which names a network of a space."""

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
    """Return the column of a stage's first field."""
    return len(GLOBALS) + len(FIELDS) * stage


class _Stage(NamedTuple):
    """Look-up tables of one stage, indexed by its codes."""

    takes_kernel: NDArray[np.bool_]  # by operation: the stage's kernel has an effect
    takes_se: NDArray[np.bool_]  # by operation: squeeze-and-excite has an effect
    takes_repeats: NDArray[np.bool_]  # by operation: repeats and residual have an effect
    several: NDArray[np.bool_]  # by repeats: more than one
    same: NDArray[np.bool_]  # by channels before and here: the first block keeps the shape of its input
    sizes: tuple[int, ...]  # the map sizes that the stage may read
    size_index: Codes  # the index in `sizes`, by image size and stem stride
    radix: tuple[int, ...]  # the number of values of each digit of a segment


class BlockCoding:
    """The coding of a space of blocks: tables for the way from codes to networks and their segments."""

    def __init__(self, space: SpaceDef, channels: int, classes: int) -> None:
        self.space, self.channels, self.classes, self.fields = space, channels, classes, fields(space)
        self.image_sizes = space.image_sizes
        self.values = [space.stem_widths, *(stage.channels for stage in space.stages)]  # output widths of each unit
        self._stages = self._stage_tables()
        self._head_sizes, self._head_size_index = self._sizes(len(space.stages))
        n_activations = len(space.activations)
        # A segment is the content of one unit (stem, a stage, head) with the input that it reads. Its id is a number
        # whose digits are the choices that decide it, each with its own radix, plus the offset of the unit.
        self._radices = [(len(space.image_sizes), len(self.values[0]), len(space.stem_strides), n_activations),
                         *(stage.radix for stage in self._stages),
                         (len(self._head_sizes), len(self.values[-1]), n_activations, len(space.heads))]
        self._offsets = np.concatenate([[0], np.cumsum([prod(radix) for radix in self._radices])]).astype(np.int64)
        self.n_segments = int(self._offsets[-1])

    def _sizes(self, index: int) -> tuple[tuple[int, ...], Codes]:
        """Return the map sizes that stage `index` may read, and their index by [image size code, stem stride code]."""
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
        """Return the content that a space's fingerprint is made of. Two former options are in it, at fixed values."""
        return {"definition": {**asdict(self.space), "widths": [1.0], "divisor": 8}}

    def canonical(self, full: Codes) -> Codes:
        """Return codes in which fields without effect are 0. Equal rows are equal networks, other rows rarely."""
        columns = np.array(full.T, order="C")
        for index, table in enumerate(self._stages):
            stage = columns[_first(index):_first(index + 1)]
            op = stage[OP]
            stage[REPEATS] *= table.takes_repeats[op]
            stage[KERNEL] *= table.takes_kernel[op]
            stage[SE] *= table.takes_se[op]
            # A residual needs a block that keeps the shape: a repeated one, or a first one of equal width.
            before = columns[_first(index - 1) + CHANNELS] if index else columns[STEM_WIDTH]
            residual = table.several[stage[REPEATS]] | table.same[before, stage[CHANNELS]]
            stage[SKIP] *= residual & table.takes_repeats[op]
        return np.ascontiguousarray(columns.T)

    def architecture(self, full: Codes) -> Architecture:
        """Return the network of one row."""
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
        """Return the segment ids [n, stages + 2] of canonical codes."""
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
        """Return the blocks of one segment id. Raises IndexError for another number."""
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
    """Return a stage's string for its codes (in the order of `reading.FIELDS`). Unused parts have timm's defaults."""
    op, repeats = stage.ops[codes[OP]], stage.repeats[codes[REPEATS]]
    if op.rules.vanishes:  # it comes once
        return BlockDef(op.kind, 1, 1, stage.stride, 1.0, out_channels, 0.0, False)
    residual = repeats > 1 or (stage.stride == 1 and in_channels == out_channels)
    skip = stage.skips[codes[SKIP]] if residual else op.rules.adds_input
    return BlockDef(op.kind, repeats, op.kernel or stage.kernels[codes[KERNEL]], stage.stride, op.expansion,
                    out_channels, stage.ses[codes[SE]] if op.rules.takes_se else 0.0, skip)
