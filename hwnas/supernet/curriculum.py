"""Which sub-networks a step trains: the largest first, then networks that leave its operations stage by stage.

Branches of different operations compute unrelated features at first, and a network that mixes them in every stage
learns next to nothing. So the largest network's operations are trained first, and then random networks keep them in all
but a growing number of stages: each branch learns to stand in for the largest's in a network that works. (Growing
freedom is Once-for-All's progressive shrinking, Cai et al., ICLR 2020, here over operations.) With them comes a
sandwich now and then (Yu and Huang, ICCV 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hwnas.supernet.bank import covering_settings, extreme

if TYPE_CHECKING:
    from hwnas.architecture import Architecture
    from hwnas.space import SearchSpace
    from hwnas.space_def import Value


@dataclass(frozen=True)
class Step:
    """The networks of one step; with `distil`, all but the first learn the first one's answers."""

    networks: list[Architecture]
    distil: bool = False


class Curriculum:
    """The steps of a training of `space`. `operations` are those of its largest network, by parameter."""

    def __init__(self, space: SearchSpace, n_random: int, sandwich: float, warmup: float, opening: float) -> None:
        self.space, self.n_random, self.sandwich = space, n_random, sandwich
        self.warmup, self.opening = warmup, opening
        self.largest = max(covering_settings(space), key=lambda setting: space.decode(setting).macs)
        self.operations = {name: value for name, value in self.largest.items() if name.endswith(".op")}

    def step(self, done: float, rng: np.random.Generator) -> Step:
        """The networks of a step when a share `done` of all steps is over."""
        if done < self.warmup:
            return self.warming(rng)
        return self.mixed(self.opened(done), rng) if rng.random() >= self.sandwich else self.sandwiched(done, rng)

    def opened(self, done: float) -> int:
        """In how many stages random networks have operations of their own."""
        n = len(self.space.definition.stages)
        share = (done - self.warmup) / self.opening if self.opening else 1.0
        return min(n, 1 + int(n * share))

    def warming(self, rng: np.random.Generator) -> Step:
        """The largest network, then a random one of its operations, so that its first channels matter most."""
        return Step([self.space.decode(self.largest), self._random(0, rng)], distil=True)

    def mixed(self, n_open: int, rng: np.random.Generator) -> Step:
        """Random networks that keep the largest's operations in all but `n_open` stages."""
        return Step([self._random(n_open, rng) for _ in range(self.n_random)])

    def sandwiched(self, done: float, rng: np.random.Generator) -> Step:
        """The largest network, the smallest of its operations and random ones, all of which learn its answers."""
        smallest = self.space.decode(extreme(self.space, self.largest, min))
        return Step([self.space.decode(self.largest), smallest, *self.mixed(self.opened(done), rng).networks],
                    distil=True)

    def _random(self, n_open: int, rng: np.random.Generator) -> Architecture:
        setting: Mapping[str, Value] = self.space.to_params(self.space.sample(rng, 1)[0])
        n = len(self.space.definition.stages)
        closed = {f"stage{stage}.op" for stage in rng.permutation(n)[n_open:]}
        kept = {name: value for name, value in self.operations.items() if name in closed}
        return self.space.decode({**setting, **kept})
