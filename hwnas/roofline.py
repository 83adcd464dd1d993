"""Command: the roofline picture of a space's blocks on this host."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import names_in, run_command
from hwnas.cli.options import number
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.target.target import Target

if TYPE_CHECKING:
    from hwnas.latency.deployment import Deployment
    from hwnas.latency.roofline import BlockTime
    from hwnas.latency.roofline_report import Roofline
    from hwnas.latency.roofs import Roofs
    from hwnas.latency.table import LatencyTable
    from hwnas.space.blocks import BlockSpec
    from hwnas.space.search_space import SearchSpace

USAGE = """Arithmetic intensity of a space's blocks against the GFLOP/s that they reach, under measured roofs.

    python -m hwnas.roofline +target=xeon_int8 space=mnasnet_small against=xeon_fp32 out=runs/roofline.png"""


def main(config: Any, console: Console) -> None:
    """Measure the roofs, place the blocks of the latency tables under them; print, draw and store."""
    from hwnas.latency.deployment import Deployment, space_of
    from hwnas.latency.roofline import SOURCES

    out = out_path(str(config.out))
    if config.times not in SOURCES:
        raise UnknownName("source of times", config.times, SOURCES)
    seconds = float(number(config, "seconds", 1, 3600))
    deployment = Deployment.from_config(config, console)
    space = space_of(config)
    against = against_of(config, deployment.target)
    table = table_of(deployment, space)
    if table is None:
        raise MissingLatency(f"no latency table of {deployment.host_name} with networks of {space.name}. Measure it: "
                             f"{profile_command(config, deployment.target, space)}")
    other = table_of(replace(deployment, target=against), space) if against else None
    if against and other is None:
        console.say(f"{against.name} is left out: no table yet. Measure it: {profile_command(config, against, space)}")
    measured = [(deployment.target, table), *([(against, other)] if against and other else [])]
    roofs = measured_roofs(measured, seconds, console)
    found = roofline_of(config.times, space, (deployment.target, table), (against, other), roofs, console)
    finish(found, out, console)


def out_path(text: str) -> Path:
    """Where the picture goes; ConfigError when it is neither .png nor .svg."""
    out = Path(text)
    if out.suffix not in (".png", ".svg") or out.is_dir():
        raise ConfigError(f"out must be a .png or .svg file, got {text!r}: the numbers lie beside it as .json.")
    return out


def against_of(config: Any, target: Target) -> Target | None:
    """The target named by `against`, else the same runtime's fp32 (None for fp32 itself), threads and batch alike."""
    if config.against is not None:
        found = named_target(str(config.against))
    elif target.precision == "fp32":
        return None
    else:
        plain = [one for one in map(named_target, names_in("target")) if one.precision == "fp32"
                 and (one.runtime, one.device) == (target.runtime, target.device)]
        plain.sort(key=lambda one: one.vendor != target.vendor)
        if not plain:
            return None
        found = plain[0]
    found = replace(found, threads=target.threads, batch=target.batch)
    if (found.runtime, found.precision) == (target.runtime, target.precision):
        raise ConfigError(f"against={found.name} is {target.name} itself: both run {target.precision} by "
                          f"{target.runtime}. Choose another.")
    return found


def named_target(name: str) -> Target:
    """A target of conf/target by its name; UnknownName lists them."""
    from omegaconf import OmegaConf

    from hwnas.system.paths import config_dir

    if name not in names_in("target"):
        raise UnknownName("target", name, names_in("target"))
    return Target.from_config(OmegaConf.to_container(OmegaConf.load(config_dir() / "target" / f"{name}.yaml")))  # type: ignore[arg-type]


def table_of(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    """The table of a deployment, checked, or None where no network of the space was timed."""
    from hwnas.latency.deployment import key_of
    from hwnas.latency.table import find_table
    from hwnas.runtimes.runtime import load_runtime

    key = key_of(deployment, space)
    table = find_table(deployment.host_name, key)
    if table is None or space.name not in table.spaces():
        return None
    table.check(key, deployment.host_name, load_runtime(deployment.target.runtime).version())
    return table


def profile_command(config: Any, target: Target, space: SearchSpace) -> str:
    """What measures the table that is missing, for the same input."""
    parts = [f"python -m hwnas.profile +target={target.name} space={config.space}"]
    if config.image_size is not None:
        parts.append(f"image_size={config.image_size}")
    parts.append(f"channels={space.channels} classes={space.classes}")
    shipped = named_target(target.name) if target.name in names_in("target") else target
    parts += [f"target.{name}={getattr(target, name)}" for name in ("runtime", "precision", "threads", "batch")
              if getattr(target, name) != getattr(shipped, name)]
    return " ".join(parts)


def measured_roofs(targets: list[tuple[Target, LatencyTable]], seconds: float, console: Console) -> Roofs:
    """The roofs of the targets, measured now, beside the reference networks of their tables."""
    from hwnas.latency.roofs import Roofs, cache_bytes, measured_bandwidths, measured_peak
    from hwnas.runtimes.runtime import load_runtime, threads_of

    with console.step("measure bandwidth"):
        cache, memory = measured_bandwidths(threads_of(targets[0][0]), waiting=lambda: console.note(
            "waiting for another measurement on this host"))
    peaks = []
    for target, table in targets:
        with console.step(f"measure peak of {target.name}") as report:
            peaks.append(measured_peak(load_runtime(target.runtime), target, seconds=seconds, progress=report,
                                       reference=table.reference, quiet_ms=table.quiet_ms or None))
    return Roofs(tuple(peaks), cache, memory, cache_bytes(2), cache_bytes(3))


def roofline_of(source: str, space: SearchSpace, this: tuple[Target, LatencyTable],
                that: tuple[Target | None, LatencyTable | None], roofs: Roofs, console: Console) -> Roofline:
    """Blocks of both tables under the roofs; MissingLatency when the table holds no usable block time."""
    from hwnas.latency.roofline import points_of, ratios_of
    from hwnas.latency.roofline_report import Roofline

    (target, table), (against, other) = this, that
    times = block_times(source, table, space)
    points = points_of(times, target.precision, roofs, target.batch)
    if not points:
        raise MissingLatency(f"{table.path}: no block of {space.name} has a {source} time. Choose times=inferred, or "
                             "measure more: python -m hwnas.profile +target=… calibration.profiles=24 fresh=true")
    if len(points) < len(times):
        console.say(f"{len(times) - len(points)} of {len(times)} blocks of {target.name} are left out: their times "
                    "cannot be told from 0")
    others = points_of(block_times(source, other, space), against.precision, roofs,
                       target.batch) if against and other else []
    return Roofline(space.name, (target.name, against.name if against and other else ""),
                    (table.runtime_version, other.runtime_version if other else ""), source, table.host,
                    datetime.now(UTC).isoformat(timespec="seconds"), roofs, points, others, ratios_of(points, others))


def block_times(source: str, table: LatencyTable, space: SearchSpace) -> dict[BlockSpec, BlockTime]:
    """Times of the blocks of the table's networks, from the source asked for."""
    from hwnas.latency.prior import model_of
    from hwnas.latency.roofline import blocks_of, inferred_times, profiled_times

    if source == "profiled":
        return profiled_times(table.networks, space.name)
    return inferred_times(model_of(table, space)[0], blocks_of(table.networks, space.name))


def finish(found: Roofline, out: Path, console: Console) -> None:
    """Print the summary, write the picture and the file beside it."""
    import json

    from hwnas.latency.roofline_picture import roofline_figure
    from hwnas.latency.roofline_report import describe
    from hwnas.pictures.style import figure_bytes
    from hwnas.system.paths import write_atomic

    beside = out.with_suffix(".json")
    write_atomic(beside, json.dumps(found.to_dict(), indent=1))
    write_atomic(out, figure_bytes(roofline_figure(found), out.suffix[1:]))
    for line in ["", *describe(found), ""]:
        console.say(line)
    console.say(f"picture: {out}, numbers: {beside}")


if __name__ == "__main__":
    sys.exit(run_command(main, "roofline", USAGE))
