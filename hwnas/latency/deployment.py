"""Deployment: a target on a host, with the table and the model that tell its latencies."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.calibrate import CalibrationOptions
from hwnas.latency.table import LatencyTable, TableKey, find_table, known_hosts, table_path
from hwnas.system.paths import hold, home
from hwnas.target import Host, Target

if TYPE_CHECKING:
    from hwnas.latency.model import LatencyModel
    from hwnas.space.search_space import SearchSpace


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where networks shall run. `here`: this is that machine, so that it can be measured now."""

    target: Target
    host_name: str
    here: bool

    @classmethod
    def of(cls, target: Target, wanted: str | None, console: Console) -> Deployment:
        """`target` on the host `wanted` (None: this one). An unknown host is an error. A CPU of another make than the
        target names only gets a note."""
        host = Host.detect()
        wanted = wanted or host.name
        if wanted == host.name:
            if target.device == "cpu" and target.vendor and target.vendor != host.vendor:
                console.say(f"note: {target.name} names the CPU make {target.vendor}; this host is {host.cpu}. "
                            f"Every number will be of {host.name}.")
            return cls(target, host.name, True)
        if wanted not in known_hosts():
            raise UnknownName("host", wanted, [*known_hosts(), host.name])
        console.say(f"note: searching for {wanted}, which is not this host: finalists stay unverified until "
                    "python -m hwnas.verify run=DIR is run over there.")
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
        from hwnas.data.loading import inspect_dataset
        from hwnas.space.search_space import SearchSpace

        channels, classes = self.channels, self.classes
        if channels is None or classes is None:
            info = inspect_dataset(self.dataset)
            channels, classes = channels or info.channels, classes or info.classes
        return SearchSpace.load(self.space, channels=channels, classes=classes, image_size=self.image_size)


@dataclass(frozen=True)
class ProfileOptions(SpaceOptions):
    """Options of `conf/profile.yaml`."""

    fresh: bool = option()
    calibration: CalibrationOptions = option()


def latency_model(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console,
                  ) -> tuple[LatencyTable, LatencyModel]:
    """The table of this deployment and space, and the model fitted on it.

    This host is measured first where it has no table.
    """
    from hwnas.latency.prior import model_of

    table = _find(deployment, space)
    if table is None or space.name not in table.spaces():
        if not deployment.here:
            key = key_of(deployment, space)
            raise MissingLatency(
                f"no latency table of {deployment.host_name} for {key} with networks of {space.name}. Over there run "
                f"python -m hwnas.profile +target={deployment.target.name} space={space.name}, then copy "
                f"{table_path(Path('latency_tables'), deployment.host_name, key)} into {home()}.")
        table = _calibrate(deployment, space, options, console)
    console.note(f"latency table: {table.path} ({table.created}, {table.runtime_version})")
    console.note(error_line(table, space))
    model, notes = model_of(table, space)
    for note in notes:
        console.say(note)
    return table, model


def error_line(table: LatencyTable, space: SearchSpace) -> str:
    """What a table's predictions are worth, in one line."""
    error = table.error.get(space.name)
    if not error:
        raise ConfigError(f"{table.path}: no held-out error for space {space.name}. "
                          "Measure anew: python -m hwnas.profile +target=… fresh=true")
    return (f"held-out error on {error['n']:.0f} networks: mean {error['mean_error']:.1%}, within 5 % "
            f"{error['within_5']:.0%}, within 10 % {error['within_10']:.0%}, Spearman {error['spearman']:.3f}, "
            f"90 % interval covers {error['coverage']:.0%} with median half-width {error['median_half_width']:.1%} "
            f"(noise of the same run: {error['noise_mean']:.1%})")


def key_of(deployment: Deployment, space: SearchSpace) -> TableKey:
    """The key of the table that a space needs on a deployment."""
    return TableKey.of(deployment.target, space.image_sizes, space.channels, space.classes)


def _find(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    key = key_of(deployment, space)
    table = find_table(deployment.host_name, key)
    if table is not None:
        table.check(key, deployment.host_name, _version_here(deployment))
    return table


def _calibrate(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console,
               ) -> LatencyTable:
    """Measure this host, unless another process has done so while this process waited for it."""
    from hwnas.latency.calibrate import calibrate
    from hwnas.runtimes.runtime import load_runtime

    runtime = load_runtime(deployment.target.runtime)
    runtime.check(deployment.target)
    with calibration_lock(deployment.host_name, key_of(deployment, space), console):
        table = _find(deployment, space)
        if table is not None and space.name in table.spaces():
            return table
        console.say(f"calibrating {deployment.host_name} for {deployment.target.name} and space {space.name}: "
                    f"{options.networks} networks")
        return calibrate(deployment.target, space, runtime, options, console, table)


def profile(config: Config, console: Console) -> LatencyTable:
    """Measure this host as `conf/profile.yaml` asks. Says where the table lies and how good its predictions are."""
    from hwnas.latency.calibrate import calibrate
    from hwnas.runtimes.runtime import load_runtime

    options = read_command(ProfileOptions, config)
    deployment, space = options.deployment(console), options.search_space()
    runtime = load_runtime(deployment.target.runtime)
    key = key_of(deployment, space)
    with calibration_lock(deployment.host_name, key, console):
        table = None if options.fresh else find_table(deployment.host_name, key)
        if table is not None:
            table.check(key, deployment.host_name, runtime.version())
        table = calibrate(deployment.target, space, runtime, options.calibration, console, table,
                          fresh=options.fresh)
    console.say(f"{table.path}: {len(table.networks)} networks")
    console.say(error_line(table, space))
    return table


def calibration_lock(host_name: str, key: TableKey, console: Console) -> AbstractContextManager[bool]:
    """Allow one calibration of a table at a time; a second process says that it waits."""
    path = table_path(home() / "latency_tables", host_name, key).with_suffix(".lock")
    return hold(path, lambda: console.say(f"waiting for another calibration of {key}"))


def _version_here(deployment: Deployment) -> str | None:
    """The runtime's version where the target is this machine; elsewhere the version in the table counts."""
    if not deployment.here:
        return None
    from hwnas.runtimes.runtime import load_runtime

    return load_runtime(deployment.target.runtime).version()
