"""A latency table with made-up times, for speed only: nothing here says how fast a network is."""

from __future__ import annotations

import numpy as np

from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.table import LatencyTable, TableKey, TimedNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.target import Target

TARGET = Target("null", "null", "int8")


def synthetic_table(space: SearchSpace, networks: int = 64) -> LatencyTable:
    """`networks` random networks of the space, timed at a nanosecond for a thousand MACs, give or take."""
    rng = np.random.default_rng(0)
    protocol = Protocol()
    plan = [space.decode(space.to_params(row)) for row in space.sample(rng, 2 * networks)]
    different = list({one.id: one for one in plan}.values())[:networks]
    key = TableKey.of(TARGET, space.image_sizes, space.channels, space.classes)
    return LatencyTable(key, {"name": "synthetic"}, "null 0", "2026-01-01T00:00:00+00:00", protocol, space.reference,
                        1.0, [_timed(space, one, protocol, rng) for one in different])


def _timed(space: SearchSpace, one: Architecture, protocol: Protocol, rng: np.random.Generator) -> TimedNetwork:
    blocks_ms = [(block.macs / 1e6 + 0.005) * float(rng.lognormal(0, 0.05)) for block in one.blocks()]
    turns = tuple(Turn((sum(blocks_ms) * float(rng.lognormal(0, 0.001)),), (100.0,)) for _ in range(12))
    return TimedNetwork(space.name, one, Measurement(turns, 0.1, protocol))
