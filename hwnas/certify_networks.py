"""Which networks a certificate trains: one from each stretch of the space's costs, drawn by seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hwnas.architecture import Architecture
from hwnas.errors import ConfigError
from hwnas.space import SearchSpace
from hwnas.space_codes import Codes

SAMPLE = 4096
_STREAM = 0xCE57  # no other draw of the same seed


@dataclass(frozen=True, slots=True)
class Network:
    """One network, and what it costs: predicted latency in ms, or MACs."""

    architecture: Architecture
    cost: float

    @property
    def id(self) -> str:
        """The architecture's."""
        return self.architecture.id


def spread(space: SearchSpace, n: int, seed: int, costs: Callable[[Codes], NDArray[np.float64]]) -> list[Network]:
    """`n` different networks, cheapest first: SAMPLE settings sorted by cost, cut into `n` equal parts (so the first is
    the cheapest region, the last the dearest), one drawn from each. ConfigError when the space has fewer."""
    if space.n_architectures < n:
        raise ConfigError(f"n={n}: space {space.name} has {space.n_architectures} networks. Give a smaller n or a "
                          "larger space.")
    rng = np.random.default_rng([seed, _STREAM])
    codes = _different(space, n, rng)
    cost = np.asarray(costs(codes), np.float64)
    order = np.lexsort((*codes.T[::-1], cost))
    chosen = [int(rng.choice(part)) for part in np.array_split(order, n)]
    return [Network(space.decode(space.to_params(codes[row])), float(cost[row])) for row in chosen]


def macs_of(space: SearchSpace) -> Callable[[Codes], NDArray[np.float64]]:
    """Multiply-accumulates [n] of codes [n, p], from their segments."""
    def macs(codes: Codes) -> NDArray[np.float64]:
        segments = space.segments(codes)
        known = {int(one): sum(block.macs for block in space.segment_blocks(int(one))) for one in np.unique(segments)}
        return np.array([sum(known[int(one)] for one in row) for row in segments], np.float64)

    return macs


def _different(space: SearchSpace, n: int, rng: np.random.Generator) -> Codes:
    """Codes of at least `n` different networks: equal exactly where the networks are, so ids differ."""
    codes = np.unique(space.sample(rng, SAMPLE), axis=0)
    for _ in range(64):
        if len(codes) >= n:
            return codes
        codes = np.unique(np.concatenate([codes, space.sample(rng, SAMPLE)]), axis=0)
    raise ConfigError(f"n={n}: {len(codes)} different networks were found in space {space.name} by drawing settings. "
                      "Give a smaller n.")
