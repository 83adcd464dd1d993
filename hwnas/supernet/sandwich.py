"""Which sub-networks a step trains: the sandwich rule (Yu and Huang, ICCV 2019) within one choice of branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hwnas.supernet.bank import extreme

if TYPE_CHECKING:
    from hwnas.architecture import Architecture
    from hwnas.space import SearchSpace


def sandwich(space: SearchSpace, n_random: int, rng: np.random.Generator) -> list[Architecture]:
    """The largest network of a random choice of operations, then the smallest and random ones.

    The smallest has the largest's operations; the random ones have their own, so that branches meet in every mixture.
    """
    rows = [space.to_params(row) for row in space.sample(rng, n_random + 1)]
    ends = [extreme(space, rows[0], pick) for pick in (max, min)]
    return [space.decode(setting) for setting in (*ends, *rows[1:])]


def largest(space: SearchSpace, rng: np.random.Generator) -> list[Architecture]:
    """The largest network of a random choice of operations, alone."""
    return sandwich(space, 0, rng)[:1]
