"""Deployment: a target on a host, with the table and the model that tell its latencies."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import number, read_options
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.table import LatencyTable, TableKey, find_table, known_hosts, table_path
from hwnas.system.locks import hold
from hwnas.system.paths import home
from hwnas.target.host import Host
from hwnas.target.target import Target

if TYPE_CHECKING:
    from hwnas.latency.calibrate import CalibrationOptions
    from hwnas.latency.model import LatencyModel
    from hwnas.space.search_space import SearchSpace


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where networks shall run. `here`: this is that machine, so that it can be measured now."""

    target: Target
    host_name: str
    here: bool

    @classmethod
    def from_config(cls, config: Any, console: Console) -> Deployment:
        """Read `target` and `host`. An unknown host is an error. A CPU of another make than the target names only
        gets a note."""
        from omegaconf import OmegaConf

        target = Target.from_config(OmegaConf.to_container(config.target))  # type: ignore[arg-type]
        host = Host.detect()
        wanted = config.get("host") or host.name
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


def space_of(config: Any) -> SearchSpace:
    """The search space, for the channels and classes given or else of the data set."""
    from omegaconf import OmegaConf

    from hwnas.data.loading import inspect_dataset
    from hwnas.space.search_space import SearchSpace

    channels = number(config, "channels", 1, 4, whole=True, optional=True)
    classes = number(config, "classes", 2, 1_000_000, whole=True, optional=True)
    image_size = number(config, "image_size", 8, 4096, whole=True, optional=True)
    if channels is None or classes is None:
        info = inspect_dataset(OmegaConf.to_container(config.dataset, resolve=True))  # type: ignore[arg-type]
        channels, classes = channels or info.channels, classes or info.classes
    return SearchSpace.load(config.space, channels=channels, classes=classes, image_size=image_size)


def calibration_options(config: Any) -> CalibrationOptions:
    """The `calibration` section, checked."""
    from hwnas.latency.calibrate import CalibrationOptions

    return read_options(CalibrationOptions, config.calibration, "calibration")


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


def profile(config: Any, console: Console) -> LatencyTable:
    """Measure this host as `conf/profile.yaml` asks. Says where the table lies and how good its predictions are."""
    from hwnas.latency.calibrate import calibrate
    from hwnas.runtimes.runtime import load_runtime

    deployment = Deployment.from_config(config, console)
    options = calibration_options(config)
    space = space_of(config)
    runtime = load_runtime(deployment.target.runtime)
    key = key_of(deployment, space)
    with calibration_lock(deployment.host_name, key, console):
        table = None if config.fresh else find_table(deployment.host_name, key)
        if table is not None:
            table.check(key, deployment.host_name, runtime.version())
        table = calibrate(deployment.target, space, runtime, options, console, table, fresh=bool(config.fresh))
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
