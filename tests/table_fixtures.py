"""A latency table of this host that nobody measured: for tests of what comes after a calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from hwnas.cli.command import compose
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable, TableKey, TimedNetwork, table_path
from hwnas.latency.timing import reference_network
from hwnas.runtimes.runtime import load_runtime
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host, Target

QUICK = Protocol(warmup_calls=1, round_ms=0.01, min_calls=1, max_calls=2, copies=1, min_rounds=1, max_rounds=3,
                 half_width=10.0, max_seconds=5.0)
QUIET_MS = 100.0  # a real run is faster than this, so that none looks slowed down


def block_ms(block: BlockSpec, depthwise: float = 4e-8) -> float:
    """A machine: a call and MACs by kind for each convolution, and what a network takes at its ends."""
    total = 0.005 if block.kind in ("stem", "head") else 0.0
    for role, n_in, n_out, kernel, _, out in block.convolutions():
        macs = (1 if role == "depthwise" else n_in) * n_out * kernel**2 * out**2
        total += 0.002 + macs * (depthwise if role == "depthwise" else 8e-9)
    return total


def made_up_ms(network: Architecture, depthwise: float = 4e-8) -> float:
    """What a network takes on that machine."""
    return sum(block_ms(block, depthwise) for block in network.blocks())


def sample_networks(space: SearchSpace, n: int, seed: int) -> list[Architecture]:
    """Different networks of a space."""
    rows = space.sample(np.random.default_rng(seed), 2 * n)
    return list({network.id: network for network in (space.decode(space.to_params(row)) for row in rows)}.values())[:n]


def measurement_of(ms: float, protocol: Protocol = QUICK) -> Measurement:
    """Twelve turns of about `ms` on a quiet machine."""
    return Measurement(tuple(Turn((ms * (1 + 0.001 * turn),), (100.0,)) for turn in range(12)), 0.1, protocol)


class MadeUpTimer:
    """Stands in for `time_networks`: remembers what it was asked for; may break off, leave networks out, or be restless
    while it times the first."""

    def __init__(self, breaks_after: int | None = None, invalid: int = 0, missing: int = 0) -> None:
        self.asked: list[str] = []
        self.breaks_after, self.invalid, self.missing = breaks_after, invalid, missing

    def __call__(self, networks: Sequence[Architecture], *given: object,
                 timed: Callable[[Architecture, Measurement], None] = lambda network, measured: None,
                 **options: object) -> dict[str, Measurement]:
        measurements = {}
        for index, network in enumerate(networks[self.missing :]):
            if index == self.breaks_after:
                raise KeyboardInterrupt
            self.asked.append(network.id)
            measured = self.measurement(network, index)
            measurements[network.id] = replace(measured, turns=()) if index < self.invalid else measured
            timed(network, measurements[network.id])
        return measurements

    def measurement(self, network: Architecture, index: int) -> Measurement:
        return measurement_of(made_up_ms(network))


def table_of(space: SearchSpace, networks: Iterable[Architecture], *, precision: str = "fp32", noise: float = 0.01,
             truth: Callable[[Architecture], float] = made_up_ms, name: str | None = None,
             protocol: Protocol | None = None) -> LatencyTable:
    """A table of this host for the null runtime: `truth` with this much noise, without a fit."""
    rng, protocol = np.random.default_rng(0), protocol or Protocol()
    timed = [TimedNetwork(name or space.name, network, measurement_of(
        truth(network) * float(np.exp(noise * rng.standard_normal())), protocol)) for network in networks]
    key = TableKey.of(Target("t", "null", precision), space.image_sizes, space.channels, space.classes)
    return LatencyTable(key, Host.detect().to_dict(), "null 1", "2026-01-01", protocol, space.reference, 0.1, timed,
                        spent_s={space.name: 60.0})


def machine_table(space: SearchSpace, n: int, *, precision: str = "fp32", speed: float = 1.0, depthwise: float = 4e-8,
                  seed: int = 1) -> LatencyTable:
    """A table of `n` networks on a machine that is as much slower."""
    return table_of(space, sample_networks(space, n, seed), precision=precision, noise=0.005, protocol=QUICK,
                    truth=lambda network: speed * made_up_ms(network, depthwise))


def write_table(home: Path, name: str, image_size: int | None = None, space_name: str = "mnasnet_small",
                classes: int = 10, host_name: str | None = None) -> Path:
    """Store, for the target `name` and a space on grey images, times of 24 networks that are sums over their
    convolutions; of this host, or of one that is called `host_name`.
    """
    table = copy(_table(name, image_size, space_name, classes))
    table.host = {**table.host, "name": host_name or table.host["name"]}
    path = table_path(home / "latency_tables", table.host_name, table.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path)
    return path


NEVER_OLD = "2100-01-01T00:00:00+00:00"  # a table of this session, for good: none of its networks is timed again


@cache
def _table(name: str, image_size: int | None, space_name: str, classes: int, n: int = 24) -> LatencyTable:
    target = Target.from_config(OmegaConf.to_container(compose("search", [f"target={name}"]).target))
    space = SearchSpace.load(space_name, channels=1, classes=classes, image_size=image_size)
    host, runtime = Host.detect(), load_runtime(target.runtime)
    networks = sample_networks(space, n, 1)
    protocol = Protocol()
    timed = []
    for network in networks:
        turns = [Turn((made_up_ms(network) * (1 + 0.001 * turn),), (1e3 * QUIET_MS,)) for turn in range(12)]
        timed.append(TimedNetwork(space.name, network, Measurement(tuple(turns), QUIET_MS, protocol)))
    key = TableKey.of(target, space.image_sizes, space.channels, space.classes)
    table = LatencyTable(key, host.to_dict(), runtime.version(), NEVER_OLD, protocol,
                         reference_network(space.channels, space.classes, max(space.image_sizes)), QUIET_MS, timed,
                         spent_s={space.name: 60.0})
    model = LatencyModel.fit(table, space)  # without a start from shipped tables, which would take as long again
    table.error[space.name], table.learnt = model.error, {space.name: model.learnt.to_dict()}
    return table
