"""A network as it was seen to run once, and what is left of it when a part of it is cut.

A traced network is a list of operators. Each is in a stage and a block or in none, reads and writes channels of groups,
and has maps of a share of the image's side. Channels of a group stand and fall together, as those that a residual adds.
So numbers say what a cut keeps: of stages, of the blocks that may go in each run of alike ones, and of their channels
the share of the groups. Groups that are tied keep one share: the streams between blocks, and the insides of blocks,
each at one size of maps. All else follows, without the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from hwnas.space.architecture import WIDTH, Cut, Operator
from hwnas.space.blocks.block import round_to_divisor

DIVISOR = 8  # channels of a group that is cut: what kernels of the targets are made for
DEPTH = "depth"  # name of the number of stages that stay


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Channels that are cut together: how many the whole network has, and the `tie` whose share they keep."""

    name: str
    channels: int
    tie: str

    def kept(self, share: float) -> int:
        """Return the number of channels that stay with a share of the tie: a multiple of DIVISOR, or all if fewer."""
        return min(self.channels, round_to_divisor(self.channels * share, DIVISOR))


@dataclass(frozen=True, slots=True)
class TracedOperator:
    """A convolution or matrix product of the whole network.

    Attributes:
        stage: The stage that it is in, from 1 on; 0: before all stages; one more than there are: behind them.
        block: The block that it is in; empty: none that may go.
        role: As of the operators of a `Cut`.
        reads: Groups that it reads, with their channels there; "" names channels that never change.
        writes: The same that it writes.
        kernel: Side of its kernel.
        stride_in: Side of the image over that of the map that it reads; 0: a map of one pixel.
        stride_out: The same that it writes.
    """

    stage: int
    block: str
    role: str
    reads: tuple[tuple[str, int], ...]
    writes: tuple[tuple[str, int], ...]
    kernel: int
    stride_in: int
    stride_out: int


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Alike blocks one behind the other, of which the last ones may go: `blocks` names those that may, in order."""

    name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class TracedNetwork:
    """A network as it was seen to run.

    Attributes:
        around: The network, as `Architecture.around` names it.
        channels: Of its images.
        classes: That it knows.
        activation: That of its blocks.
        choices: Of each part that may be cut, by name, all that it may keep, the whole first: numbers of stages (DEPTH)
            or of the blocks of a run, and shares of a tie (WIDTH).
        runs: Runs of blocks.
        groups: Groups of channels.
        operators: In the order in which they run.
        stages: Modules, in their order, of which the last ones may go.
        writers: The layers that write each group, by its name.
        readers: In a transformer, the layer that alone reads each group, by its name.
        patch: Side of a transformer's patches, px; 0: it is none.
    """

    around: str
    channels: int
    classes: int
    activation: str
    choices: Mapping[str, tuple[float, ...]]
    runs: tuple[BlockRun, ...]
    groups: tuple[ChannelGroup, ...]
    operators: tuple[TracedOperator, ...]
    stages: tuple[str, ...]
    writers: Mapping[str, tuple[str, ...]]
    readers: Mapping[str, str]
    patch: int

    def make_cut(self, kept: Mapping[str, float], image_size: int) -> Cut:
        """Return the network of which so much is `kept`, by the names of `choices`; of all else, the whole.

        A part that changes nothing, as the blocks of a stage that is gone, is the least: so that a network is said in
        one way.
        """
        chosen = {name: of[of.index(kept.get(name, of[0]))] for name, of in self.choices.items()}
        operators = tuple(self.cut(chosen))
        for name, of in self.choices.items():
            if tuple(self.cut(least := {**chosen, name: of[-1]})) == operators:
                chosen = least
        return Cut.of(self.around, self.activation, chosen.items(), operators, image_size, self.channels, self.classes)

    def channels_of_groups(self, chosen: Mapping[str, Any]) -> dict[str, int]:
        """Return the channels that each group keeps whose share is chosen."""
        return {group.name: group.kept(chosen[name]) for group in self.groups
                if (name := WIDTH + group.tie) in chosen}

    def blocks_left_out(self, chosen: Mapping[str, Any]) -> set[str]:
        """Return the blocks that go, of the runs whose depths are chosen."""
        return {block for run in self.runs if run.name in chosen for block in run.blocks[int(chosen[run.name]):]}

    @cached_property
    def first_readers(self) -> dict[int, TracedOperator]:
        """Of each stage, and of what is behind them, the first operator that reads what the stage before it writes."""
        readers = dict[int, TracedOperator]()
        for each in self.operators:
            first = readers.setdefault(each.stage, each)
            if each.stage <= len(self.stages) and 0 < each.stride_in < first.stride_in:
                readers[each.stage] = each  # the first one is behind a pooling of the shortcut
        return readers

    @cached_property
    def outputs(self) -> dict[str, tuple[BlockRun, tuple[str, ...]]]:
        """Of each group that a block of a run writes, where no path leads around that block: the run, and the groups
        that are written by what stands before its blocks and by each of these. Without the block its readers read what
        the last one that is left writes."""
        last = {each.block: each for each in self.operators}
        before = {each.block: earlier for earlier, each in reversed([*pairwise(self.operators)])}  # of its first one
        groups = dict[str, tuple[BlockRun, tuple[str, ...]]]()
        for run in self.runs:
            if not run.blocks or run.blocks[0] not in before or not last.keys() >= {*run.blocks}:
                continue
            written = [each.writes[0][0] for each in (before[run.blocks[0]], *(last[block] for block in run.blocks))]
            if len({*written}) > 1 and all(written):
                groups |= {name: (run, tuple(written)) for name in written[1:]}
        return groups

    def _left(self, side: Sequence[tuple[str, int]], chosen: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        """Yield a side of an operator, with the groups that are there once blocks have gone."""
        for name, n in side:
            run, written = self.outputs.get(name, (None, ()))
            kept = int(chosen.get(run.name, len(run.blocks))) if run else 0
            yield (written[kept] if run and written.index(name) > kept else name), n

    def cut(self, chosen: Mapping[str, Any]) -> Iterator[Operator]:
        """Yield what is left of the operators, as a `Cut` lists them. A part that is not chosen stays whole."""
        whole = {group.name: group.channels for group in self.groups}
        kept, gone = self.channels_of_groups(chosen), self.blocks_left_out(chosen)
        n_stages = len(self.stages)
        depth = int(chosen.get(DEPTH, n_stages))
        for each in self.operators:
            if each.block in gone or depth < each.stage <= n_stages:
                continue
            reads, strides = each.reads, [each.stride_in, each.stride_out]
            if each.stage > n_stages > depth:  # behind the stages, it reads what the last one that is left writes
                last, left = self.first_readers[each.stage], self.first_readers[depth + 1]
                reads = left.reads if reads == last.reads else reads
                if last.stride_in:  # maps that the stages before made stay as they are
                    strides = [stride * left.stride_in // last.stride_in if stride >= last.stride_in else stride
                               for stride in strides]
            n_in, n_out = (sum(n * kept[name] // whole[name] if name in kept else n
                               for name, n in self._left(side, chosen)) for side in (reads, each.writes))
            yield each.block, each.role, n_in, n_out, each.kernel, strides[0], strides[1]
