"""Roofline: what a host can do at most, and how near each block of a space comes to it: python -m hwnas.roofline

Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures (CACM 2009).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.cli.command import file_in, names_in, run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, text_table
from hwnas.errors import ConfigError, MissingLatency, UnknownName
from hwnas.latency.deployment import Deployment, SpaceOptions, key_of
from hwnas.latency.prior import model_of
from hwnas.latency.roofs import Roofs, cache_bytes, measured_bandwidths, measured_peak
from hwnas.latency.table import LatencyTable, find_table
from hwnas.lazy import LazyModule
from hwnas.pictures import INK, figure_bytes, new_figure, plain_log_ticks, title
from hwnas.runtimes.runtime import load_runtime, threads_of
from hwnas.space.blocks.block import KINDS, BlockSpec
from hwnas.stats import Z90
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import check_replaceable
from hwnas.target import Target

if TYPE_CHECKING:
    import omegaconf
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hwnas.space.search_space import SearchSpace
else:
    omegaconf = LazyModule("omegaconf")

USAGE = """Arithmetic intensity of a space's blocks against the GFLOP/s that they reach, under measured roofs.

    python -m hwnas.roofline +target=xeon_int8 space=mnasnet_small against=xeon_fp32 out=runs/roofline.png"""

ROOFLINE = Document("hwnas-roofline", 1, "a roofline", "Draw it again.", two_fields=True)
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
OVERHEAD_SHARE = 0.1  # of what the roof allows: below that, something else than the two roofs limits a block
MEMORY, COMPUTE, OVERHEAD = "memory-bound", "compute-bound", "overhead-bound"


@dataclass(frozen=True)
class RooflineOptions(SpaceOptions):
    """Options of `conf/roofline.yaml`."""

    device: str | None = option()
    against: str | None = option()
    seconds: float = option(low=1, high=3600)
    out: str = option()


@dataclass(frozen=True)
class Side:
    """A target with its latency table, and what `place_blocks` says of its blocks."""

    target: Target
    table: LatencyTable
    points: pd.DataFrame


def group_of(block: BlockSpec) -> str:
    """`ir k5 se`: kind, kernel and squeeze-and-excite; kinds of one kernel, as stem and head, are alone."""
    if not block.rules.takes_kernel:
        return block.kind
    return f"{block.kind} k{block.kernel}{' se' if block.se else ''}"


def bytes_moved(block: BlockSpec, precision: str, batch: int = 1) -> int:
    """Activations read and written for one batch, and the weights once, in elements of `precision`."""
    return (block.activation_elements * batch + block.params) * ELEMENT_BYTES[precision]


def place_blocks(blocks: Sequence[BlockSpec], ms: NDArray[np.float64], std_ms: NDArray[np.float64], precision: str,
                 roofs: Roofs, batch: int = 1) -> pd.DataFrame:
    """Blocks under the roofs of a precision.

    Args:
        ms: time of one batch through each block inside networks [n].
        std_ms: its standard error [n].

    Returns:
        A row for each block whose time is above its own standard error: intensity in FLOP a byte, the `ridge` right of
        which computing sets its roof, `share` of what the roof allows, and what limits it.
    """
    moved = np.array([bytes_moved(block, precision, batch) for block in blocks])
    flops = np.array([2.0 * block.macs * batch for block in blocks])
    peak, bandwidths = roofs.peak(precision).gflops, [roofs.bandwidth(each) for each in moved]
    gb_per_s = np.array([bandwidth.gb_per_s for bandwidth in bandwidths])
    points = pd.DataFrame({
        "block": [block.key for block in blocks], "kind": [block.kind for block in blocks],
        "group": [group_of(block) for block in blocks], "rank": [block.rank for block in blocks],
        "precision": precision, "ms": ms, "std_ms": std_ms, "bytes_moved": moved, "intensity": flops / moved,
        "gflops": flops / np.maximum(ms, 1e-12) / 1e6, "roof": [bandwidth.level for bandwidth in bandwidths],
        "ridge": peak / gb_per_s})
    points["share"] = points.gflops / np.minimum(peak, points.intensity * gb_per_s)
    points["verdict"] = np.where(points.share < OVERHEAD_SHARE, OVERHEAD,
                                 np.where(points.intensity < points.ridge, MEMORY, COMPUTE))
    resolved = points[(points.ms > 0) & ~(points.std_ms >= points.ms)]
    return resolved.sort_values(["rank", "group", "block"]).drop(columns="rank").reset_index(drop=True)


def compare(points: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Times of `points` over those of the same blocks in `others`, and whether a block is slower beyond what the errors
    of both explain (95 %, one-sided)."""
    both = points.merge(others[["block", "ms", "std_ms"]], on="block", suffixes=("", "_other"))
    error = np.hypot(both.std_ms / both.ms, both.std_ms_other / both.ms_other)
    return both.assign(ratio=both.ms / both.ms_other, slower=np.log(both.ms / both.ms_other) > Z90 * error)


def group_blocks(points: pd.DataFrame) -> pd.DataFrame:
    """Medians over the blocks of each kind, kernel and squeeze-and-excite, their number, and the commonest verdict."""
    groups = points.groupby("group", sort=False)
    medians = groups[["intensity", "gflops", "share"]].median()
    commonest = groups["verdict"].agg(lambda verdicts: verdicts.mode()[0])
    return medians.assign(n=groups.size(), verdict=commonest)


def main(config: Config, console: Console) -> None:
    """Do what `conf/roofline.yaml` asks: measure, print, draw and store."""
    options = read_command(RooflineOptions, config)
    if options.device is not None:
        raise ConfigError("a roofline's bandwidth and peak are of the machine that it runs on, so that device= cannot "
                          f"be given. Install hwnas on {options.device} and give the command there; what kinds of "
                          "blocks take there tells python -m hwnas.check +target=NAME space=NAME device=user@host.")
    out = Path(options.out)
    if out.suffix not in (".png", ".svg") or out.is_dir():
        raise ConfigError(f"out must be a .png or .svg file, got {options.out!r}: the numbers lie beside it as .json.")
    beside = out.with_suffix(".json")
    check_replaceable(out, beside)
    sides, roofs, space = measure_sides(options, console)
    heading = f"{' against '.join(side.target.name for side in sides)}: blocks of {space.name}"
    where = f"{sides[0].table.host['name']} · {sides[0].table.runtime_version} · {datetime.now(UTC):%Y-%m-%d}"
    write_atomic(beside, json.dumps(content_of(sides, roofs, space), indent=1))
    write_atomic(out, figure_bytes(draw(sides, roofs, heading, where), out.suffix[1:]))
    for line in [f"{heading}; {where}", *describe(sides, roofs), f"picture: {out}, numbers: {beside}"]:
        console.say(line)


def measure_sides(options: RooflineOptions, console: Console) -> tuple[list[Side], Roofs, SearchSpace]:
    """Measure the roofs and place the blocks of the latency tables under them, of the target and of the one that it is
    compared with. MissingLatency where the target has no table."""
    deployment, space = options.deployment(console), options.search_space()
    against = against_of(options.against, deployment.target)
    tables = {}
    for target in filter(None, (deployment.target, against)):
        table = table_of(replace(deployment, target=target), space)
        if table is not None:
            tables[target] = table
            continue
        remedy = f"Measure it: {profile_command(options, target, space)}"
        if target is deployment.target:
            raise MissingLatency(f"no latency table of {deployment.host_name} with networks of {space.name}. {remedy}")
        console.say(f"{target.name} is left out: no table yet. {remedy}")
    roofs = measure_roofs(tables, options.seconds, console)
    sides = []
    for target, table in tables.items():
        points = place_blocks(*block_times(table, space), target.precision, roofs, target.batch)
        if points.empty:
            raise MissingLatency(f"{table.path}: no block of {space.name} has a time that can be told from 0. Measure "
                                 f"more: {profile_command(options, target, space)} fresh=true")
        sides.append(Side(target, table, points))
    return sides, roofs, space


def against_of(name: str | None, target: Target) -> Target | None:
    """The target called `name`, else the same runtime's fp32 (None for fp32 itself), threads and batch alike."""
    if name is not None:
        other = named_target(name)
    else:
        plain = [candidate for candidate in map(named_target, names_in("target")) if candidate.precision == "fp32"
                 and (candidate.runtime, candidate.device) == (target.runtime, target.device)]
        if target.precision == "fp32" or not plain:
            return None
        other = min(plain, key=lambda candidate: candidate.vendor != target.vendor)
    other = replace(other, threads=target.threads, batch=target.batch)
    if (other.runtime, other.precision) == (target.runtime, target.precision):
        raise ConfigError(f"against={other.name} is {target.name} itself: both run {target.precision} by "
                          f"{target.runtime}. Choose another.")
    return other


def named_target(name: str) -> Target:
    """A target of conf/target by its name; UnknownName lists them."""
    file = file_in("target", name)
    if file is None:
        raise UnknownName("target", name, names_in("target"))
    return Target.from_config(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file), resolve=True))  # type: ignore[arg-type]


def table_of(deployment: Deployment, space: SearchSpace) -> LatencyTable | None:
    """The table of a deployment, checked, or None where no network of the space was timed."""
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


def measure_roofs(tables: dict[Target, LatencyTable], seconds: float, console: Console) -> Roofs:
    """The roofs of the targets, measured now, beside the reference networks of their tables."""
    with console.step("measure bandwidth"):
        cache, memory = measured_bandwidths(threads_of(next(iter(tables))), waiting=lambda who: console.note(
            f"waiting for another measurement on this host: {who}"))
    peaks = []
    for target, table in tables.items():
        with console.step(f"measure peak of {target.name}") as report:
            peaks.append(measured_peak(load_runtime(target.runtime), target, seconds=seconds, progress=report,
                                       reference=table.reference, quiet_ms=table.quiet_ms or None))
    return Roofs(tuple(peaks), cache, memory, cache_bytes(2), cache_bytes(3))


def block_times(table: LatencyTable, space: SearchSpace
                ) -> tuple[list[BlockSpec], NDArray[np.float64], NDArray[np.float64]]:
    """The blocks of a table's networks, and what the latency model says of each: mean and standard error in ms [n]."""
    networks = [network for network in table.networks if network.space == space.name]
    blocks = sorted({block for network in networks for block in network.architecture.blocks()},
                    key=lambda block: block.key)
    return blocks, *model_of(table, space)[0].block_ms(blocks)


def describe(sides: Sequence[Side], roofs: Roofs) -> list[str]:
    """Lines to print; the figures are medians over the blocks of a row."""
    lines = [*(f"  peak {peak.precision}: {peak.gflops:.0f} GFLOP/s ({peak.how}, {peak.runtime})"
               for peak in roofs.peaks),
             *(f"  {bandwidth.level}: {bandwidth.gb_per_s:.1f} GB/s ({bandwidth.how})"
               for bandwidth in (roofs.cache, roofs.memory))]
    compared = compare(sides[0].points, sides[1].points) if len(sides) > 1 else None
    for side in sides:
        head = [side.target.name, "blocks", "FLOP/byte", "GFLOP/s", "of roof", "mostly"]
        rows = [[str(name), str(row.n), f"{row.intensity:.1f}", f"{row.gflops:.1f}", f"{row.share:.1%}", row.verdict]
                for name, row in group_blocks(side.points).iterrows()]
        if compared is not None and side is sides[0]:
            head.append(f"time over {sides[1].target.name}'s")
            ratios = compared.groupby("group").ratio.median()
            rows = [[*row, f"{ratios[row[0]]:.2f}" if row[0] in ratios else ""] for row in rows]
        lines += ["", *text_table([head, *rows], words=(0, 5))]
    lines.append(f"overhead-bound: below {OVERHEAD_SHARE:.0%} of what the roofs allow: calls, small maps, kernels such "
                 "as depthwise ones")
    if compared is not None:
        ratios = compared.groupby("group", sort=False).ratio.median()
        names = ", ".join(f"{name} ({ratio:.2f})" for name, ratio in ratios[ratios >= 1].items())
        longer = f"{sides[0].target.name} takes longer than {sides[1].target.name} in {(compared.ratio > 1).sum()}"
        lines.append(f"{longer} of {len(compared)} blocks, in {compared.slower.sum()} beyond what the errors of their "
                     f"times explain (95 %); no gain in the median: {names or 'no kind of block'}")
    return lines


def content_of(sides: Sequence[Side], roofs: Roofs, space: SearchSpace) -> dict[str, Any]:
    """The content of the file beside the picture."""
    compared = compare(sides[0].points, sides[1].points) if len(sides) > 1 else pd.DataFrame()

    def rows(frame: pd.DataFrame) -> Any:
        return json.loads(frame.to_json(orient="records", double_precision=9))

    return {**ROOFLINE.header, "created": datetime.now(UTC).isoformat(timespec="seconds"), "space": space.name,
            "targets": [side.target.name for side in sides], "host": dict(sides[0].table.host),
            "runtimes": [side.table.runtime_version for side in sides], "roofs": roofs.to_dict(),
            "groups": {side.target.name: rows(group_blocks(side.points).reset_index()) for side in sides},
            "points": [row for side in sides for row in rows(side.points)],
            "ratios": rows(compared[["block", "ratio", "slower"]]) if len(compared) else []}


def draw(sides: Sequence[Side], roofs: Roofs, heading: str, where: str) -> Figure:
    """GFLOP/s against FLOP a byte, each block under the roofs; the second target's are hollow."""
    every = pd.concat([side.points for side in sides])
    top = max(peak.gflops for peak in roofs.peaks)
    with new_figure(10.0, 6.6, heading, where, left=0.08) as figure:
        axes = figure.subplots()
        title(axes, "Blocks as they stand inside networks")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(every.intensity.min() / 3, max(every.intensity.max(), top / roofs.memory.gb_per_s) * 1.6)
        axes.set_ylim(every.gflops.min() / 1.8, top * 2.2)
        axes.set_xlabel("arithmetic intensity (FLOP per byte read and written, log scale)")
        axes.set_ylabel("achieved GFLOP/s (int8: GOP/s; log scale)")
        for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            plain_log_ticks(axis, *ends)
        _draw_roofs(axes, roofs)
        for at, side in enumerate(sides):
            for kind, part in side.points.groupby("kind", sort=False):
                color, label = KINDS[str(kind)].color, f"{KINDS[str(kind)].label}, {side.target.precision}"
                axes.scatter(part.intensity, part.gflops, s=24, marker="o^"[at], zorder=3 - at, label=label, lw=0.8,
                             facecolor="none" if at else color, edgecolor=color if at else "white")
        figure.subplots_adjust(top=0.85, bottom=0.25)
        axes.legend(loc="upper left", bbox_to_anchor=(-0.07, -0.13), frameon=False, fontsize=8, ncols=4)
    return figure


def _draw_roofs(axes: Axes, roofs: Roofs) -> None:
    low, high = axes.get_xlim()
    top = max(peak.gflops for peak in roofs.peaks)
    for bandwidth, dash in ((roofs.cache, "-"), (roofs.memory, "--")):
        ridge = top / bandwidth.gb_per_s
        axes.plot([low, ridge], [low * bandwidth.gb_per_s, top], color=INK, lw=1.3, ls=dash, zorder=2,
                  label=f"{bandwidth.level}  {bandwidth.gb_per_s:.3g} GB/s ({bandwidth.how})")
    for peak in roofs.peaks:
        axes.plot([max(peak.gflops / roofs.cache.gb_per_s, low), high], [peak.gflops] * 2, color=INK, lw=1.3, zorder=2)
        unit = "GOP/s" if peak.precision == "int8" else "GFLOP/s"
        axes.annotate(f"{peak.precision} peak {peak.gflops:,.0f} {unit}", (high, peak.gflops), (-4, 4), fontsize=8.5,
                      textcoords="offset points", ha="right", va="bottom", color=INK, zorder=5)


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m hwnas.roofline`."""
    return run_command(main, "roofline", USAGE, argv)


if __name__ == "__main__":
    sys.exit(command())
