"""Which sub-networks a step trains: random ones, or a sandwich (Yu and Huang, ICCV 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hwnas.supernet.bank import extreme

if TYPE_CHECKING:
    from hwnas.architecture import Architecture
    from hwnas.space import SearchSpace
    from hwnas.space_def import Value


@dataclass(frozen=True)
class Step:
    """The networks of one step; with `distil`, all but the first learn the first one's answers."""

    networks: list[Architecture]
    distil: bool = False


def sandwich(space: SearchSpace, n_random: int, rng: np.random.Generator) -> Step:
    """The largest network of a random choice of operations, the smallest of the same one, and random networks."""
    settings = _settings(space, n_random + 1, rng)
    ends = [extreme(space, settings[0], pick) for pick in (max, min)]
    return Step([space.decode(setting) for setting in (*ends, *settings[1:])], distil=True)


def largest(space: SearchSpace, rng: np.random.Generator) -> Step:
    """The largest network of a random choice of operations, alone."""
    return Step([space.decode(extreme(space, _settings(space, 1, rng)[0], max))])


def uniform(space: SearchSpace, n_random: int, rng: np.random.Generator) -> Step:
    """Random networks."""
    return Step([space.decode(setting) for setting in _settings(space, n_random, rng)])


def _settings(space: SearchSpace, n: int, rng: np.random.Generator) -> list[dict[str, Value]]:
    return [dict(space.to_params(row)) for row in space.sample(rng, n)]
