"""Deployment: a target on a host, with the table and the model that tell its latencies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.command import number
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.host import Host
from hwnas.latency.locks import file_lock
from hwnas.latency.table import LatencyTable, TableKey, find_table, known_hosts, table_path
from hwnas.paths import home
from hwnas.progress import Console
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.latency.calibrate import CalibrationOptions
    from hwnas.latency.model import LatencyModel
    from hwnas.space import SearchSpace


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where networks shall run: `here` says whether that is this machine, so that it can be measured now."""

    target: Target
    host_name: str
    here: bool

    @classmethod
    def from_config(cls, config: Any, console: Console) -> Deployment:
        """Read `target` and `host`; an unknown host is an error, another make of CPU than the target names is said."""
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


def calibration_options(config: Any) -> CalibrationOptions:
    """The `calibration` section, checked."""
    from hwnas.latency.calibrate import CalibrationOptions
    from hwnas.latency.table import LEAST_NETWORKS

    return CalibrationOptions(number(config, "calibration.networks", LEAST_NETWORKS, 10_000, whole=True),
                              number(config, "calibration.profiles", 0, 10_000, whole=True),
                              float(number(config, "calibration.seconds", 1, 86_400)),
                              number(config, "calibration.seed", 0, whole=True))


def latency_model(deployment: Deployment, space: SearchSpace, options: CalibrationOptions, console: Console,
                  ) -> tuple[LatencyTable, LatencyModel]:
    """The table of this deployment and space, measured first where this host has none, and the model fitted on it."""
    from hwnas.latency.model import LatencyModel

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
    return table, LatencyModel.fit(table, space)


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
    """Measure this host, unless another process has done so while this one waited for it."""
    from hwnas.latency.calibrate import calibrate
    from hwnas.runtimes import load_runtime

    runtime = load_runtime(deployment.target.runtime)
    runtime.check(deployment.target)
    path = table_path(home() / "latency_tables", deployment.host_name, key_of(deployment, space))
    with file_lock(path.with_suffix(".lock"), lambda: console.say("waiting for another calibration of this host")):
        table = _find(deployment, space)
        if table is not None and space.name in table.spaces():
            return table
        console.say(f"calibrating {deployment.host_name} for {deployment.target.name} and space {space.name}: "
                    f"{options.networks} networks")
        return calibrate(deployment.target, space, runtime, options, console, table)


def _version_here(deployment: Deployment) -> str | None:
    """The runtime's version where the target is this machine; elsewhere the table's own is taken."""
    if not deployment.here:
        return None
    from hwnas.runtimes import load_runtime

    return load_runtime(deployment.target.runtime).version()
