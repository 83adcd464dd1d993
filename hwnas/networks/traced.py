"""A network as it was recorded in one run: what of it may be cut, and what a choice leaves out.

Channels of a group must be cut together, as the channels that a residual adds. A cut is a set of numbers: how many
stages it keeps, how many blocks of each run of alike ones, and which share of the channels of each group. Groups with
one tie keep the same share: the streams between blocks, or the insides of blocks, at one size of maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hwnas.space.architecture import WIDTH, Operator
from hwnas.space.blocks.block import round_to_divisor

DIVISOR = 8  # of the channels of a group that is cut, because the targets' kernels are made for multiples of 8
DEPTH = "depth"  # name of the number of stages that stay


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """Channels that are cut together: their number in the whole network, and the `tie` that sets their share."""

    name: str
    channels: int
    tie: str

    def kept(self, share: float) -> int:
        """Return how many channels stay at this share of the tie: a multiple of DIVISOR, or all if that is more."""
        return min(self.channels, round_to_divisor(self.channels * share, DIVISOR))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Alike blocks in a row, of which the last ones may be removed. `blocks` names the removable ones, in order."""

    name: str
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class TracedNetwork:
    """A network as it was recorded in one run.

    Attributes:
        around: The network, as `Architecture.around` names it.
        channels: The number of channels of its images.
        classes: The number of classes that it predicts.
        activation: The activation of its blocks.
        choices: The values that each part may keep, by the part's name, the whole first: a number of stages (DEPTH), a
            number of blocks of a run, or a share of a tie (WIDTH).
        runs: The runs of blocks that may be removed.
        blocks: All blocks of the containers of these runs.
        groups: The groups of channels that may be cut.
        operators: The operators in the order in which they run.
        stages: Modules in order, each of which reads what the one before it writes.
        strides: For each stage, the side of the image divided by the side of the map that it writes.
        head: The choices (WIDTH and a tie) for the channels that are written behind the stages.
        writers: The layers that write each group, by the group's name.
        readers: In a transformer, the only layer that reads each group, by the group's name.
        patch: Side of a transformer's patches in px, 0 for other networks.
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
        """Return what each part keeps: what `kept` says, or the whole. A part without effect, as blocks of a removed
        stage, is set to its last choice, so that equal networks have equal choices."""
        chosen = {name: options[options.index(kept.get(name, options[0]))] for name, options in self.choices.items()}
        # Blocks: a run has no effect if its remaining blocks are all inside of removed stages.
        stages = self.stages_left_out(chosen)
        for run in self.runs:
            if run.name in chosen and all(is_inside(block, stages) for block in run.blocks[:int(chosen[run.name])]):
                chosen[run.name] = self.choices[run.name][-1]
        # Channels: a tie has no effect if its remaining groups are no wider than at the smallest share.
        removed_modules = [*stages, *self.blocks_left_out(chosen)]
        remaining_groups = [group for group in self.groups
                            if not all(is_inside(each, removed_modules) for each in self.writers[group.name])]
        for name, options in self.choices.items():
            if name.startswith(WIDTH) and all(group.kept(chosen[name]) == group.kept(options[-1])
                                              for group in remaining_groups if WIDTH + group.tie == name):
                chosen[name] = options[-1]
        return chosen

    def channels_of_groups(self, chosen: Mapping[str, Any]) -> dict[str, int]:
        """Return the number of channels that each group keeps, if a share is chosen for its tie."""
        return {group.name: group.kept(chosen[name]) for group in self.groups
                if (name := WIDTH + group.tie) in chosen}

    def stages_left_out(self, chosen: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the stages that are removed."""
        return self.stages[int(chosen.get(DEPTH, len(self.stages))):]

    def blocks_left_out(self, chosen: Mapping[str, Any]) -> list[str]:
        """Return the blocks that are removed, of the runs whose depths are chosen."""
        return [block for run in self.runs if run.name in chosen for block in run.blocks[int(chosen[run.name]):]]


def is_inside(module: str, outer: Iterable[str]) -> bool:
    """Return whether a module is one of the `outer` ones, or in one of them, by name."""
    return f"{module}.".startswith(tuple(f"{each}." for each in outer))
