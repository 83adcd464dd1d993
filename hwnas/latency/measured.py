"""Latencies of single networks. Each is timed on the deployment's machine when its latency is needed first.

A race needs the latencies of some dozens of networks. It times them, without a table of their space or a model
(docs/decisions/race-latencies.md). The timed networks are in a latency table of the run folder, which all processes of
the race share. Files have random weights, as in a calibration: a network is timed before it is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from hwnas.cli.progress import Console, Report
from hwnas.errors import CandidateError, MeasurementInvalid, StudyError
from hwnas.latency.deployment import Deployment, key_of
from hwnas.latency.measurement import Protocol
from hwnas.latency.model import Predictions
from hwnas.latency.table import LatencyTable, TimedNetwork
from hwnas.latency.timing import WAVE, reference_network, time_networks
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.documents import now

EACH_S = 0.5  # most seconds of timing a network
INVALID = "INVALID: "  # the prefix of a reason that is worth another timing
AGAIN = 3  # times EACH_S for each INVALID network, which is timed once more
POLL_S = 0.5  # seconds for which a process that is elsewhere waits

Answer = TypeVar("Answer")


class NotTimed(Exception):
    """Networks whose latency is needed were not timed yet: call `latency.time(networks)`."""

    def __init__(self, latency: MeasuredLatency, networks: Sequence[Architecture]) -> None:
        super().__init__(f"{len(networks)} networks were not timed yet")
        self.latency, self.networks = latency, networks


@dataclass
class MeasuredLatency:
    """The measured latencies of a space's networks on one deployment. It has the prediction methods of a LatencyModel.

    Attributes:
        path: The table in the run folder, which other processes write too.
        lock: A function that returns the lock under which networks are timed, by one process at a time.
        seed: The seed of the order of turns.
    """

    deployment: Deployment
    space: SearchSpace
    path: Path
    lock: Callable[[], AbstractContextManager[bool]]
    seed: int = 0
    table: LatencyTable = field(init=False)
    _written_ns: int = 0

    def __post_init__(self) -> None:
        if self.path.exists():
            self._read()
            deployment = self.deployment  # only a process at the machine knows the version
            version = deployment.device.runtime(deployment.target.runtime).version() if deployment.at_hand else None
            self.table.check(key_of(deployment, self.space), deployment.host_name, version,
                             "Go on with those, or begin a new search: out=FOLDER.")
        elif self.deployment.at_hand:
            space, device = self.space, self.deployment.device
            self.table = LatencyTable(
                key_of(self.deployment, space), device.host.to_dict(),
                device.runtime(self.deployment.target.runtime).version(), now(), Protocol(max_seconds=EACH_S),
                reference_network(space.channels, space.classes, max(space.image_sizes)), 0.0)
        else:
            raise StudyError(f"{self.path} is not there: no process at {self.deployment.host_name} has timed the "
                             "networks of this race yet. Start this one again in a minute.")

    def predict(self, codes: np.ndarray) -> Predictions:
        """Return latencies as `predict_architectures` does, for networks by their codes [n, p]."""
        return self.predict_architectures([self.space.decode(self.space.to_params(row)) for row in codes])

    def predict_architectures(self, architectures: Sequence[Architecture]) -> Predictions:
        """Return measured latencies in ms with their 90 % intervals; infinite for a network that cannot be timed.

        Raises:
            NotTimed: Some of them were not timed yet.
        """
        if self._missing(architectures):
            self._read()
        if missing := self._missing(architectures):
            raise NotTimed(self, missing)
        timed = {network.architecture.id: network.measurement for network in self.table.networks}
        ends = np.full((len(architectures), 3), np.inf)
        for row, network in zip(ends, architectures, strict=True):
            if network.id in timed:
                measurement = timed[network.id]
                row[:] = measurement.latency_ms, measurement.latency_ms_low, measurement.latency_ms_high
        return Predictions(*ends.T)

    def time(self, networks: Sequence[Architecture], report: Report) -> None:
        """Time the networks that were not timed yet, and save the table after each wave. A process that is not at the
        machine waits a moment for a process that is.

        Raises:
            MeasurementInvalid: A process that exported or timed them was ended.
        """
        if not self.deployment.at_hand:
            report(0.0, "waiting for the process that times networks")
            time.sleep(POLL_S)
            return
        with self.lock():
            self._read()
            missing = self._missing(networks)
            for start in range(0, len(missing), WAVE):
                if invalid := self._time(missing[start : start + WAVE], EACH_S, report):
                    self._time(invalid, AGAIN * EACH_S, report)
                self.table.save(self.path)
            self._read()  # as every other process reads it: times are rounded when stored

    def forget_invalid(self) -> None:
        """Remove INVALID timings, so that these networks are timed again: the machine may be quiet now."""
        with self.lock():
            self._read()
            if invalid := [id for id, reason in self.table.failed.items() if reason.startswith(INVALID)]:
                for id in invalid:
                    del self.table.failed[id]
                self.table.save(self.path)

    def _time(self, networks: Sequence[Architecture], each_s: float, report: Report) -> list[Architecture]:
        """Time a wave and put it into the table, or the reason for each network that cannot be timed. Return the
        networks whose timing is INVALID."""
        target, device, failed = self.deployment.target, self.deployment.device, dict[str, str]()
        protocol = Protocol(max_seconds=each_s * len(networks))
        try:
            timed = time_networks(networks, target, self.table.reference, protocol, seed=self.seed, progress=report,
                                  device=device, failed=failed)
        except MeasurementInvalid as error:  # a process was ended: by one of the networks, or by somebody
            if len(networks) > 1:
                return self._time_singly(networks, each_s, report, error)
            timed, failed = {}, {networks[0].id: f"{INVALID}{error}"}
        except CandidateError as error:  # none of them can be exported and compiled
            timed, failed = {}, {network.id: str(error) for network in networks}
        # A network is in `networks` of the table or, with its reason, in `failed`; the last timing counts.
        for network in networks:
            measurement = timed.get(network.id)
            self.table.failed.pop(network.id, None)
            if measurement is not None and measurement.valid:
                self.table.networks.append(TimedNetwork(self.space.name, network, measurement, "asked"))
            else:
                self.table.failed[network.id] = failed.get(network.id, "") if measurement is None else \
                    f"{INVALID}{measurement.reason}"
        return [network for network in networks if network.id in timed and not timed[network.id].valid]

    def _time_singly(self, networks: Sequence[Architecture], each_s: float, report: Report, error: MeasurementInvalid
                     ) -> list[Architecture]:
        """Time each network of a wave alone, so that a network that ends its process does not take others with it.
        Raise `error` if all of them end it: then the networks are not the cause."""
        invalid = [again for network in networks for again in self._time([network], each_s, report)]
        ended_ids = [network.id for network in networks if network not in invalid
                     and self.table.failed.get(network.id, "").startswith(INVALID)]
        if len(ended_ids) == len(networks):
            for id in ended_ids:
                del self.table.failed[id]
            raise error
        return invalid

    def _read(self) -> None:
        """Read the table if another process has written it since it was last read."""
        if self.path.exists() and (written_ns := self.path.stat().st_mtime_ns) != self._written_ns:
            self.table, self._written_ns = LatencyTable.load(self.path), written_ns

    def _missing(self, networks: Sequence[Architecture]) -> list[Architecture]:
        """Return the networks that have neither a time nor a reason, each once."""
        settled_ids = {network.architecture.id for network in self.table.networks} | {*self.table.failed}
        return [*{network.id: network for network in networks if network.id not in settled_ids}.values()]


def answered(ask: Callable[[], Answer], console: Console) -> Answer:
    """Return what `ask` returns, once the networks that it needs are timed."""
    while True:
        try:
            return ask()
        except NotTimed as untimed:
            with console.step(f"time {len(untimed.networks)} networks") as report:
                untimed.latency.time(untimed.networks, report)
