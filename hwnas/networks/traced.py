"""A network as it was seen to run once: what of it may be cut, and what a choice of that leaves out.

Channels of a group stand and fall together, as those that a residual adds. So numbers say what a cut keeps: of stages,
of the blocks that may go in each run of alike ones, and of their channels the share of the groups. Groups that are tied
keep one share: the streams between blocks, and the insides of blocks, each at one size of maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hwnas.space.architecture import WIDTH, Operator
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
        blocks: All blocks of their containers.
        groups: Groups of channels.
        operators: In the order in which they run.
        stages: Modules, in their order, each of which reads what the one before it writes.
        strides: Side of the image over that of the map that each stage writes.
        head: Ties of the channels that are written behind the stages.
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
    blocks: tuple[str, ...]
    groups: tuple[ChannelGroup, ...]
    operators: tuple[Operator, ...]
    stages: tuple[str, ...]
    strides: tuple[int, ...]
    head: tuple[str, ...]
    writers: Mapping[str, tuple[str, ...]]
    readers: Mapping[str, str]
    patch: int

    def choose(self, kept: Mapping[str, float]) -> dict[str, float]:
        """Return how much of each part stays: as `kept` says, and of all else the whole.

        A part that changes nothing, as the blocks of a stage that is gone, is the least: so that a network is said in
        one way.
        """
        chosen = {name: of[of.index(kept.get(name, of[0]))] for name, of in self.choices.items()}
        stages = self.stages_left_out(chosen)
        for run in self.runs:
            if run.name in chosen and all(is_inside(block, stages) for block in run.blocks[:int(chosen[run.name])]):
                chosen[run.name] = self.choices[run.name][-1]
        gone = [*stages, *self.blocks_left_out(chosen)]
        left = [group for group in self.groups if not all(is_inside(each, gone) for each in self.writers[group.name])]
        for name, of in self.choices.items():
            if name.startswith(WIDTH) and all(group.kept(chosen[name]) == group.kept(of[-1]) for group in left
                                              if WIDTH + group.tie == name):
                chosen[name] = of[-1]
        return chosen

    def channels_of_groups(self, chosen: Mapping[str, Any]) -> dict[str, int]:
        """Return the channels that each group keeps whose share is chosen."""
        return {group.name: group.kept(chosen[name]) for group in self.groups
                if (name := WIDTH + group.tie) in chosen}

    def stages_left_out(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the stages that go."""
        return self.stages[int(chosen.get(DEPTH, len(self.stages))):]

    def blocks_left_out(self, chosen: Mapping[str, Any]) -> list[str]:
        """Return the blocks that go, of the runs whose depths are chosen."""
        return [block for run in self.runs if run.name in chosen for block in run.blocks[int(chosen[run.name]):]]


def is_inside(module: str, outer: Iterable[str]) -> bool:
    """Return whether a module is one of the `outer` ones, or in one of them, by name."""
    return f"{module}.".startswith(tuple(f"{each}." for each in outer))
