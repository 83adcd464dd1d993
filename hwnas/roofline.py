"""Roofline: what a host can do at most, and how near each block of a space comes to it: python -m hwnas.roofline"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hwnas.cli.command import file_in, names_in, run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, text_table
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.deployment import Deployment, SpaceOptions, key_of
from hwnas.latency.roofs import Roofs, cache_bytes, measured_bandwidths, measured_peak
from hwnas.latency.table import LatencyTable, TimedNetwork, find_table
from hwnas.pictures import INK, MUTED, figure_bytes, new_figure, plain_log_ticks, title
from hwnas.space.blocks.block import KINDS, BlockSpec
from hwnas.stats import Z90
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import check_replaceable
from hwnas.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hwnas.space.search_space import SearchSpace

USAGE = """Arithmetic intensity of a space's blocks against the GFLOP/s that they reach, under measured roofs.

    python -m hwnas.roofline +target=xeon_int8 space=mnasnet_small against=xeon_fp32 out=runs/roofline.png"""

# The file's format history: 1 is the first: host, runtimes, targets, roofs (and how each was measured), groups, ratios,
# points.
ROOFLINE = Document("hwnas-roofline", 1, "a roofline", "Draw it again.", two_fields=True)

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
OVERHEAD_SHARE = 0.1  # of what the roof allows: below that, something else than the two roofs limits a block
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
        """Whether memory, and not computing, sets its roof."""
        return self.intensity < self.ridge

    @property
    def verdict(self) -> str:
        """What limits it: overhead below a tenth of its roof, else memory left of the ridge, else computing."""
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
class BlockGroup:
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
    blocks = {block for network in networks if network.space == space_name for block in network.architecture.blocks()}
    return sorted(blocks, key=lambda block: (block.rank, block.key))


def profiled_times(networks: Iterable[TimedNetwork], space_name: str) -> dict[BlockSpec, BlockTime]:
    """Median time of each block over the places where it was profiled.

    The standard error comes from one relative spread, pooled over every block that was met twice or more (NaN where
    none was). Most blocks are met too seldom for a spread of their own.
    """
    met: dict[BlockSpec, list[float]] = {}
    for network in networks:
        if network.space == space_name and network.block_ms and network.measurement.valid:
            for block, ms in zip(network.architecture.blocks(), network.block_ms, strict=True):
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
    """A point for each block whose time is above its own standard error (or has none)."""
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


def groups_of(points: Sequence[Point], ratios: Sequence[Ratio] = ()) -> list[BlockGroup]:
    """Points of one precision grouped by kind, kernel and squeeze-and-excite, in the order of the kinds."""
    members: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.block.rank, group_of(point.block))):
        members.setdefault(group_of(point.block), []).append(point)
    compared: dict[str, list[Ratio]] = {}
    for ratio in ratios:
        compared.setdefault(group_of(ratio.block), []).append(ratio)
    return [_group(name, group, compared.get(name, [])) for name, group in members.items()]


def _group(name: str, points: Sequence[Point], ratios: Sequence[Ratio]) -> BlockGroup:
    verdicts = [point.verdict for point in points]
    return BlockGroup(
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
    def groups(self) -> list[BlockGroup]:
        """The target's points, grouped."""
        return groups_of(self.points, self.ratios)

    @property
    def other_groups(self) -> list[BlockGroup]:
        """The other target's."""
        return groups_of(self.others)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file beside the picture."""
        groups = {name: [{**asdict(group), "verdict": group.verdict} for group in side]
                  for name, side in zip(self.names, (self.groups, self.other_groups), strict=True) if name}
        data = {**ROOFLINE.header, "created": self.created, "space": self.space,
                "targets": list(filter(None, self.names)), "runtimes": list(filter(None, self.runtimes)),
                "times": SOURCES[self.source], "host": dict(self.host), "roofs": self.roofs.to_dict(),
                "groups": groups, "ratios": [ratio.to_dict() for ratio in self.ratios],
                "points": [point.to_dict() for point in (*self.points, *self.others)]}
        return _plain(data)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """For JSON: floats to six digits, null for those that are no number."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value


@dataclass(frozen=True)
class RooflineOptions(SpaceOptions):
    """Options of `conf/roofline.yaml`."""

    device: str | None = option()
    against: str | None = option()
    times: str = option(choices=tuple(SOURCES))
    seconds: float = option(low=1, high=3600)
    out: str = option()


def out_path(text: str) -> Path:
    """Where the picture goes; ConfigError when it is neither .png nor .svg."""
    out = Path(text)
    if out.suffix not in (".png", ".svg") or out.is_dir():
        raise ConfigError(f"out must be a .png or .svg file, got {text!r}: the numbers lie beside it as .json.")
    check_replaceable(out, out.with_suffix(".json"))
    return out


def main(config: Config, console: Console) -> None:
    """Do what `conf/roofline.yaml` asks: measure, print, draw and store."""
    options = read_command(RooflineOptions, config)
    if options.device is not None:
        raise ConfigError("a roofline's bandwidth and peak are of the machine that it runs on, so that device= cannot "
                          f"be given. Install hwnas on {options.device} and give the command there; what kinds of "
                          "blocks take there tells python -m hwnas.check +target=NAME space=NAME device=user@host.")
    out = out_path(options.out)
    finish(make_roofline(options, console), out, console)


def make_roofline(options: RooflineOptions, console: Console) -> Roofline:
    """Measure the roofs and place the blocks of the latency tables under them."""
    deployment, space = options.deployment(console), options.search_space()
    against = against_of(options.against, deployment.target)
    table = table_of(deployment, space)
    if table is None:
        raise MissingLatency(f"no latency table of {deployment.host_name} with networks of {space.name}. Measure it: "
                             f"{profile_command(options, deployment.target, space)}")
    other = table_of(replace(deployment, target=against), space) if against else None
    if against and other is None:
        console.say(f"{against.name} is left out: no table yet. Measure it: {profile_command(options, against, space)}")
    measured = [(deployment.target, table), *([(against, other)] if against and other else [])]
    roofs = measure_roofs(measured, options.seconds, console)
    return roofline_of(options.times, space, (deployment.target, table), (against, other), roofs, console)


def against_of(name: str | None, target: Target) -> Target | None:
    """The target called `name`, else the same runtime's fp32 (None for fp32 itself), threads and batch alike."""
    if name is not None:
        other = named_target(name)
    elif target.precision == "fp32":
        return None
    else:
        plain = [candidate for candidate in map(named_target, names_in("target")) if candidate.precision == "fp32"
                 and (candidate.runtime, candidate.device) == (target.runtime, target.device)]
        plain.sort(key=lambda candidate: candidate.vendor != target.vendor)
        if not plain:
            return None
        other = plain[0]
    other = replace(other, threads=target.threads, batch=target.batch)
    if (other.runtime, other.precision) == (target.runtime, target.precision):
        raise ConfigError(f"against={other.name} is {target.name} itself: both run {target.precision} by "
                          f"{target.runtime}. Choose another.")
    return other


def named_target(name: str) -> Target:
    """A target of conf/target by its name; UnknownName lists them."""
    from omegaconf import OmegaConf

    file = file_in("target", name)
    if file is None:
        raise UnknownName("target", name, names_in("target"))
    return Target.from_config(OmegaConf.to_container(OmegaConf.load(file), resolve=True))  # type: ignore[arg-type]


def table_of(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    """The table of a deployment, checked, or None where no network of the space was timed."""
    from hwnas.runtimes.runtime import load_runtime

    key = key_of(deployment, space)
    table = find_table(deployment.host_name, key)
    if table is None or space.name not in table.spaces():
        return None
    table.check(key, deployment.host_name, load_runtime(deployment.target.runtime).version())
    return table


def profile_command(options: RooflineOptions, target: Target, space: SearchSpace) -> str:
    """What measures the table that is missing, for the same input."""
    parts = [f"python -m hwnas.profile +target={target.name} space={options.space}"]
    if options.image_size is not None:
        parts.append(f"image_size={options.image_size}")
    parts.append(f"channels={space.channels} classes={space.classes}")
    shipped = named_target(target.name) if target.name in names_in("target") else target
    parts += [f"target.{name}={getattr(target, name)}" for name in ("runtime", "precision", "threads", "batch")
              if getattr(target, name) != getattr(shipped, name)]
    return " ".join(parts)


def measure_roofs(targets: list[tuple[Target, LatencyTable]], seconds: float, console: Console) -> Roofs:
    """The roofs of the targets, measured now, beside the reference networks of their tables."""
    from hwnas.runtimes.runtime import load_runtime, threads_of

    with console.step("measure bandwidth"):
        cache, memory = measured_bandwidths(threads_of(targets[0][0]), waiting=lambda who: console.note(
            f"waiting for another measurement on this host: {who}"))
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


def describe(roofline: Roofline) -> list[str]:
    """Lines to print; the figures are medians over the blocks of a row."""
    lines = [f"{roofline.names[0]}, space {roofline.space}, on {roofline.host['name']}; "
             f"times {SOURCES[roofline.source]}",
             *(f"  peak {peak.precision}: {peak.gflops:.0f} GFLOP/s ({peak.how}, {peak.runtime})"
               for peak in roofline.roofs.peaks),
             *(f"  {bandwidth.level}: {bandwidth.gb_per_s:.1f} GB/s ({bandwidth.how})"
               for bandwidth in (roofline.roofs.cache, roofline.roofs.memory)),
             "", *_table(roofline), "",
             "left of ridge: where memory or cache bounds the roof. "
             f"overhead-bound: below {OVERHEAD_SHARE:.0%} of what the roofs allow: calls, small maps, kernels such as "
             "depthwise ones"]
    return [*lines, *_above(roofline), *_not_paying(roofline)]


def precisions_of(roofline: Roofline) -> tuple[str, str]:
    """What runs in the two targets: precisions, or the targets' names where those are equal."""
    pair = tuple(points[0].precision if points else "" for points in (roofline.points, roofline.others))
    return (pair[0], pair[1]) if pair[0] != pair[1] else roofline.names


def _table(roofline: Roofline) -> list[str]:
    this, other = precisions_of(roofline)
    head = ("blocks", "FLOP/byte", "GFLOP/s", "of roof", "left of ridge", "verdict")
    ratio = (f"time {this}/{other}", "longer for certain") if other else ()
    rows = ((*_row(group), *_ratio_line(group)[:len(ratio)]) for group in roofline.groups)
    lines = text_table([(this, *head, *ratio), *rows], words=(0, 6))
    if not other:
        return lines
    return [*lines, "", *text_table([(other, *head), *map(_row, roofline.other_groups)], words=(0, 6))]


def _row(group: BlockGroup) -> tuple[str, ...]:
    share = group.verdicts[group.verdict] / group.n
    return (group.name, str(group.n), f"{group.intensity:.1f}", f"{group.gflops:.1f}", f"{group.share:.1%}",
            f"{group.left_of_ridge:.0%}", group.verdict if share == 1 else f"{group.verdict} ({share:.0%})")


def _ratio_line(group: BlockGroup) -> tuple[str, str]:
    return ("", "") if group.ratio is None else (f"{group.ratio:.2f}", f"{group.n_slower} of {group.n_compared}")


def _above(roofline: Roofline) -> list[str]:
    """Blocks quicker than their roof are named, because no block can be."""
    every = [*roofline.points, *roofline.others]
    above = sum(point.share > 1 for point in every)
    return [f"{above} of {len(every)} points stand above their roof: the runtime moves fewer bytes than are counted, "
            "or the block's time is too short by its error"] if above else []


def _not_paying(roofline: Roofline) -> list[str]:
    """Where the target is no quicker than the other one."""
    if not roofline.ratios:
        return []
    this, other = precisions_of(roofline)
    slower = [ratio for ratio in roofline.ratios if ratio.slower]
    larger = sum(ratio.ratio > 1 for ratio in roofline.ratios)
    line = (f"{this} takes longer than {other} in {larger} of {len(roofline.ratios)} blocks, in {len(slower)} beyond "
            "what the errors of their times explain (95 %); no gain in the median:")
    return [f"{line} {_names([group for group in roofline.groups if group.ratio is not None and group.ratio >= 1])}"]


def _names(groups: Sequence[BlockGroup]) -> str:
    return ", ".join(f"{group.name} ({group.ratio:.2f})" for group in groups) or "no kind of block"


SLOWER = "#d92d20"
MARKERS = ("o", "^")
CROWDED = 400  # points of one precision, from which they are drawn small


def roofline_figure(roofline: Roofline) -> Figure:
    """Left: GFLOP/s against FLOP a byte. Right, where there is another target: time ratios of the blocks."""
    heading = f"{' against '.join(filter(None, roofline.names))}: blocks of {roofline.space} under the roofs"
    with new_figure(13.0, 7.0, heading, _subtitle(roofline), left=0.06) as figure:
        columns = figure.subplots(1, 2 if roofline.ratios else 1, width_ratios=(2.1, 1) if roofline.ratios else None,
                                  squeeze=False)[0]
        figure.subplots_adjust(left=0.06, right=0.985, top=0.845, bottom=0.175, wspace=0.27)
        _draw_roofline(columns[0], roofline)
        if roofline.ratios:
            _draw_ratios(columns[1], roofline)
    return figure


def _subtitle(roofline: Roofline) -> str:
    runtimes = " and ".join(dict.fromkeys(filter(None, roofline.runtimes)))
    return f"{roofline.host['name']} · {runtimes} · block times {SOURCES[roofline.source]} · {roofline.created[:10]}"


def _draw_roofline(axes: Axes, roofline: Roofline) -> None:
    every = [*roofline.points, *roofline.others]
    axes.set_xscale("log")
    axes.set_yscale("log")
    x = [point.intensity for point in every]
    y = [point.gflops for point in every]
    # left end: the space of the labels on the slopes; right end: past the last ridge, so that every roof has its flat
    last = max(peak.gflops for peak in roofline.roofs.peaks) / roofline.roofs.memory.gb_per_s
    first = min(peak.gflops for peak in roofline.roofs.peaks) / roofline.roofs.cache.gb_per_s
    axes.set_xlim(min(min(x) / 3, first / 7), max(*x, last) * 1.6)
    axes.set_ylim(min(y) / 1.8, max(peak.gflops for peak in roofline.roofs.peaks) * 2.2)
    title(axes, "Blocks as they stand inside networks")
    axes.set_xlabel("arithmetic intensity (FLOP per byte read and written, log scale)")
    axes.set_ylabel("achieved GFLOP/s (int8: GOP/s; log scale)")
    for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        plain_log_ticks(axis, *ends)
    _draw_roofs(axes, roofline)
    for marker, points in zip(MARKERS, (roofline.points, roofline.others), strict=True):
        _draw_points(axes, points, marker)
    _ring_slower(axes, roofline)
    _legend(axes, roofline)


def _ring_slower(axes: Axes, roofline: Roofline) -> None:
    """Thick rings where the target is slower for certain, thin ones where its errors could explain it."""
    size, thick = (62, 1.6) if len(roofline.points) < CROWDED else (36, 1.1)
    for certain, width in ((False, 0.5), (True, thick)):
        blocks = {ratio.block for ratio in roofline.ratios if ratio.ratio > 1 and ratio.slower == certain}
        ringed = [point for point in roofline.points if point.block in blocks]
        axes.scatter([point.intensity for point in ringed], [point.gflops for point in ringed], s=size, lw=width,
                     facecolor="none", edgecolor=SLOWER, zorder=4)


def _draw_points(axes: Axes, points: Sequence[Point], marker: str) -> None:
    filled = marker == MARKERS[0]
    size, alpha = (26, 0.75) if len(points) < CROWDED else (14, 0.55)
    for name, kind in KINDS.items():
        part = [point for point in points if point.block.kind == name]
        axes.scatter([point.intensity for point in part], [point.gflops for point in part], s=size, marker=marker,
                     facecolor=kind.color if filled else "none", edgecolor="white" if filled else kind.color,
                     lw=0.5 if filled else 0.9, alpha=alpha, zorder=3 if filled else 2.5)


def _draw_roofs(axes: Axes, roofline: Roofline) -> None:
    low, high = axes.get_xlim()
    top = max(peak.gflops for peak in roofline.roofs.peaks)
    for bandwidth, dash in ((roofline.roofs.cache, "-"), (roofline.roofs.memory, (0, (5, 3)))):
        ridge = top / bandwidth.gb_per_s
        axes.plot([low, ridge], [low * bandwidth.gb_per_s, top], color=INK, lw=1.3, ls=dash, zorder=2)
        _along(axes, bandwidth.gb_per_s, f"{bandwidth.level}  {bandwidth.gb_per_s:.3g} GB/s ({bandwidth.how})")
    for peak in roofline.roofs.peaks:
        ridge = peak.gflops / roofline.roofs.cache.gb_per_s
        axes.plot([max(ridge, low), high], [peak.gflops] * 2, color=INK, lw=1.3, zorder=2)
        unit = "GOP/s" if peak.precision == "int8" else "GFLOP/s"
        # left of its ridge and above the slope, where no point can lie
        axes.annotate(f"{peak.precision} peak {peak.gflops:,.0f} {unit}", (max(ridge, low), peak.gflops), (-8, 2),
                      textcoords="offset points", ha="right", va="center", fontsize=8.5, color=INK, zorder=5)


def _along(axes: Axes, gb_per_s: float, text: str) -> None:
    """Write along a slope, from where it enters the picture."""
    (x_low, _), (y_low, _) = axes.get_xlim(), axes.get_ylim()
    x = max(x_low, y_low / gb_per_s) * 1.12
    (left, bottom), (right, top) = axes.transData.transform([(x, x * gb_per_s), (2 * x, 2 * x * gb_per_s)])
    axes.text(x, x * gb_per_s * 1.06, text, fontsize=8, color=INK, rotation_mode="anchor", ha="left", va="bottom",
              rotation=math.degrees(math.atan2(top - bottom, right - left)), zorder=5, bbox=_paper())


def _paper() -> dict[str, Any]:
    """A background for the words on a roof, so that points do not cross them out."""
    return {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}


def _legend(axes: Axes, roofline: Roofline) -> None:
    """The legend stands below the picture, because points may lie anywhere in it."""
    from matplotlib.lines import Line2D

    kinds = {point.block.kind for point in (*roofline.points, *roofline.others)}
    items = [Line2D([], [], ls="", marker="s", ms=6.5, color=kind.color, label=kind.label)
             for name, kind in KINDS.items() if name in kinds]
    names = precisions_of(roofline)
    for name, marker, points in zip(names, MARKERS, (roofline.points, roofline.others), strict=True):
        if points:
            items.append(Line2D([], [], ls="", marker=marker, ms=6, color=MUTED, label=f"{name} ({len(points)} blocks)",
                                mfc=MUTED if marker == MARKERS[0] else "none"))
    if any(ratio.ratio > 1 for ratio in roofline.ratios):
        items.append(Line2D([], [], ls="", marker="o", ms=8, mfc="none", mew=1.6, color=SLOWER,
                            label=f"{names[0]} slower than {names[1]} (thin: within its error)"))
    axes.legend(handles=items, loc="upper left", bbox_to_anchor=(-0.02, -0.09), ncols=math.ceil(len(items) / 2),
                frameon=False, fontsize=8.5, handletextpad=0.3, columnspacing=1.2)


def _draw_ratios(axes: Axes, roofline: Roofline) -> None:
    this, other = precisions_of(roofline)
    groups = [group for group in roofline.groups if group.ratio is not None]
    title(axes, f"Time in {this} over time in {other}")
    axes.set_xscale("log")
    rng = np.random.default_rng(0)
    for row, group in enumerate(groups):
        part = [ratio for ratio in roofline.ratios if group_of(ratio.block) == group.name]
        axes.scatter([ratio.ratio for ratio in part], row + rng.uniform(-0.22, 0.22, len(part)), s=13, lw=0.7,
                     facecolor=KINDS[group.kind].color, alpha=0.6, zorder=2,
                     edgecolor=[SLOWER if ratio.slower else "white" for ratio in part])
        axes.plot([group.ratio or 1.0] * 2, [row - 0.36, row + 0.36], color=INK, lw=2, zorder=1.8)
    values = [ratio.ratio for ratio in roofline.ratios]
    low, high = min(*values, 0.8) / 1.15, max(*values, 1.8) * 1.15
    axes.set_xlim(low, high)
    axes.axvspan(1, high, color="#fef3f2", zorder=0)
    axes.axvline(1, color=SLOWER, lw=1.1, zorder=1)
    axes.set_ylim(len(groups) - 0.4, -0.85)
    axes.set_yticks(range(len(groups)), [_row_name(group) for group in groups], fontsize=8.5)
    axes.text(1, -0.5, f" {this} slower", color=SLOWER, fontsize=8.5, va="center", ha="left")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ratio (log scale); bars: medians")
    plain_log_ticks(axes.xaxis, low, high)


def _row_name(group: BlockGroup) -> str:
    return f"{group.name}\nn={group.n_compared}, median {group.ratio:.2f}"


def finish(roofline: Roofline, out: Path, console: Console) -> None:
    """Print the summary, write the picture and the file beside it."""
    beside = out.with_suffix(".json")
    write_atomic(beside, json.dumps(roofline.to_dict(), indent=1))
    write_atomic(out, figure_bytes(roofline_figure(roofline), out.suffix[1:]))
    for line in ["", *describe(roofline), ""]:
        console.say(line)
    console.say(f"picture: {out}, numbers: {beside}")


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.roofline`."""
    return run_command(main, "roofline", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
