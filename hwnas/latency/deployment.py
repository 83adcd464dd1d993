"""Deployment: a target on a host, with the table and the model that predict its latencies."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console
from hwnas.data.loading import inspect_dataset
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.calibration import CalibrationOptions, calibrate
from hwnas.latency.model import LatencyModel
from hwnas.latency.prior import stored_prior
from hwnas.latency.remote import RemoteDevice
from hwnas.latency.table import LatencyTable, TableKey, find_table, known_hosts, table_path
from hwnas.latency.timing import HERE, Device
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import hold, home
from hwnas.system.ssh import Address
from hwnas.target import Target

DEVICE = ("device", "device_python", "device_name")


@dataclass(frozen=True)
class DeviceOptions:
    """The options that name the machine to time networks on; None: this one.

    `device`: user@host, reached over ssh. `device_python`: the Python there that has the runtime.
    `device_name`: the name of its tables, if they shall not be named after its CPU.
    """

    device: str | None
    device_python: str | None
    device_name: str | None


def open_device(options: DeviceOptions, console: Console) -> Device:
    """Connect to the machine that the options name; return this machine if they name none. ConfigError for a name or an
    address that is not valid, DeviceError if the machine cannot be used."""
    if options.device is None:
        if options.device_name is not None:
            raise ConfigError("device_name goes with device=user@host. This machine is named by HWNAS_HOST=NAME.")
        return HERE
    return RemoteDevice(Address.read(options.device, options.device_python or "python3"), options.device_name, console)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A target on the machine `host_name`, on which networks shall run. `at_hand`: that machine is `device`, this one
    or one over ssh, so it can be measured now."""

    target: Target
    host_name: str
    at_hand: bool
    device: Device = HERE

    @classmethod
    def of(cls, target: Target, wanted: str | None, console: Console, device: Device = HERE, *, anywhere: bool = False
           ) -> Deployment:
        """Return `target` on the host `wanted` (None: `device`, which is this machine unless the user named one).

        If `wanted` is another host, it must have a latency table (UnknownName), unless `anywhere`, and `device` must be
        this machine (ConfigError). A CPU of another vendor than the target's is only noted, and so are more
        threads than cores."""
        device = device.for_target(target)
        host = device.host
        wanted = wanted or host.name
        if wanted == host.name:
            if target.device == "cpu" and target.vendor and target.vendor != host.vendor:
                console.say(f"note: {target.name} is called after CPUs of {target.vendor}, and runs as well on this "
                            f"{host.cpu}: every number is of {host.name}.")
            if target.threads > host.cores:
                console.remark(f"note: {target.name} has {target.threads} threads, for which {host.name} has "
                               f"{host.cores} cores. They wait for each other, and stops by a CPU quota are in p90 and "
                               "p99 alone.")
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
class MeasuringOptions(DeviceOptions):
    """The options of a command that measures: a target on this machine or a device, and a search space for images.

    If they are None, `channels` and `classes` are taken from the data set, and `image_size` from the space.
    """

    target: Target
    space: str
    dataset: dict[str, Any]
    channels: int | None = option(low=1, high=4)
    classes: int | None = option(low=2, high=1_000_000)
    image_size: int | None = option(low=8, high=4096)

    def deployment(self, console: Console) -> Deployment:
        """Connect to the device and return the target on it."""
        return Deployment.of(self.target, None, console, open_device(self, console))

    def search_space(self) -> SearchSpace:
        """Load the search space for images of that shape."""
        channels, classes = self.channels, self.classes
        if channels is None or classes is None:
            info = inspect_dataset(self.dataset)
            channels, classes = channels or info.channels, classes or info.classes
        return SearchSpace.load(self.space, channels=channels, classes=classes, image_size=self.image_size)


@dataclass(frozen=True)
class ProfileOptions(MeasuringOptions):
    """Options of `conf/profile.yaml`."""

    fresh: bool = option()
    calibration: CalibrationOptions = option()


def latency_model(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console
                  ) -> tuple[LatencyTable, LatencyModel]:
    """Return the table of this deployment and space, and the model fitted on it.

    If the table is missing or has no network of the space, a host that is at hand is measured first. For any other
    host, MissingLatency is raised.
    """
    table = kept_table(deployment, space)
    if table is None or space.name not in table.spaces():
        if not deployment.at_hand:
            key = key_of(deployment, space)
            raise MissingLatency(
                f"no latency table of {deployment.host_name} for {key} with networks of {space.name}. Reach it over "
                "ssh: device=user@host. Or over there run "
                f"hwnas profile target={deployment.target.name} "
                f"space={space.name} {key.images}, then copy "
                f"{table_path(Path('latency_tables'), deployment.host_name, key)} into {home()}.")
        table = measure_table(deployment, space, options, console)
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
    """Say in one line how good a table's predictions are."""
    error = table.error[space.name]
    return (f"held-out error on {error['n']:.0f} networks: mean {error['mean_error']:.1%}, within 5 % "
            f"{error['within_5']:.0%}, within 10 % {error['within_10']:.0%}, Spearman {error['spearman']:.3f}, "
            f"90 % interval covers {error['coverage']:.0%} ({error['least_third_coverage']:.0%} in the third "
            f"of the latencies where it covers least) with median half-width {error['median_half_width']:.1%}")


def key_of(deployment: Deployment, space: SearchSpace) -> TableKey:
    """Return the key of the table that a space needs on a deployment."""
    return TableKey.of(deployment.target, space.image_sizes, space.channels, space.classes)


def kept_table(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    """Return the table of this deployment and space, or None. TableError if it is of another version of the runtime,
    which is known only if the machine is at hand."""
    key = key_of(deployment, space)
    table = find_table(deployment.host_name, key)
    if table is not None:
        runtime = deployment.device.runtime(deployment.target.runtime) if deployment.at_hand else None
        table.check(key, deployment.host_name, runtime.version() if runtime else None)
    return table


def measure_table(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console, *,
                  extend: bool = False, fresh: bool = False) -> LatencyTable:
    """Measure a machine, unless its table has networks of the space already: another process may have measured it while
    this one waited. `extend` adds networks to such a table, `fresh` replaces it."""
    deployment.device.runtime(deployment.target.runtime).check(deployment.target)
    with calibration_lock(deployment.host_name, key_of(deployment, space), console):
        table = None if fresh else kept_table(deployment, space)
        if table is not None and space.name in table.spaces() and not extend:
            return table
        if not extend:  # nobody has asked for it
            console.say(f"calibrating {deployment.host_name} for {deployment.target.name} and space {space.name}: "
                        f"{options.networks} networks")
        return calibrate(deployment.target, space, deployment.device, options, console, table, fresh=fresh)


def profile(config: Config, console: Console) -> LatencyTable:
    """Measure a machine as `conf/profile.yaml` says, and say in which file its table is and how well it predicts."""
    options = read_command(ProfileOptions, config)
    deployment, space = options.deployment(console), options.search_space()
    table = measure_table(deployment, space, options.calibration, console, extend=True, fresh=options.fresh)
    console.say(f"{table.path}: {len(table.networks)} networks{_shared(deployment.device)}")
    console.say(error_line(table, space))
    return table


def _shared(device: Device) -> str:
    """Return a warning for a device that the user has not named, as its twins share its name and table; else empty."""
    if device.is_here or device.host.given:
        return ""
    return (f"; any device with this CPU is {device.host.name} and shares this table: device_name=NAME keeps one of "
            "its own")


def calibration_lock(host_name: str, key: TableKey, console: Console) -> AbstractContextManager[bool]:
    """Allow one calibration of a table at a time; a second process says that it waits."""
    path = table_path(home() / "latency_tables", host_name, key).with_suffix(".lock")
    return hold(path, lambda: console.say(f"waiting for another calibration of {key}"))
