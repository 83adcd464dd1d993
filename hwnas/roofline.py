"""Roofline: what a host can do at most, and how near each block of a space comes to it.

    hwnas roofline target=xeon_int8 space=mnasnet_small out=runs/roofline.png

Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures (CACM 2009). A data sheet
would promise what no network gets: here the peak is that of the quickest of a few large dense networks, timed as the
blocks' networks were. Bandwidth is that of copying arrays, counted as STREAM counts: what is read and written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from timeit import timeit
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, text_table
from hwnas.errors import ConfigError, MeasurementInvalid, MissingLatency
from hwnas.latency.copies import TimedFile
from hwnas.latency.deployment import SpaceOptions, kept_table, key_of
from hwnas.latency.measurement import Protocol
from hwnas.latency.prior import model_of
from hwnas.latency.seat import seated
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import Reference, prepare_untrained, time_files
from hwnas.lazy import LazyModule
from hwnas.pictures import INK, figure_bytes, new_figure, plain_log_ticks, title
from hwnas.runtimes.runtime import threads_of
from hwnas.space.blocks.block import KINDS, BlockSpec
from hwnas.system.cores import allowed_cores
from hwnas.system.documents import now
from hwnas.system.paths import temporary_folder, write_atomic
from hwnas.system.run_folder import check_replaceable
from hwnas.target import Target, measuring_lock

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn
else:
    nn = LazyModule("torch.nn")

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
OVERHEAD_SHARE = 0.1  # of what the roof allows: below that, something else than the two roofs limits a block
MEMORY, COMPUTE, OVERHEAD = "memory-bound", "compute-bound", "overhead-bound"
DENSE = ((1, 256, 28, 8), (1, 512, 14, 8), (3, 128, 28, 4), (3, 256, 14, 4))  # kernel, channels, map in px, layers
CACHE_BYTES = 1 << 20  # a core's own cache, where the host does not say
MEMORY_BYTES = 256 << 20  # each of the two arrays
REPEATS, LEAST_S = 40, 2e-3  # a shorter repeat would time the call


@dataclass(frozen=True)
class RooflineOptions(SpaceOptions):
    """Options of `conf/roofline.yaml`."""

    device: str | None = option()
    seconds: float = option(low=1, high=3600)
    out: str = option()


@dataclass(frozen=True)
class Bandwidths:
    """Bytes read and written, in 1e9 a second: in a core's own cache, which has `cache_bytes`, and beyond it."""

    cache: float
    memory: float
    cache_bytes: int


def place_blocks(blocks: Sequence[BlockSpec], ms: np.ndarray, std_ms: np.ndarray, target: Target, peak: float,
                 bandwidths: Bandwidths) -> pd.DataFrame:
    """Blocks under the roofs.

    Args:
        ms: time of one batch through each block inside networks [n].
        std_ms: its standard error [n].

    Returns:
        A row for each block whose time is above its own standard error: its `group` (kind, kernel and
        squeeze-and-excite: `ir k5 se`; kinds of one kernel, as stem and head, are alone), bytes moved (activations read
        and written for one batch, and the weights once), intensity in FLOP a byte, the `ridge` right of which computing
        sets its roof, `share` of what the roof allows, and what limits it.
    """
    groups = [f"{block.kind} k{block.kernel}{' se' if block.se else ''}" if block.rules.takes_kernel else block.kind
              for block in blocks]
    moved = np.array([ELEMENT_BYTES[target.precision] * (block.activation_elements * target.batch + block.params)
                      for block in blocks])
    flops = np.array([2.0 * block.macs * target.batch for block in blocks])
    gb_per_s = np.where(moved <= bandwidths.cache_bytes, bandwidths.cache, bandwidths.memory)
    points = pd.DataFrame({
        "block": [block.key for block in blocks], "kind": [block.kind for block in blocks], "group": groups,
        "rank": [block.rank for block in blocks], "precision": target.precision, "ms": ms, "std_ms": std_ms,
        "bytes_moved": moved, "intensity": flops / moved, "gflops": flops / np.maximum(ms, 1e-12) / 1e6,
        "ridge": peak / gb_per_s})
    points["share"] = points.gflops / np.minimum(peak, points.intensity * gb_per_s)
    limits = [points.share < OVERHEAD_SHARE, points.intensity < points.ridge]
    points["verdict"] = np.select(limits, [OVERHEAD, MEMORY], COMPUTE)
    resolved = points[(points.ms > 0) & ~(points.std_ms >= points.ms)]
    return resolved.sort_values(["rank", "group", "block"]).drop(columns="rank").reset_index(drop=True)


def main(config: Config, console: Console) -> None:
    """Do what `conf/roofline.yaml` asks: measure, print, draw and store."""
    options = read_command(RooflineOptions, config)
    if options.device is not None:
        raise ConfigError("a roofline's bandwidth and peak are of the machine that it runs on, so that device= cannot "
                          f"be given. Install hwnas on {options.device} and give the command there; what kinds of "
                          "blocks take there tells hwnas check target=NAME space=NAME device=user@host.")
    out = Path(options.out)
    if out.suffix not in (".png", ".svg") or out.is_dir():
        raise ConfigError(f"out must be a .png or .svg file, got {options.out!r}: the numbers lie beside it as .json.")
    beside = out.with_suffix(".json")
    check_replaceable(out, beside)
    deployment, space = options.deployment(console), options.search_space()
    target, table = deployment.target, kept_table(deployment, space)
    if table is None or space.name not in table.spaces():
        raise MissingLatency(
            f"no latency table of {deployment.host_name} for {key_of(deployment, space)} with networks of "
            f"{space.name}. Measure it: hwnas profile target={target.name} space={options.space} "
            f"channels={space.channels} classes={space.classes}, and what else this command was given")
    with console.step("measure bandwidth"):
        bandwidths = measure_bandwidths(threads_of(target), lambda who: console.note(
            f"waiting for another measurement on this host: {who}"))
    with console.step(f"measure peak of {target.name}") as report:
        peak, how = measure_peak(target, options.seconds, table, report)
    blocks = sorted({block for network in table.networks if network.space == space.name
                     for block in network.architecture.blocks()}, key=lambda block: block.key)
    points = place_blocks(blocks, *model_of(table, space)[0].block_ms(blocks), target, peak, bandwidths)
    if points.empty:
        raise MissingLatency(f"{table.path}: no block of {space.name} has a time that can be told from 0. Measure more:"
                             " hwnas.profile with fresh=true and a larger budget.minutes.")
    heading = f"{target.name}: blocks of {space.name}"
    where = f"{table.host['name']} · {table.runtime_version} · {now()[:10]}"
    content = {"format": "hwnas-roofline/3", "created": now(), "space": space.name, "host": dict(table.host),
               "target": target.name, "runtime": table.runtime_version, "gb_per_s": asdict(bandwidths), "peak": peak,
               "peak_of": how, "blocks": json.loads(points.to_json(orient="records"))}
    write_atomic(beside, json.dumps(content, indent=1))
    write_atomic(out, figure_bytes(draw(points, peak, bandwidths, heading, where), out.suffix[1:]))
    for line in [f"{heading}; {where}", f"  peak: {peak:.0f} GFLOP/s ({how})", *describe(points, bandwidths),
                 f"picture: {out}, numbers: {beside}"]:
        console.say(line)


def measure_peak(target: Target, seconds: float, table: LatencyTable,
                 progress: Callable[[float, str], None] | None = None) -> tuple[float, str]:
    """The most GFLOP/s of dense networks, in `seconds` at most, and the network. MeasurementInvalid on a machine slower
    than the table's, by its reference network, so that peak and blocks are of one state of the machine."""
    files, macs = {}, {}
    with temporary_folder() as folder:
        for kernel, channels, px, layers in DENSE:
            name, shape = f"{layers} convolutions {kernel}x{kernel}, {channels} channels at {px} px", (channels, px, px)
            parts = [part for _ in range(layers)
                     for part in (nn.Conv2d(channels, channels, kernel, padding=kernel // 2), nn.ReLU())]
            network = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            path = prepare_untrained(network, f"{kernel:04x}{channels:04x}", shape, target, Path(folder))
            files[name], macs[name] = TimedFile(path, target, shape), layers * (kernel * channels * px) ** 2
        measured = time_files(files, target, Reference(table.reference, target.batch),
                              Protocol(min_calls=5, copies=1, max_seconds=seconds), progress=progress)
    reached = [(2e-6 * macs[name] * target.batch / each.latency_ms, name)
               for name, each in measured.items() if each.valid]
    if not reached:
        raise MeasurementInvalid(f"no peak of {target.precision}: {next(iter(measured.values())).reason}. Stop what "
                                 "else runs here and give the command again.")
    return max(reached)


def measure_bandwidths(threads: int, waiting: Callable[[str], None] | None = None) -> Bandwidths:
    """Of arrays in half of a core's own cache, as other things run too, and of arrays beyond every cache. `waiting` is
    told who measures on this machine already."""
    reach = cache_bytes()
    with measuring_lock(allowed_cores(), waiting), seated(threads):
        return Bandwidths(copy_speed(reach // 4, threads), copy_speed(MEMORY_BYTES // threads, threads), reach)


def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of a core's second cache as the host reports it (a virtual machine may report any), or CACHE_BYTES."""
    for index in folder.glob("index*"):
        with suppress(OSError, ValueError):
            if int((index / "level").read_text()) == 2:
                return int((index / "size").read_text().strip().removesuffix("K")) << 10
    return CACHE_BYTES


def copy_speed(array_bytes: int, threads: int) -> float:
    """The best of REPEATS copies, each thread between two arrays of its own, in 1e9 bytes a second."""
    pairs = [(np.ones(array_bytes // 4, np.float32), np.ones(array_bytes // 4, np.float32)) for _ in range(threads)]

    def seconds(calls: int) -> float:  # of the thread that takes longest
        return max(pool.map(lambda pair: timeit(lambda: np.copyto(*pair), number=calls), pairs))

    with ThreadPoolExecutor(threads) as pool:
        seconds(1)  # the first one has cold pages
        calls = max(1, int(LEAST_S / max(seconds(1), 1e-9)))
        return 2 * array_bytes * calls * threads / min(seconds(calls) for _ in range(REPEATS)) / 1e9


def describe(points: pd.DataFrame, bandwidths: Bandwidths) -> list[str]:
    """Lines to print; the figures are medians over the blocks of a row."""
    rows = [[str(name), str(len(part)), f"{part.intensity.median():.1f}", f"{part.gflops.median():.1f}",
             f"{part.share.median():.1%}", part.verdict.mode()[0]]
            for name, part in points.groupby("group", sort=False)]
    return [f"  copying in the cache: {bandwidths.cache:.1f} GB/s, in memory: {bandwidths.memory:.1f} GB/s", "",
            *text_table([["kind", "blocks", "FLOP/byte", "GFLOP/s", "of roof", "mostly"], *rows], words=(0, 5)),
            f"overhead-bound: below {OVERHEAD_SHARE:.0%} of what the roofs allow: calls, small maps, kernels such as "
            "depthwise ones"]


def draw(points: pd.DataFrame, peak: float, bandwidths: Bandwidths, heading: str, where: str) -> Figure:
    """GFLOP/s against FLOP a byte, each block under the roofs."""
    with new_figure(10.0, 6.6, heading, where, left=0.08) as figure:
        axes = figure.subplots(gridspec_kw={"top": 0.85, "bottom": 0.25})
        title(axes, "Blocks as they stand inside networks")
        low, high = points.intensity.min() / 3, max(points.intensity.max(), peak / bandwidths.memory) * 1.6
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(points.gflops.min() / 1.8, peak * 2.2),
                 xlabel="arithmetic intensity (FLOP per byte read and written, log scale)",
                 ylabel="achieved GFLOP/s (int8: GOP/s; log scale)")
        plain_log_ticks(axes.xaxis, *axes.get_xlim())
        plain_log_ticks(axes.yaxis, *axes.get_ylim())
        for name, speed, dash in (("cache", bandwidths.cache, "-"), ("memory", bandwidths.memory, "--")):
            axes.plot([low, peak / speed, high], [low * speed, peak, peak], color=INK, lw=1.3, ls=dash, zorder=2,
                      label=f"copying in {name}: {speed:.3g} GB/s")
        axes.annotate(f"peak {peak:,.0f}", (high, peak), (-4, 4), fontsize=8.5, textcoords="offset points", ha="right",
                      va="bottom", color=INK, zorder=5)
        for kind, part in points.groupby("kind", sort=False):
            axes.scatter(part.intensity, part.gflops, s=24, zorder=3, label=KINDS[str(kind)].label, lw=0.8,
                         color=KINDS[str(kind)].color, edgecolor="white")
        axes.legend(loc="upper left", bbox_to_anchor=(-0.07, -0.13), frameon=False, fontsize=8, ncols=4)
    return figure


def command(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hwnas roofline`."""
    return run_command(main, "roofline", __doc__ or "", argv)


if __name__ == "__main__":
    raise SystemExit(command())
