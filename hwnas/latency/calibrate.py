"""Calibration: times whole networks of a space on this host, profiles their blocks, and stores a table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.architecture import Architecture
from hwnas.errors import MeasurementInvalid
from hwnas.latency.host import Host, usable_cores
from hwnas.latency.measure import call_overhead_ms, measure
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.model import LatencyModel
from hwnas.latency.prepare import prepare_networks
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TableKey, TimedNetwork, table_path
from hwnas.paths import home
from hwnas.progress import Console
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.runtimes import Compiled, Runtime
    from hwnas.space import SearchSpace

PROFILE_REPEATS = 20


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How much to measure: whole networks, how many of them block by block, most seconds of timing, the seed."""

    networks: int = 96
    profiles: int = 12
    seconds: float = 45.0
    seed: int = 0


def calibrate(target: Target, space: SearchSpace, runtime: Runtime, options: CalibrationOptions, console: Console,
              table: LatencyTable | None = None) -> LatencyTable:
    """Measure `space` on this host for `target` and save the table in the user's folder.

    An existing table of the same key is extended: networks that it holds are not timed again, whatever space
    they were drawn from. MeasurementInvalid when the machine was too restless to time enough networks.
    """
    runtime.check(target)
    host = Host.detect()
    key = TableKey.of(target, space.image_sizes, space.channels, space.classes)
    held = {network.architecture.id for network in table.networks} if table else set()
    plan = [one for one in plan_networks(space, options) if one.id not in held]
    reference = table.reference if table else space.reference
    table = table or LatencyTable(key, host.to_dict(), runtime.version(), _now(), Protocol(), reference, 0.0, 0.0)
    table.overhead_ms = call_overhead_ms(lambda: None)
    with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:  # to the end: profiling may read the files again
        to_export = {one.id: one for one in [*plan, reference]}
        with console.step("export networks") as report:
            files = prepare_networks(list(to_export.values()), target, Path(folder), len(usable_cores()), report)
        compiled = _compile(files, target, runtime, console)
        _time(table, space.name, plan, compiled, options, console)
    table.created = _now()
    table.error[space.name] = LatencyModel.held_out_error(table, space)
    path = table_path(home() / "latency_tables", host.name, key)
    table.save(path)
    return LatencyTable.load(path)  # as every later run will read it: times are rounded when stored


def plan_networks(space: SearchSpace, options: CalibrationOptions) -> list[Architecture]:
    """The space's known networks, its smallest and largest of a large sample, and random ones; all different."""
    rng = np.random.default_rng(options.seed)
    found = {one.id: one for one in space.known.values()}
    sample = [space.decode(space.to_params(row)) for row in space.sample(rng, 20 * options.networks)]
    sample.sort(key=lambda one: one.macs)
    for one in (sample[0], sample[-1]):
        found.setdefault(one.id, one)
    # random ones, spread over the range of MACs: one from each of as many slices as are wanted
    wanted = max(options.networks - len(found), 0)
    for part in np.array_split(np.arange(len(sample)), max(wanted, 1)):
        one = sample[int(rng.choice(part))]
        found.setdefault(one.id, one)
    return list(found.values())[: max(options.networks, LEAST_NETWORKS)]


def bound_input(architecture: Architecture, batch: int) -> np.ndarray:
    """A fixed random batch of normalised images, float32 [batch, channels, size, size]."""
    shape = (batch, architecture.channels, architecture.image_size, architecture.image_size)
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _compile(files: dict[str, Path], target: Target, runtime: Runtime, console: Console) -> dict[str, Compiled]:
    compiled = {}
    with console.step("compile networks") as report:
        for index, (name, path) in enumerate(files.items()):
            compiled[name] = runtime.compile(path, target)
            report((index + 1) / len(files), "")
    return compiled


def _time(table: LatencyTable, space_name: str, plan: list[Architecture], compiled: dict[str, Compiled],
          options: CalibrationOptions, console: Console) -> None:
    """Time and profile `plan` and add it to the table; INVALID networks are left out, and said."""
    batch = table.key.batch
    protocol = replace(table.protocol, max_seconds=options.seconds)
    calls: dict[str, Callable[[], None]] = {
        one.id: compiled[one.id].bind(bound_input(one, batch)) for one in plan}
    reference = compiled[table.reference.id].bind(bound_input(table.reference, batch))
    with console.step("time networks") as report:
        found = measure(calls, reference, protocol, seed=options.seed, quiet_ms=table.quiet_ms or None,
                        progress=report)
    invalid = [name for name, one in found.items() if not one.valid]
    if invalid and len(found) - len(invalid) < min(LEAST_NETWORKS, len(found)):
        raise MeasurementInvalid(
            f"only {len(found) - len(invalid)} of {len(found)} networks could be timed: {found[invalid[0]].reason}. "
            "Stop what else runs here and give the command again.")
    if invalid:
        console.say(f"{len(invalid)} of {len(found)} networks INVALID, e.g. {invalid[0]}: {found[invalid[0]].reason}")
    table.quiet_ms = min((one.quiet_ms for one in found.values()), default=table.quiet_ms)
    valid = [one for one in plan if found[one.id].valid]
    every = max(1, len(valid) // max(options.profiles, 1))
    with console.step("profile blocks") as report:
        for index, one in enumerate(valid):
            profiled = options.profiles > 0 and index % every == 0
            table.networks.append(_profiled(space_name, one, found[one.id], compiled[one.id], batch) if profiled
                                  else TimedNetwork(space_name, one, found[one.id]))
            report((index + 1) / len(valid), "")


def _profiled(space_name: str, one: Architecture, measurement: Measurement, compiled: Compiled,
              batch: int) -> TimedNetwork:
    """Per-node times summed to blocks and scaled to the unprofiled wall time (in-context timing)."""
    from hwnas.export import block_of_node

    names = block_names(one)
    times = dict.fromkeys(names, 0.0)
    other = 0.0
    for node in compiled.profile(bound_input(one, batch), PROFILE_REPEATS):
        name = block_of_node(node.name)
        if name in times:
            times[name] += node.ms
        else:
            other += node.ms
    total = sum(times.values()) + other
    scale = measurement.latency_ms / total if total else 0.0
    return TimedNetwork(space_name, one, measurement, tuple(times[name] * scale for name in names), other * scale)


def block_names(architecture: Architecture) -> list[str]:
    """Module names of `architecture.blocks()`, in order: `stem`, `blocks.<stage>.<index>`, `head`."""
    stages = architecture.staged_blocks()[1:-1]
    return ["stem", *(f"blocks.{i}.{j}" for i, stage in enumerate(stages) for j in range(len(stage))), "head"]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
