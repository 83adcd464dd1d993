"""Calibration: whole networks of a space are timed in waves until held-out ones are predicted well.

Every finished wave is stored at once: a kill loses one wave at most.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.cli.options import option
from hwnas.cli.progress import Console, Report
from hwnas.errors import MeasurementInvalid
from hwnas.latency.draws import TimingPlan
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.model import LatencyModel
from hwnas.latency.prior import FEW_NETWORKS, nearest_prior
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TableKey, TimedNetwork, table_path
from hwnas.latency.timing import WAVE, Device, NetworkTimer, reference_network
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.documents import now
from hwnas.system.paths import check_home, home
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.latency.draws import LatencyMs

FEW_S = 150.0  # seconds of a calibration: if it has less, its first wave is as small as a fit allows
LEAST_WAVE, LEAST_EACH_S = 4, 0.2  # networks of a wave, and seconds that each is expected to take, at least
EACH_S = 0.4  # most seconds of timing a network while others wait
LATE_EACH_S = 0.8  # seconds for timing a network until there are enough, even late: on a busy machine turns are slow
MOST_LATE = 2  # waves that are started after the minutes if there are not enough networks yet
QUIET = 0.2  # quantile over networks of the reference's time in their waves: the speed of the undisturbed machine
QUICK_FOLDS = 3  # of cross-validation while measuring
REFIT = 1.3  # growth of the number of networks after which the model is fitted anew
GOAL_WITHIN_5, MIN_FOR_GOAL = 0.97, 150  # it ends with this share of held-out networks within 5 %, of so many or more


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The limits of a calibration, networks of the space and minutes, and its seed."""

    networks: int = option(96, low=LEAST_NETWORKS, high=10_000, help="most networks of the space")
    minutes: float = option(1.5, low=0.05, high=1440, help="most minutes from start to end")
    seed: int = option(20260, low=0)


def calibrate(target: Target, space: SearchSpace, device: Device, options: CalibrationOptions, console: Console,
              table: LatencyTable | None = None, *, fresh: bool = False) -> LatencyTable:
    """Measure `space` on `device` for `target` and save the table in the user's folder.

    Every finished wave is saved at once beside the table (`.partial.json`). The same call continues from there, unless
    `fresh` starts anew. An existing table of the same key is extended: its networks are not timed again, whatever space
    they were drawn from. MeasurementInvalid if the machine was too restless to time enough networks.
    """
    check_home()
    device, version = device.for_target(target), device.runtime(target.runtime).version()
    host, key = device.host, TableKey.of(target, space.image_sizes, space.channels, space.classes)
    path = table_path(home() / "latency_tables", host.name, key)
    partial = path.with_suffix(".partial.json")
    if fresh:
        partial.unlink(missing_ok=True)
    # Continue an unfinished calibration, extend the given table, or start an empty one.
    before = (len(table.networks), table.spent_s.get(space.name, 0.0)) if table else (0, 0.0)
    if partial.exists():
        table = LatencyTable.load(partial)
        table.check(key, host.name, version)
        console.note(f"going on with an unfinished calibration: {len(table.networks)} networks of {table.created}")
    elif table is None:
        table = LatencyTable(key, host.to_dict(), version, now(), Protocol(), reference_network(
            space.channels, space.classes, max(space.image_sizes)), 0.0)
    # Few networks need other tables as a prior: for the choice of an empty table's first wave, and in the final fit.
    prior, notes = nearest_prior(host.name, key, space) if before[0] < FEW_NETWORKS else (None, [])
    timed_ids = {network.architecture.id for network in table.networks}
    plan = TimingPlan(space, options.seed, timed_ids, None if timed_ids else prior)
    _Calibration(table, space, target, device, options, partial, console, before, plan).run()
    table.host = host.to_dict()  # the machine as it is now: a loaded table may be older
    if prior is not None and len(table.networks) < FEW_NETWORKS:
        notes.append(f"few networks: the fit starts from {len(prior.names)} other tables, the nearest is "
                     f"{prior.names[0]}")
    else:
        prior = None
    model = LatencyModel.fit(table, space, prior=prior)
    for note in notes:
        console.note(note)
    table.error[space.name], table.learnt = model.error, {space.name: model.learnt.to_dict()}
    table.save(path)
    partial.unlink(missing_ok=True)
    return LatencyTable.load(path)  # as every later run reads it: times are rounded when stored


class _Calibration:
    """A run of waves; everything that is finished is in the table and in the partial file. `before`: the number of
    networks in the table, and the seconds spent on the space, before this calibration was first started."""

    def __init__(self, table: LatencyTable, space: SearchSpace, target: Target, device: Device,
                 options: CalibrationOptions, partial: Path, console: Console, before: tuple[int, float],
                 plan: TimingPlan) -> None:
        self.table, self.space, self.target, self.device = table, space, target, device
        self.options, self.partial, self.console, self.plan = options, partial, console, plan
        self.planned: dict[str, tuple[str, Architecture]] = {}  # by id: origin and network
        self.n_before, self.spent_before_s = before
        self.n_left = options.networks - (len(table.networks) - self.n_before)
        self.late = 0  # waves started after the minutes
        self.reason = ""  # why the last INVALID network was INVALID
        self.predict: LatencyMs | None = None
        self.n_fitted = 0
        self.error: dict[str, float] = {}

    def run(self) -> None:
        start = time.monotonic()
        # The minutes count from the first start: a continued calibration has what is left of them.
        first_start = start - (self.table.spent_s.get(self.space.name, 0.0) - self.spent_before_s)
        deadline, protocol = first_start + self.options.minutes * 60, self.table.protocol
        with NetworkTimer(self.target, self.table.reference, protocol, device=self.device) as timer:
            with self.console.step("calibrate", deadline - start) as report:
                is_short = 60 * self.options.minutes < FEW_S
                self._prepare(timer, LEAST_NETWORKS + 2 if is_short else WAVE)
                seed, goal_reached, now_s = self.options.seed, False, time.monotonic()
                while timer.waves:
                    timer.wait_exported()
                    # The seconds since the last wave was exported say how many networks fit into the time that is left.
                    # The next wave is exported while this one is timed.
                    n, previous_s, now_s = len(timer.waves[0]), now_s, time.monotonic()
                    each_s = max((now_s - previous_s) / n, LEAST_EACH_S)
                    if not goal_reached and (size := min(WAVE, int((deadline - now_s) / each_s))) >= LEAST_WAVE:
                        self._prepare(timer, size)
                    # While networks are left to time, more of them improve a model more than narrower intervals do.
                    most_s = EACH_S * n if self.n_left > 0 else protocol.max_seconds
                    least_s = 1.0 if self._has_enough() else LATE_EACH_S * n
                    timer.protocol = replace(protocol, max_seconds=max(min(most_s, deadline - now_s), least_s))
                    self._keep(timer.time_next(seed=seed))
                    self.table.spent_s[self.space.name] = self.spent_before_s + time.monotonic() - first_start
                    self.table.save(self.partial)
                    goal_reached, seed = self._learn(report, deadline, start), seed + 1
                    # The time is over: a few more waves if a model cannot be fitted yet.
                    if not timer.waves and not self._has_enough() and self.late < MOST_LATE:
                        self.late += 1
                        self._prepare(timer, LEAST_NETWORKS)
            for name, why in timer.failed.items():
                self.console.say(f"{name} left out: {why}")
        if not self._has_enough() and self.reason:
            raise MeasurementInvalid(f"{self._n_networks()} networks of space {self.space.name} could be timed, and "
                                     f"{LEAST_NETWORKS} are needed: {self.reason}. Stop what else runs here and give "
                                     "the command again; what was measured is kept.")

    def _n_networks(self) -> int:
        return sum(network.space == self.space.name for network in self.table.networks)

    def _has_enough(self) -> bool:
        """Return whether a model can be fitted to the timed networks."""
        return self._n_networks() >= LEAST_NETWORKS

    def _prepare(self, timer: NetworkTimer, size: int) -> None:
        """Plan a wave of `size` networks at most and start its export; do nothing if none is left to plan."""
        size = min(size, self.n_left)
        self.n_left -= size
        wave = self.plan.wave(size, self.predict) if size > 0 else []
        self.planned |= {network.id: (origin, network) for origin, network in wave}
        if wave:
            timer.prepare([network for _, network in wave])

    def _keep(self, measurements: Mapping[str, Measurement]) -> None:
        """Put the valid measurements of a wave into the table, and update the table's quiet time of the reference."""
        valid = {name: measurement for name, measurement in measurements.items() if measurement.valid}
        for name, measurement in valid.items():
            origin, network = self.planned[name]
            self.table.networks.append(TimedNetwork(self.space.name, network, measurement, origin))
        if valid and self.target.device == "cpu":  # `NetworkTimer` times each wave in a process of its own
            self.table.processes[self.space.name] = self.table.processes.get(self.space.name, 0) + 1
        self.reason = next((each.reason for each in measurements.values() if not each.valid), self.reason)
        if self.table.networks:
            self.table.quiet_ms = float(np.quantile([each.measurement.quiet_ms for each in self.table.networks], QUIET))

    def _learn(self, report: Report, deadline: float, start: float) -> bool:
        """Fit again if the networks have grown enough, report the error, and return whether the goal is met."""
        # The share done: by time or by networks, whichever is larger.
        share = max(1 - max(deadline - time.monotonic(), 0) / max(deadline - start, 1e-9),
                    (len(self.table.networks) - self.n_before) / max(self.options.networks, 1))
        n = self._n_networks()
        if n >= max(2 * LEAST_NETWORKS, REFIT * self.n_fitted):
            model = LatencyModel.fit(self.table, self.space, folds=QUICK_FOLDS)
            self.n_fitted, self.error = n, model.error
            self.predict = lambda codes: model.predict(codes).mean
        quality = (f", held-out error {self.error['mean_error']:.1%}, {self.error['within_5']:.0%} within 5 %"
                   if self.error else "")
        report(min(share, 1.0), f"{n} networks{quality}")
        return n >= MIN_FOR_GOAL and self.error["within_5"] >= GOAL_WITHIN_5
