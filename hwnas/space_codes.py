"""Many architectures as one integer array: canonical codes, segments, and how many networks there are.

A row holds one code a field: six fields of the whole network, then six of each stage (`space_def.fields`), fixed
fields included with code 0. All functions here are vectorised over rows; `space.py` hides the fixed fields.
A *segment* is the stem, one stage in its context (input size, channels, activation) or the head: a network's
blocks are those of its segments, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwnas.architecture import Architecture, BlockDef
from hwnas.blocks import BlockSpec
from hwnas.space_def import SpaceDef, StageDef

Codes = NDArray[np.int64]
IMAGE_SIZE, WIDTH, STEM_WIDTH, STEM_STRIDE, ACTIVATION, HEAD = range(6)
OP, KERNEL, SE, SKIP, CHANNELS, REPEATS = range(6)


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


class Coding:
    """The tables behind a space's codes."""

    def __init__(self, space: SpaceDef, channels: int, classes: int) -> None:
        self.space, self.channels, self.classes = space, channels, classes
        options: list[tuple[int, ...]] = [space.stem_widths, *(stage.channels for stage in space.stages)]
        reached = [np.array([[space.scaled(c, w) for c in unit] for w in space.widths]) for unit in options]
        self.values = [tuple(int(v) for v in np.unique(table)) for table in reached]
        self.value_index = [np.searchsorted(v, table) for v, table in zip(self.values, reached, strict=True)]
        self._first_code = [_first_codes(index, len(v)) for index, v in zip(self.value_index, self.values, strict=True)]
        self._stages = self._stage_tables()
        radices: list[tuple[int, ...]] = [
            (len(space.image_sizes), len(self.values[0]), len(space.stem_strides), len(space.activations))]
        radices += [stage.radix for stage in self._stages]
        sizes, self._head_size_index = self._sizes(len(space.stages))
        self._head_sizes = sizes
        radices.append((len(sizes), len(self.values[-1]), len(space.activations), len(space.heads)))
        self._radices = radices
        self.offsets = np.concatenate([[0], np.cumsum([int(np.prod(r)) for r in radices])]).astype(np.int64)
        self.runs = self._id_runs()

    @property
    def n_segments(self) -> int:
        """Segment ids are 0 .. n_segments - 1."""
        return int(self.offsets[-1])

    def _sizes(self, index: int) -> tuple[tuple[int, ...], Codes]:
        """Map sizes that stage `index` may read, and their index by [image size code, stem stride code]."""
        space = self.space

        def size(image: int, stride: int) -> int:
            for step in (stride, *(stage.stride for stage in space.stages[:index])):
                image = -(-image // step)
            return image

        table = np.array([[size(image, stride) for stride in space.stem_strides] for image in space.image_sizes])
        found = np.unique(table)
        return tuple(int(s) for s in found), np.searchsorted(found, table).astype(np.int64)

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
        """Neighbouring stages of equal choices in which `id` changes nothing: their order makes no difference there."""
        runs: list[list[int]] = []
        for index, stage in enumerate(self.space.stages):
            before = self.space.stem_widths if index == 0 else self.space.stages[index - 1].channels
            if not (any(op.kind == "id" for op in stage.ops) and stage.stride == 1 and before == stage.channels):
                continue
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        return runs

    def canonical(self, full: Codes) -> Codes:
        """Codes in which equal networks are equal rows: inactive fields are 0, aliases take their first form."""
        columns = np.array(full.T, order="C")
        values = self._rewidth(columns)
        for index, table in enumerate(self._stages):
            stage = columns[6 * (index + 1):6 * (index + 2)]
            op = stage[OP]
            stage[KERNEL] *= table.takes_kernel[op]
            stage[SE] *= table.takes_se[op]
            stage[REPEATS] *= table.takes_repeats[op]
            residual = table.several[stage[REPEATS]] | table.same[values[index], values[index + 1]]
            stage[SKIP] *= residual & table.takes_repeats[op]
        for run in self.runs:
            if len(run) > 1:
                self._sort_run(columns, run)
        return np.ascontiguousarray(columns.T)

    def _rewidth(self, columns: Codes) -> list[Codes]:
        """Write width and channels in their first form; returns each unit's value index."""
        units = [columns[STEM_WIDTH], *(columns[6 * (i + 1) + CHANNELS] for i in range(len(self.space.stages)))]
        width = columns[WIDTH]
        values = [index[width, unit] for index, unit in zip(self.value_index, units, strict=True)]
        if len(self.space.widths) > 1:
            done = np.zeros(width.shape, dtype=bool)
            for code in range(len(self.space.widths)):
                found = [first[code, value] for first, value in zip(self._first_code, values, strict=True)]
                fits = ~done & np.all(np.stack(found) >= 0, axis=0)
                width[fits] = code
                for unit, replacement in zip(units, found, strict=True):
                    unit[fits] = replacement[fits]
                done |= fits
        return values

    def _sort_run(self, columns: Codes, run: list[int]) -> None:
        """Identities that change nothing go last."""
        block = columns[6 * (run[0] + 1):6 * (run[-1] + 2)].reshape(len(run), 6, -1)
        vanishes = ~self._stages[run[0]].takes_repeats[block[:, OP]]
        order = np.argsort(vanishes, axis=0, kind="stable")
        block[:] = np.take_along_axis(block, order[:, None, :], axis=0)

    def architecture(self, full: Codes) -> Architecture:
        """The network of one canonical row."""
        space, codes = self.space, [int(code) for code in full]
        units = [codes[STEM_WIDTH], *(codes[6 * (i + 1) + CHANNELS] for i in range(len(space.stages)))]
        widths = [self.values[i][self.value_index[i][codes[WIDTH], unit]] for i, unit in enumerate(units)]
        return Architecture(
            stages=tuple((str(block_def(stage, tuple(codes[6 * (i + 1):6 * (i + 2)]), widths[i], widths[i + 1])),)
                         for i, stage in enumerate(space.stages)),
            stem_width=widths[0], stem_stride=space.stem_strides[codes[STEM_STRIDE]], head=space.heads[codes[HEAD]],
            activation=space.activations[codes[ACTIVATION]], image_size=space.image_sizes[codes[IMAGE_SIZE]],
            channels=self.channels, classes=self.classes)

    def segments(self, full: Codes) -> Codes:
        """Segment ids [n, stages + 2] of canonical codes."""
        columns = np.ascontiguousarray(full.T)
        width, image, stride = columns[WIDTH], columns[IMAGE_SIZE], columns[STEM_STRIDE]
        activation = columns[ACTIVATION]
        here = self.value_index[0][width, columns[STEM_WIDTH]]
        found = [self._ravel(0, (image, here, stride, activation))]
        for index, table in enumerate(self._stages):
            op, kernel, se, skip, channels, repeats = columns[6 * (index + 1):6 * (index + 2)]
            before, here = here, self.value_index[index + 1][width, channels]
            found.append(self._ravel(index + 1, (
                table.size_index[image, stride], activation, before, here, op, kernel, se, skip, repeats)))
        found.append(self._ravel(len(self._stages) + 1, (
            self._head_size_index[image, stride], here, activation, columns[HEAD])))
        return np.stack(found, axis=1)

    def _ravel(self, unit: int, digits: tuple[Codes, ...]) -> Codes:
        number: Codes = np.full_like(digits[0], 0)
        for digit, base in zip(digits, self._radices[unit], strict=True):
            number = number * base + digit
        number += self.offsets[unit]
        return number

    def segment_blocks(self, segment: int) -> tuple[BlockSpec, ...]:
        """The blocks of one segment id; IndexError outside 0 .. n_segments - 1."""
        if not 0 <= segment < self.n_segments:
            raise IndexError(f"segment {segment} is not in 0 .. {self.n_segments - 1}")
        unit = int(np.searchsorted(self.offsets, segment, side="right")) - 1
        digits = [int(d) for d in np.unravel_index(segment - int(self.offsets[unit]), self._radices[unit])]
        space = self.space
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
        return tuple(block.blocks(in_channels, self._stages[unit - 1].sizes[size], space.activations[activation]))


def block_def(stage: StageDef, codes: tuple[int, ...], in_channels: int, out_channels: int) -> BlockDef:
    """One stage's string from its codes (in the order of `space_def.FIELDS`), unused parts in timm's default form."""
    op, repeats = stage.ops[codes[OP]], stage.repeats[codes[REPEATS]]
    if not op.takes_repeats:
        return BlockDef("id", 1, 1, stage.stride, 1.0, out_channels, 0.0, False)
    residual = repeats > 1 or (stage.stride == 1 and in_channels == out_channels)
    return BlockDef(
        op.kind, repeats, op.kernel or stage.kernels[codes[KERNEL]], stage.stride, op.expansion, out_channels,
        stage.ses[codes[SE]] if op.takes_se else 0.0, stage.skips[codes[SKIP]] if residual else op.kind != "cn")


def _first_codes(index: Codes, n_values: int) -> Codes:
    """[width code, value index] -> first channels code that gives the value there, -1 if none does."""
    first = np.full((index.shape[0], n_values), -1, dtype=np.int64)
    for code in reversed(range(index.shape[1])):
        first[np.arange(index.shape[0]), index[:, code]] = code
    return first
