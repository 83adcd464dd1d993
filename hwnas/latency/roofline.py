"""Roofline of a space's blocks: arithmetic intensity against achieved GFLOP/s, under roofs measured on the same host.

After Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009). A block's time is
its share inside whole networks, never that of the block alone. Bytes are what its convolutions read and write one
after the other, plus the weights; a runtime that keeps what lies between them in registers moves fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hwnas.cli.command import file_in, names_in
from hwnas.cli.options import number
from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.roofs import Roofs, cache_bytes, measured_bandwidths, measured_peak
from hwnas.latency.table import LatencyTable, TimedNetwork, find_table
from hwnas.space.blocks import BlockSpec
from hwnas.stats.intervals import Z90
from hwnas.system.documents import Document
from hwnas.target.target import Target

if TYPE_CHECKING:
    from hwnas.latency.deployment import Deployment
    from hwnas.space.search_space import SearchSpace

# The file's format history: 1 is the first: host, runtimes, targets, roofs (and how each was measured), groups, ratios,
# points.
ROOFLINE = Document("hwnas-roofline", 1, "a roofline", "Draw it again.", two_fields=True)

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
OVERHEAD_SHARE = 0.1  # of what the roof allows: a block below that is held up by something else than the two roofs
SOURCES = {"inferred": "inferred from whole networks", "profiled": "profiled inside networks, scaled to their times"}
MEMORY, COMPUTE, OVERHEAD = "memory-bound", "compute-bound", "overhead-bound"


class BlockTimes(Protocol):
    """What knows the times of blocks inside networks: a fitted LatencyModel."""

    def block_ms(self, blocks: Sequence[BlockSpec]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of each block's share, in ms."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Time of one batch through a block inside networks, and its standard error; `n`: profiled places behind it."""

    ms: float
    std_ms: float
    n: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """A block under the roofs of its precision. `intensity` in FLOP a byte, `share` of what the roof allows."""

    block: BlockSpec
    precision: str
    time: BlockTime
    bytes_moved: int
    intensity: float
    gflops: float
    roof: str
    ridge: float
    attainable_gflops: float

    @property
    def share(self) -> float:
        """Achieved over attainable."""
        return self.gflops / self.attainable_gflops

    @property
    def left_of_ridge(self) -> bool:
        """Whether it is memory, not computing, that its roof is made of."""
        return self.intensity < self.ridge

    @property
    def verdict(self) -> str:
        """What holds it up: overhead below a tenth of its roof, else memory left of the ridge, else computing."""
        if self.share < OVERHEAD_SHARE:
            return OVERHEAD
        return MEMORY if self.left_of_ridge else COMPUTE

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {name: getattr(self, name) for name in (
            "precision", "bytes_moved", "intensity", "gflops", "roof", "ridge", "attainable_gflops", "share",
            "left_of_ridge", "verdict")}
        return {"block": self.block.key, "group": group_of(self.block), **asdict(self.time),
                "macs": self.block.macs, **values}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of a block in the target over that in the other one; `std`: standard error of its logarithm."""

    block: BlockSpec
    ratio: float
    std: float

    @property
    def slower(self) -> bool:
        """Whether the target is slower beyond what its errors explain (95 %, one-sided)."""
        return bool(np.log(self.ratio) > Z90 * self.std)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"block": self.block.key, "ratio": self.ratio, "log_std": self.std, "slower": self.slower}


@dataclass(frozen=True, slots=True)
class Group:
    """Medians of the blocks of one kind, kernel and squeeze-and-excite; `ratio` is None without another target.

    `left_of_ridge` is a share of its blocks, `verdicts` are counts.
    """

    name: str
    kind: str
    n: int
    intensity: float
    gflops: float
    share: float
    left_of_ridge: float
    verdicts: Mapping[str, int]
    ratio: float | None
    n_compared: int
    n_slower: int

    @property
    def verdict(self) -> str:
        """The commonest verdict."""
        return max(self.verdicts, key=lambda name: self.verdicts[name])


def group_of(block: BlockSpec) -> str:
    """`ir k5 se`: kind, kernel and squeeze-and-excite; kinds of one kernel, as stem and head, are alone."""
    if not block.rules.takes_kernel:
        return block.kind
    return f"{block.kind} k{block.kernel}{' se' if block.se else ''}"


def bytes_moved(block: BlockSpec, precision: str, batch: int = 1) -> int:
    """Activations read and written for one batch, and the weights once, in elements of `precision`."""
    return (block.activation_elements * batch + block.params) * ELEMENT_BYTES[precision]


def blocks_of(networks: Iterable[TimedNetwork], space_name: str) -> list[BlockSpec]:
    """Every different block of a space's timed networks, in a fixed order."""
    found = {block for one in networks if one.space == space_name for block in one.architecture.blocks()}
    return sorted(found, key=lambda block: (block.rank, block.key))


def profiled_times(networks: Iterable[TimedNetwork], space_name: str) -> dict[BlockSpec, BlockTime]:
    """Median time of each block over the places where it was profiled.

    The standard error comes from one relative spread, pooled over every block that was met twice or more (NaN where
    none was): most are met too seldom for one of their own.
    """
    met: dict[BlockSpec, list[float]] = {}
    for one in networks:
        if one.space == space_name and one.block_ms and one.measurement.valid:
            for block, ms in zip(one.architecture.blocks(), one.block_ms, strict=True):
                met.setdefault(block, []).append(ms)
    medians = {block: float(np.median(values)) for block, values in met.items()}
    spread = _pooled_spread(met, medians)
    return {block: BlockTime(ms, spread * ms / len(met[block]) ** 0.5, len(met[block]))
            for block, ms in medians.items()}


def _pooled_spread(met: Mapping[BlockSpec, Sequence[float]], medians: Mapping[BlockSpec, float]) -> float:
    """Relative standard deviation about the medians, over blocks met at least twice."""
    squares, freedom = 0.0, 0
    for block, values in met.items():
        if len(values) > 1 and medians[block] > 0:
            squares += float(np.sum((np.array(values) / medians[block] - 1) ** 2))
            freedom += len(values) - 1
    return float(np.sqrt(squares / freedom)) if freedom else float("nan")


def inferred_times(model: BlockTimes, blocks: Sequence[BlockSpec]) -> dict[BlockSpec, BlockTime]:
    """The model's table entries."""
    mean, std = model.block_ms(blocks)
    return {block: BlockTime(float(ms), float(error)) for block, ms, error in zip(blocks, mean, std, strict=True)}


def points_of(times: Mapping[BlockSpec, BlockTime], precision: str, roofs: Roofs, batch: int = 1) -> list[Point]:
    """A point for each block whose time is told from 0 (by its own standard error, where it has one)."""
    return [_point(block, time, precision, roofs, batch) for block, time in times.items() if is_resolved(time)]


def is_resolved(time: BlockTime) -> bool:
    """Whether a time is above its own standard error: otherwise GFLOP/s could be anything."""
    return time.ms > 0 and not time.std_ms >= time.ms


def _point(block: BlockSpec, time: BlockTime, precision: str, roofs: Roofs, batch: int) -> Point:
    moved, flops = bytes_moved(block, precision, batch), 2.0 * block.macs * batch
    bandwidth, peak = roofs.bandwidth(moved), roofs.peak(precision).gflops
    intensity = flops / moved
    return Point(block, precision, time, moved, intensity, flops / time.ms / 1e6, bandwidth.level,
                 peak / bandwidth.gb_per_s, min(peak, intensity * bandwidth.gb_per_s))


def ratios_of(points: Sequence[Point], others: Sequence[Point]) -> list[Ratio]:
    """Times of `points` over those of the same blocks in `others`; blocks that only one side has are left out."""
    other = {point.block: point.time for point in others}
    return [_ratio(point.block, point.time, other[point.block]) for point in points if point.block in other]


def _ratio(block: BlockSpec, time: BlockTime, other: BlockTime) -> Ratio:
    return Ratio(block, time.ms / other.ms, float(np.hypot(time.std_ms / time.ms, other.std_ms / other.ms)))


def groups_of(points: Sequence[Point], ratios: Sequence[Ratio] = ()) -> list[Group]:
    """Points of one precision grouped by kind, kernel and squeeze-and-excite, in the order of the kinds."""
    members: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.block.rank, group_of(point.block))):
        members.setdefault(group_of(point.block), []).append(point)
    compared: dict[str, list[Ratio]] = {}
    for ratio in ratios:
        compared.setdefault(group_of(ratio.block), []).append(ratio)
    return [_group(name, found, compared.get(name, [])) for name, found in members.items()]


def _group(name: str, points: Sequence[Point], ratios: Sequence[Ratio]) -> Group:
    verdicts = [point.verdict for point in points]
    return Group(
        name, points[0].block.kind, len(points), float(np.median([point.intensity for point in points])),
        float(np.median([point.gflops for point in points])), float(np.median([point.share for point in points])),
        float(np.mean([point.left_of_ridge for point in points])),
        {verdict: verdicts.count(verdict) for verdict in (MEMORY, COMPUTE, OVERHEAD) if verdict in verdicts},
        float(np.median([ratio.ratio for ratio in ratios])) if ratios else None, len(ratios),
        sum(ratio.slower for ratio in ratios))


@dataclass(frozen=True)
class Roofline:
    """What the picture shows and the file holds: `names` are the targets, the second empty without another one."""

    space: str
    names: tuple[str, str]
    runtimes: tuple[str, str]
    source: str
    host: Mapping[str, Any]
    created: str
    roofs: Roofs
    points: Sequence[Point]
    others: Sequence[Point] = ()
    ratios: Sequence[Ratio] = ()

    @property
    def groups(self) -> list[Group]:
        """The target's points, grouped."""
        return groups_of(self.points, self.ratios)

    @property
    def other_groups(self) -> list[Group]:
        """The other target's."""
        return groups_of(self.others)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file beside the picture."""
        groups = {name: [{**asdict(one), "verdict": one.verdict} for one in found]
                  for name, found in zip(self.names, (self.groups, self.other_groups), strict=True) if name}
        data = {**ROOFLINE.header, "created": self.created, "space": self.space,
                "targets": list(filter(None, self.names)), "runtimes": list(filter(None, self.runtimes)),
                "times": SOURCES[self.source], "host": dict(self.host), "roofs": self.roofs.to_dict(),
                "groups": groups, "ratios": [one.to_dict() for one in self.ratios],
                "points": [one.to_dict() for one in (*self.points, *self.others)]}
        return _plain(data)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """For JSON: floats to six digits, null for those that are no number."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value


def out_path(text: str) -> Path:
    """Where the picture goes; ConfigError when it is neither .png nor .svg."""
    out = Path(text)
    if out.suffix not in (".png", ".svg") or out.is_dir():
        raise ConfigError(f"out must be a .png or .svg file, got {text!r}: the numbers lie beside it as .json.")
    return out


def make_roofline(config: Any, console: Console) -> Roofline:
    """Measure the roofs and place the blocks of the latency tables under them, as `conf/roofline.yaml` says."""
    from hwnas.latency.deployment import Deployment, space_of

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
    return roofline_of(config.times, space, (deployment.target, table), (against, other), roofs, console)


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

    file = file_in("target", name)
    if file is None:
        raise UnknownName("target", name, names_in("target"))
    return Target.from_config(OmegaConf.to_container(OmegaConf.load(file), resolve=True))  # type: ignore[arg-type]


def table_of(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    """The table of a deployment, checked, or None where no network of the space was timed."""
    from hwnas.latency.deployment import key_of
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

    if source == "profiled":
        return profiled_times(table.networks, space.name)
    return inferred_times(model_of(table, space)[0], blocks_of(table.networks, space.name))
