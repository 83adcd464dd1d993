"""Deployment: a target on a host, with the table and the model that tell its latencies; and the calibration they need.

A calibration times whole networks of a space in waves until held-out ones are predicted well, and keeps wave by wave.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, Report
from hwnas.data.loading import inspect_dataset
from hwnas.errors import ConfigError, MeasurementInvalid, MissingLatency, UnknownName
from hwnas.latency.device import DeviceOptions
from hwnas.latency.held_out_networks import draw_front
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.model import LatencyModel, most_telling
from hwnas.latency.prior import FEW_NETWORKS, learnt_model, nearest_prior, stored_prior
from hwnas.latency.remote import RemoteDevice
from hwnas.latency.table import (
    LEAST_NETWORKS,
    LatencyTable,
    TableKey,
    TimedNetwork,
    find_table,
    known_hosts,
    table_path,
)
from hwnas.latency.timing import HERE, WAVE, Device, NetworkTimer, reference_network
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace, spread
from hwnas.system.documents import now
from hwnas.system.paths import check_home, hold, home
from hwnas.system.ssh import Address
from hwnas.target import Host, Target

if TYPE_CHECKING:
    from hwnas.latency.features import Prior
    from hwnas.latency.held_out_networks import LatencyMs
    from hwnas.runtimes.runtime import Runtime


Planned = list[tuple[str, Architecture]]  # origin (telling, known, extreme, random, front) and network
_SLICES = 12
_EXTREMES = 400
_TO_TELL = 300  # networks, of which the first wave are those that tell most beside a prior


class TimingPlan:
    """Draws wave after wave and no network twice. The same seed, predictions and prior give the same waves.

    `prior`: what other machines' tables say; the first wave then tells how this one differs.
    """

    def __init__(self, space: SearchSpace, seed: int, held: set[str], prior: Prior | None = None) -> None:
        self.space, self.held, self._prior = space, set(held), prior
        self._rng = np.random.default_rng([seed, len(held)])
        self._first = self._opening()

    def wave(self, size: int, predict: LatencyMs | None) -> Planned:
        """`size` networks (fewer if the space ends): known and extreme ones first, then random and front ones by
        turns.

        `predict` (codes [n, p] -> latency_ms [n]) comes with the first model; until then none is of the front. If
        there is a prior, half of the first wave and more are telling ones.
        """
        most = size if self._prior is None else size // 2
        planned = [self._first.pop(0) for _ in range(min(most, len(self._first)))]
        wanted = size - len(planned)
        if self._prior is not None:
            planned += self._telling([network for _, network in planned], wanted, self._prior)
            self._prior = None
        if predict is not None and wanted > 1:
            planned += self._front(wanted // 2, predict)
        planned += self._random(size - len(planned))
        return planned

    def _opening(self) -> Planned:
        """The space's known networks, and the smallest and the largest of a sample."""
        planned: Planned = [("known", network) for network in self.space.known.values()]
        sample = sorted(self._draw(_EXTREMES), key=lambda network: network.macs)
        planned += [("extreme", network) for network in (sample[0], sample[-1])]
        return [(origin, network) for origin, network in planned if self._new(network)]

    def _telling(self, beside: list[Architecture], n: int, prior: Prior) -> Planned:
        """Those of a sample that tell most once the networks `beside` are known."""
        sample = [*beside, *{network.id: network for network in self._draw(_TO_TELL)
                             if network.id not in self.held}.values()]
        chosen = most_telling([network.blocks() for network in sample], prior, n, known=len(beside))
        return [("telling", sample[index]) for index in chosen if self._new(sample[index])]

    def _random(self, n: int) -> Planned:
        """Random networks, spread over the range of MACs: one from each of `n` slices of it."""
        if n <= 0:
            return []
        sample = self._draw(_SLICES * n)

        def new(part: np.ndarray) -> Architecture | None:
            drawn = (sample[int(row)] for row in self._rng.permutation(part))
            return next((network for network in drawn if self._new(network)), None)

        return [("random", network) for network in spread([network.macs for network in sample], n, new)]

    def _front(self, n: int, predict: LatencyMs) -> Planned:
        networks = draw_front(self.space, predict, self._rng, n, self.held)
        return [("front", network) for network in networks if self._new(network)]

    def _draw(self, n: int) -> list[Architecture]:
        return [self.space.decode(self.space.to_params(row)) for row in self.space.sample(self._rng, n)]

    def _new(self, network: Architecture) -> bool:
        new = network.id not in self.held
        self.held.add(network.id)
        return new


FEW_S = 150.0  # of a calibration: where it has less, its first wave is as small as a fit allows
LEAST_WAVE, LEAST_EACH_S = 4, 0.2  # networks of a wave, and seconds that each takes at least
EACH_S = 0.4  # of timing a network, at most, while others wait
LATE_EACH_S = 0.8  # of timing a network after the minutes, until there are enough: on a busy machine turns are slow
MOST_LATE = 2  # waves that are begun after the minutes for that
FRUITLESS = 3  # waves without one valid network, after which the machine is too restless
QUIET = 0.2  # quantile over waves of the reference's time: what the machine does when nobody disturbs it
QUICK_FOLDS = 3  # while measuring
REFIT = 1.3  # growth after which the model is fitted anew
MIN_FOR_GOAL = 150  # networks before a held-out error is believed


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The amount to measure: most networks of the space, most minutes, the seed.

    The calibration ends earlier when it predicts a share `goal_within_5` of held-out networks within 5 %.
    """

    networks: int = option(96, low=LEAST_NETWORKS, high=10_000, help="most networks of the space")
    minutes: float = option(1.5, low=0.05, high=1440, help="most minutes from start to end")
    goal_within_5: float = option(0.97, low=0, high=1, help="share of held-out networks predicted within 5 %")
    seed: int = option(20260, low=0)


def calibrate(target: Target, space: SearchSpace, runtime: Runtime, options: CalibrationOptions, console: Console,
              table: LatencyTable | None = None, *, fresh: bool = False, device: Device = HERE) -> LatencyTable:
    """Measure `space` on `device`, whose `runtime` it is, for `target` and save the table in the user's folder.

    Every finished wave is saved at once beside the table (`.partial.json`). The same call goes on from there, unless
    `fresh` starts anew. An existing table of the same key is extended: its networks are not timed again, whatever space
    they were drawn from. MeasurementInvalid when the machine was too restless to time enough networks.
    """
    runtime.check(target)
    check_home()
    device = device.for_target(target)
    host, notes = device.host, list[str]()
    key = TableKey.of(target, space.image_sizes, space.channels, space.classes)
    path = table_path(home() / "latency_tables", host.name, key)
    before = (len(table.networks), table.spent_s.get(space.name, 0.0)) if table else (0, 0.0)
    if fresh:
        partial_path(path).unlink(missing_ok=True)
    table = _resume(path, key, host, runtime, console) or table or LatencyTable(
        key, host.to_dict(), runtime.version(), now(), Protocol(),
        reference_network(space.channels, space.classes, max(space.image_sizes)), 0.0, device.overhead_ms())
    prior = None
    if before[0] < FEW_NETWORKS:
        prior, notes = nearest_prior(host.name, key, space)
    _Calibration(table, space, target, runtime, options, partial_path(path), console, before, device, prior).run()
    table.created, table.host = now(), host.to_dict()
    model, chosen = learnt_model(table, space, prior)
    notes += chosen
    for note in notes:
        console.note(note)
    table.error[space.name], table.learnt = model.error, {space.name: model.learnt.to_dict()}
    table.save(path)
    partial_path(path).unlink(missing_ok=True)
    return LatencyTable.load(path)  # as every later run will read it: times are rounded when stored


def partial_path(path: Path) -> Path:
    """Return the file in which an unfinished calibration keeps what it has measured."""
    return path.with_name(f"{path.name.removesuffix('.json')}.partial.json")


def _resume(path: Path, key: TableKey, host: Host, runtime: Runtime, console: Console) -> LatencyTable | None:
    if not partial_path(path).exists():
        return None
    table = LatencyTable.load(partial_path(path))
    table.check(key, host.name, runtime.version())
    console.note(f"going on with an unfinished calibration: {len(table.networks)} networks of {table.created}")
    return table


class _Calibration:
    """One run of waves; everything that is finished is in the table and in the partial file."""

    def __init__(self, table: LatencyTable, space: SearchSpace, target: Target, runtime: Runtime,
                 options: CalibrationOptions, partial: Path, console: Console, before: tuple[int, float],
                 device: Device, prior: Prior | None) -> None:
        self.device = device
        self.table, self.space, self.target, self.runtime = table, space, target, runtime
        self.options, self.partial, self.console = options, partial, console
        held = {network.architecture.id for network in table.networks}
        self.plan = TimingPlan(space, options.seed, held, None if held else prior)
        self.origins: dict[str, str] = {}
        self.n_before, self.spent_before_s = before  # networks and seconds that are not of this calibration
        self.n_left = options.networks - (len(table.networks) - self.n_before)
        self.late = 0  # waves begun after the minutes
        self.fruitless, self.reason = 0, ""  # waves in a row without a valid network, and why the last one was not
        self.predict: LatencyMs | None = None
        self.n_fitted = 0
        self.error: dict[str, float] = {}

    def run(self) -> None:
        start = time.monotonic()
        spent = self.table.spent_s.get(self.space.name, 0.0)
        deadline = start + self.options.minutes * 60 - (spent - self.spent_before_s)
        protocol = self.table.protocol
        with NetworkTimer(self.target, self.runtime, self.table.reference, protocol, device=self.device) as timer:
            with self.console.step("calibrate", deadline - start) as report:
                few = 60 * self.options.minutes < FEW_S
                self._prepare(timer, LEAST_NETWORKS + 2 if few else WAVE)
                seed, reached, began = self.options.seed, False, time.monotonic()
                while timer.waiting:
                    timer.wait_exported()
                    # What the exports of a wave took tells how many networks fit into the time that is left.
                    each_s = max((time.monotonic() - began) / max(1, timer.prepared), LEAST_EACH_S)
                    began = time.monotonic()
                    if not reached and (size := min(WAVE, int((deadline - began) / each_s))) >= LEAST_WAVE:
                        self._prepare(timer, size)
                    # While there are more networks to time, they tell more than narrower intervals of these.
                    most_s = EACH_S * timer.prepared if self.n_left > 0 else protocol.max_seconds
                    least_s = 1.0 if self._has_enough() else LATE_EACH_S * timer.prepared
                    timer.protocol = replace(protocol, max_seconds=max(min(most_s, deadline - began), least_s))
                    measurements = timer.time_next(seed=seed, timed=self._keep)
                    self._settle(measurements, timer)
                    self.table.spent_s[self.space.name] = spent + time.monotonic() - start
                    self.table.save(self.partial)
                    reached, seed = self._learn(report, deadline, start), seed + 1
                    if not timer.waiting and not self._has_enough() and self.late < MOST_LATE:
                        self.late += 1
                        self._prepare(timer, LEAST_NETWORKS)
            self.console.note(f"measured {timer.measuring_s:.0f} s of {time.monotonic() - start:.0f} s")
            for name, why in timer.failed.items():
                self.console.say(f"{name} left out: {why}")
        if not self._has_enough() and self.reason:
            raise self._too_restless(f"{self._n_networks()} networks of space {self.space.name} could be timed, and "
                                     f"{LEAST_NETWORKS} are needed")

    def _n_networks(self) -> int:
        return sum(network.space == self.space.name for network in self.table.networks)

    def _has_enough(self) -> bool:
        """Return whether a model can be fitted to what was timed."""
        return self._n_networks() >= LEAST_NETWORKS

    def _prepare(self, timer: NetworkTimer, size: int) -> None:
        """Plan a wave and start its export; do nothing where everything that was wanted is planned."""
        size = min(size, self.n_left)
        self.n_left -= size
        wave = self.plan.wave(size, self.predict) if size > 0 else []
        self.origins |= {network.id: origin for origin, network in wave}
        if wave:
            timer.prepare([network for _, network in wave])

    def _keep(self, architecture: Architecture, measurement: Measurement) -> None:
        if not measurement.valid:
            return
        self.table.networks.append(TimedNetwork(self.space.name, architecture, measurement,
                                                self.origins[architecture.id]))

    def _settle(self, measurements: dict[str, Measurement], timer: NetworkTimer) -> None:
        """Learn how quiet this host can be, and give up on a host that never is."""
        valid = [measurement for measurement in measurements.values() if measurement.valid]
        if valid and timer.is_apart:
            self.table.processes[self.space.name] = self.table.processes.get(self.space.name, 0) + 1
        self.fruitless = 0 if valid else self.fruitless + 1
        self.reason = next((measurement.reason for measurement in measurements.values() if not measurement.valid),
                           self.reason)
        if self.fruitless >= FRUITLESS:
            raise self._too_restless(f"{FRUITLESS} waves of networks could not be timed")
        times = [network.measurement.quiet_ms for network in self.table.networks]
        if times:
            self.table.quiet_ms = float(np.quantile(times, QUIET))

    def _too_restless(self, fact: str) -> MeasurementInvalid:
        return MeasurementInvalid(f"{fact}: {self.reason}. Stop what else runs here and give the command again; what "
                                  "was measured is kept.")

    def _learn(self, report: Report, deadline: float, start: float) -> bool:
        """Refit on the networks so far and report how good the model is. Returns whether the goal is met."""
        share = max(1 - max(deadline - time.monotonic(), 0) / max(deadline - start, 1e-9),
                    (len(self.table.networks) - self.n_before) / max(self.options.networks, 1))
        n = self._n_networks()
        if n >= max(2 * LEAST_NETWORKS, REFIT * self.n_fitted):
            model = LatencyModel.fit(self.table, self.space, folds=QUICK_FOLDS)
            self.n_fitted, self.error = n, model.error
            self.predict = lambda codes: model.predict(codes).mean
        known = (f", held-out error {self.error['mean_error']:.1%}, {self.error['within_5']:.0%} within 5 %"
                 if self.error else "")
        report(min(share, 1.0), f"{n} networks{known}")
        return n >= MIN_FOR_GOAL and self.error["within_5"] >= self.options.goal_within_5


def open_device(options: DeviceOptions, console: Console) -> Device:
    """The machine that the options name, connected; this one where they name none. ConfigError for a name that is none,
    DeviceError where it cannot be used."""
    if options.device is None:
        if options.device_name is not None:
            raise ConfigError("device_name goes with device=user@host. This machine is named by HWNAS_HOST=NAME.")
        return HERE
    return RemoteDevice(Address.read(options.device, options.device_python or "python3"), options.device_name, console)


@dataclass(frozen=True, slots=True)
class Deployment:
    """The machine on which networks shall run, called `host_name`. `at_hand`: that is `device`, this machine or one
    over ssh, so that it can be measured now."""

    target: Target
    host_name: str
    at_hand: bool
    device: Device = HERE

    @classmethod
    def of(cls, target: Target, wanted: str | None, console: Console, device: Device = HERE, *, anywhere: bool = False
           ) -> Deployment:
        """`target` on the host `wanted` (None: `device`, which is this machine unless the user named one). A host
        without a latency table is an error, unless `anywhere`. A CPU of another make than the target names only gets a
        note."""
        device = device.for_target(target)
        host = device.host
        wanted = wanted or host.name
        if wanted == host.name:
            if target.device == "cpu" and target.vendor and target.vendor != host.vendor:
                machine = "this host" if device.is_here else "the device"
                console.say(f"note: {target.name} names the CPU make {target.vendor}; {machine} is {host.cpu}. "
                            f"Every number will be of {host.name}.")
            return cls(target, host.name, True, device)
        if not device.is_here:
            raise ConfigError(f"the device is {host.name}, and host={wanted} is another. Leave host out; to name the "
                              f"device otherwise: device_name={wanted}")
        if not anywhere and wanted not in known_hosts():
            raise UnknownName("host", wanted, [*known_hosts(), host.name])
        console.say(f"note: searching for {wanted}, which is not this host: finalists stay unverified until "
                    "hwnas verify run=DIR is run over there.")
        return cls(target, wanted, False)


@dataclass(frozen=True)
class SpaceOptions:
    """The options that choose a target on a host, and a search space for images of a shape.

    `channels` and `classes` are the data set's where they are None, `image_size` is the space's.
    """

    target: Target
    host: str | None
    space: str
    dataset: dict[str, Any]
    channels: int | None = option(low=1, high=4)
    classes: int | None = option(low=2, high=1_000_000)
    image_size: int | None = option(low=8, high=4096)

    def deployment(self, console: Console) -> Deployment:
        """The target on the host; see `Deployment.of`."""
        return Deployment.of(self.target, self.host, console)

    def search_space(self) -> SearchSpace:
        """The search space, for images of that shape."""
        channels, classes = self.channels, self.classes
        if channels is None or classes is None:
            info = inspect_dataset(self.dataset)
            channels, classes = channels or info.channels, classes or info.classes
        return SearchSpace.load(self.space, channels=channels, classes=classes, image_size=self.image_size)


@dataclass(frozen=True)
class MeasuringOptions(SpaceOptions, DeviceOptions):
    """The same for a command that measures, here or on a device."""

    def deployment(self, console: Console) -> Deployment:
        """The target on the device, which is connected."""
        return Deployment.of(self.target, self.host, console, open_device(self, console))


@dataclass(frozen=True)
class ProfileOptions(MeasuringOptions):
    """Options of `conf/profile.yaml`."""

    fresh: bool = option()
    calibration: CalibrationOptions = option()


def latency_model(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console
                  ) -> tuple[LatencyTable, LatencyModel]:
    """The table of this deployment and space, and the model fitted on it.

    A host that is at hand is measured first where it has no table.
    """
    table = kept_table(deployment, space)
    if table is None or space.name not in table.spaces():
        if not deployment.at_hand:
            key = key_of(deployment, space)
            raise MissingLatency(
                f"no latency table of {deployment.host_name} for {key} with networks of {space.name}. Reach it over "
                "ssh: device=user@host. Or over there run "
                f"hwnas profile target={deployment.target.name} "
                f"space={space.name}, then copy "
                f"{table_path(Path('latency_tables'), deployment.host_name, key)} into {home()}.")
        table = _calibrate(deployment, space, options, console)
    about = f"({table.created}, {table.runtime_version}){_shared(deployment.device)}"
    console.note(f"latency table: {table.path} {about}")
    prior, notes = stored_prior(table, space)
    model = LatencyModel.fit(table, space, prior=prior)
    table.error[space.name] = model.error
    console.note(error_line(table, space))
    for note in notes:
        console.say(note)
    return table, model


def error_line(table: LatencyTable, space: SearchSpace) -> str:
    """Say in one line what a table's predictions are worth."""
    error = table.error[space.name]
    return (f"held-out error on {error['n']:.0f} networks: mean {error['mean_error']:.1%}, within 5 % "
            f"{error['within_5']:.0%}, within 10 % {error['within_10']:.0%}, Spearman {error['spearman']:.3f}, "
            f"90 % interval covers {error['coverage']:.0%} ({error['least_third_coverage']:.0%} in the third "
            f"of the latencies where it covers least) with median half-width {error['median_half_width']:.1%} "
            f"(noise of the same run: {error['noise_mean']:.1%})")


def key_of(deployment: Deployment, space: SearchSpace) -> TableKey:
    """The key of the table that a space needs on a deployment."""
    return TableKey.of(deployment.target, space.image_sizes, space.channels, space.classes)


def kept_table(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    """The table of this deployment and space, where there is one; TableError where it is of another runtime, unless its
    machine is not at hand."""
    key = key_of(deployment, space)
    table = find_table(deployment.host_name, key)
    if table is not None:
        runtime = deployment.device.runtime(deployment.target.runtime) if deployment.at_hand else None
        table.check(key, deployment.host_name, runtime.version() if runtime else None)
    return table


def _calibrate(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console,
               ) -> LatencyTable:
    """Measure the host, unless another process has done so while this process waited for it."""
    runtime = deployment.device.runtime(deployment.target.runtime)
    runtime.check(deployment.target)
    with calibration_lock(deployment.host_name, key_of(deployment, space), console):
        table = kept_table(deployment, space)
        if table is not None and space.name in table.spaces():
            return table
        console.say(f"calibrating {deployment.host_name} for {deployment.target.name} and space {space.name}: "
                    f"{options.networks} networks")
        return calibrate(deployment.target, space, runtime, options, console, table, device=deployment.device)


def profile(config: Config, console: Console) -> LatencyTable:
    """Measure a machine as `conf/profile.yaml` asks. Says where the table lies and how good its predictions are."""
    options = read_command(ProfileOptions, config)
    deployment, space = options.deployment(console), options.search_space()
    runtime = deployment.device.runtime(deployment.target.runtime)
    key = key_of(deployment, space)
    with calibration_lock(deployment.host_name, key, console):
        table = None if options.fresh else find_table(deployment.host_name, key)
        if table is not None:
            table.check(key, deployment.host_name, runtime.version())
        table = calibrate(deployment.target, space, runtime, options.calibration, console, table,
                          fresh=options.fresh, device=deployment.device)
    console.say(f"{table.path}: {len(table.networks)} networks{_shared(deployment.device)}")
    console.say(error_line(table, space))
    return table


def _shared(device: Device) -> str:
    """Return what to know of the name of another machine's table, unless the user gave one: twins have the same."""
    if device.is_here or device.host.given:
        return ""
    return (f"; any device with this CPU is {device.host.name} and shares this table: device_name=NAME keeps one of "
            "its own")


def calibration_lock(host_name: str, key: TableKey, console: Console) -> AbstractContextManager[bool]:
    """Allow one calibration of a table at a time; a second process says that it waits."""
    path = table_path(home() / "latency_tables", host_name, key).with_suffix(".lock")
    return hold(path, lambda: console.say(f"waiting for another calibration of {key}"))
