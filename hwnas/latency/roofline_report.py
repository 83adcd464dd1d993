"""The words and the picture of a roofline: roofs, block kinds, where a precision does not pay."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.cli.progress import Console
from hwnas.cli.text import text_table
from hwnas.latency.roofline import OVERHEAD_SHARE, SOURCES, Group, Point, Roofline, group_of
from hwnas.pictures.style import INK, MUTED, figure_bytes, new_figure, plain_log_ticks, title
from hwnas.space.blocks import KINDS
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def describe(found: Roofline) -> list[str]:
    """Lines to print; the figures are medians over the blocks of a row."""
    lines = [f"{found.names[0]}, space {found.space}, on {found.host['name']}; times {SOURCES[found.source]}",
             *(f"  peak {one.precision}: {one.gflops:.0f} GFLOP/s ({one.how}, {one.runtime})"
               for one in found.roofs.peaks),
             *(f"  {one.level}: {one.gb_per_s:.1f} GB/s ({one.how})"
               for one in (found.roofs.cache, found.roofs.memory)),
             "", *_table(found), "",
             "left of ridge: where memory or cache bounds the roof. "
             f"overhead-bound: below {OVERHEAD_SHARE:.0%} of what the roofs allow: calls, small maps, kernels such as "
             "depthwise ones"]
    return [*lines, *_above(found), *_not_paying(found)]


def precisions_of(found: Roofline) -> tuple[str, str]:
    """What runs in the two targets: precisions, or the targets' names where those are equal."""
    pair = tuple(one[0].precision if one else "" for one in (found.points, found.others))
    return (pair[0], pair[1]) if pair[0] != pair[1] else found.names


def _table(found: Roofline) -> list[str]:
    this, other = precisions_of(found)
    head = ("blocks", "FLOP/byte", "GFLOP/s", "of roof", "left of ridge", "verdict")
    ratio = (f"time {this}/{other}", "longer for certain") if other else ()
    lines = text_table([(this, *head, *ratio), *((*_row(one), *_ratio(one)[:len(ratio)]) for one in found.groups)],
                       words=(0, 6))
    return [*lines, "", *text_table([(other, *head), *map(_row, found.other_groups)], words=(0, 6))] if other else lines


def _row(one: Group) -> tuple[str, ...]:
    share = one.verdicts[one.verdict] / one.n
    return (one.name, str(one.n), f"{one.intensity:.1f}", f"{one.gflops:.1f}", f"{one.share:.1%}",
            f"{one.left_of_ridge:.0%}", one.verdict if share == 1 else f"{one.verdict} ({share:.0%})")


def _ratio(one: Group) -> tuple[str, str]:
    return ("", "") if one.ratio is None else (f"{one.ratio:.2f}", f"{one.n_slower} of {one.n_compared}")


def _above(found: Roofline) -> list[str]:
    """Blocks quicker than their roof: said, because no block can be."""
    every = [*found.points, *found.others]
    above = sum(point.share > 1 for point in every)
    return [f"{above} of {len(every)} points stand above their roof: the runtime moves fewer bytes than are counted, "
            "or the block's time is too short by its error"] if above else []


def _not_paying(found: Roofline) -> list[str]:
    """Where the target is no quicker than the other one."""
    if not found.ratios:
        return []
    this, other = precisions_of(found)
    slower = [one for one in found.ratios if one.slower]
    larger = sum(one.ratio > 1 for one in found.ratios)
    line = (f"{this} takes longer than {other} in {larger} of {len(found.ratios)} blocks, in {len(slower)} beyond what "
            "the errors of their times explain (95 %); no gain in the median:")
    return [f"{line} {_names([one for one in found.groups if one.ratio is not None and one.ratio >= 1])}"]


def _names(groups: Sequence[Group]) -> str:
    return ", ".join(f"{one.name} ({one.ratio:.2f})" for one in groups) or "no kind of block"


SLOWER = "#d92d20"
MARKERS = ("o", "^")
CROWDED = 400  # points of one precision, from which they are drawn small


def roofline_figure(found: Roofline) -> Figure:
    """Left: GFLOP/s against FLOP a byte. Right, where there is another target: time ratios of the blocks."""
    heading = f"{' against '.join(filter(None, found.names))}: blocks of {found.space} under the roofs"
    with new_figure(13.0, 7.0, heading, _subtitle(found), left=0.06) as figure:
        columns = figure.subplots(1, 2 if found.ratios else 1, width_ratios=(2.1, 1) if found.ratios else None,
                                  squeeze=False)[0]
        figure.subplots_adjust(left=0.06, right=0.985, top=0.845, bottom=0.175, wspace=0.27)
        _draw_roofline(columns[0], found)
        if found.ratios:
            _draw_ratios(columns[1], found)
    return figure


def _subtitle(found: Roofline) -> str:
    runtimes = " and ".join(dict.fromkeys(filter(None, found.runtimes)))
    return f"{found.host['name']} · {runtimes} · block times {SOURCES[found.source]} · {found.created[:10]}"


def _draw_roofline(axes: Axes, found: Roofline) -> None:
    every = [*found.points, *found.others]
    axes.set_xscale("log")
    axes.set_yscale("log")
    x = [point.intensity for point in every]
    y = [point.gflops for point in every]
    # left end: the space of the labels on the slopes; right end: past the last ridge, so that every roof has its flat
    last = max(peak.gflops for peak in found.roofs.peaks) / found.roofs.memory.gb_per_s
    first = min(peak.gflops for peak in found.roofs.peaks) / found.roofs.cache.gb_per_s
    axes.set_xlim(min(min(x) / 3, first / 7), max(*x, last) * 1.6)
    axes.set_ylim(min(y) / 1.8, max(peak.gflops for peak in found.roofs.peaks) * 2.2)
    title(axes, "Blocks as they stand inside networks")
    axes.set_xlabel("arithmetic intensity (FLOP per byte read and written, log scale)")
    axes.set_ylabel("achieved GFLOP/s (int8: GOP/s; log scale)")
    for axis, ends in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        plain_log_ticks(axis, *ends)
    _draw_roofs(axes, found)
    for marker, points in zip(MARKERS, (found.points, found.others), strict=True):
        _draw_points(axes, points, marker)
    _ring_slower(axes, found)
    _legend(axes, found)


def _ring_slower(axes: Axes, found: Roofline) -> None:
    """Thick rings where the target is slower for certain, thin ones where its errors could explain it."""
    size, thick = (62, 1.6) if len(found.points) < CROWDED else (36, 1.1)
    for certain, width in ((False, 0.5), (True, thick)):
        blocks = {ratio.block for ratio in found.ratios if ratio.ratio > 1 and ratio.slower == certain}
        ringed = [point for point in found.points if point.block in blocks]
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


def _draw_roofs(axes: Axes, found: Roofline) -> None:
    low, high = axes.get_xlim()
    top = max(peak.gflops for peak in found.roofs.peaks)
    for bandwidth, dash in ((found.roofs.cache, "-"), (found.roofs.memory, (0, (5, 3)))):
        ridge = top / bandwidth.gb_per_s
        axes.plot([low, ridge], [low * bandwidth.gb_per_s, top], color=INK, lw=1.3, ls=dash, zorder=2)
        _along(axes, bandwidth.gb_per_s, f"{bandwidth.level}  {bandwidth.gb_per_s:.3g} GB/s ({bandwidth.how})")
    for peak in found.roofs.peaks:
        ridge = peak.gflops / found.roofs.cache.gb_per_s
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
    """Behind the words on a roof, so that points do not cross them out."""
    return {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}


def _legend(axes: Axes, found: Roofline) -> None:
    """Below the picture: points may lie anywhere in it."""
    from matplotlib.lines import Line2D

    kinds = {point.block.kind for point in (*found.points, *found.others)}
    items = [Line2D([], [], ls="", marker="s", ms=6.5, color=kind.color, label=kind.label)
             for name, kind in KINDS.items() if name in kinds]
    names = precisions_of(found)
    for name, marker, points in zip(names, MARKERS, (found.points, found.others), strict=True):
        if points:
            items.append(Line2D([], [], ls="", marker=marker, ms=6, color=MUTED, label=f"{name} ({len(points)} blocks)",
                                mfc=MUTED if marker == MARKERS[0] else "none"))
    if any(ratio.ratio > 1 for ratio in found.ratios):
        items.append(Line2D([], [], ls="", marker="o", ms=8, mfc="none", mew=1.6, color=SLOWER,
                            label=f"{names[0]} slower than {names[1]} (thin: within its error)"))
    axes.legend(handles=items, loc="upper left", bbox_to_anchor=(-0.02, -0.09), ncols=math.ceil(len(items) / 2),
                frameon=False, fontsize=8.5, handletextpad=0.3, columnspacing=1.2)


def _draw_ratios(axes: Axes, found: Roofline) -> None:
    this, other = precisions_of(found)
    groups = [one for one in found.groups if one.ratio is not None]
    title(axes, f"Time in {this} over time in {other}")
    axes.set_xscale("log")
    rng = np.random.default_rng(0)
    for row, one in enumerate(groups):
        part = [ratio for ratio in found.ratios if group_of(ratio.block) == one.name]
        axes.scatter([ratio.ratio for ratio in part], row + rng.uniform(-0.22, 0.22, len(part)), s=13, lw=0.7,
                     facecolor=KINDS[one.kind].color, alpha=0.6, zorder=2,
                     edgecolor=[SLOWER if ratio.slower else "white" for ratio in part])
        axes.plot([one.ratio or 1.0] * 2, [row - 0.36, row + 0.36], color=INK, lw=2, zorder=1.8)
    values = [ratio.ratio for ratio in found.ratios]
    low, high = min(*values, 0.8) / 1.15, max(*values, 1.8) * 1.15
    axes.set_xlim(low, high)
    axes.axvspan(1, high, color="#fef3f2", zorder=0)
    axes.axvline(1, color=SLOWER, lw=1.1, zorder=1)
    axes.set_ylim(len(groups) - 0.4, -0.85)
    axes.set_yticks(range(len(groups)), [_row_name(one) for one in groups], fontsize=8.5)
    axes.text(1, -0.5, f" {this} slower", color=SLOWER, fontsize=8.5, va="center", ha="left")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("ratio (log scale); bars: medians")
    plain_log_ticks(axes.xaxis, low, high)


def _row_name(one: Group) -> str:
    return f"{one.name}\nn={one.n_compared}, median {one.ratio:.2f}"


def finish(found: Roofline, out: Path, console: Console) -> None:
    """Print the summary, write the picture and the file beside it."""
    beside = out.with_suffix(".json")
    write_atomic(beside, json.dumps(found.to_dict(), indent=1))
    write_atomic(out, figure_bytes(roofline_figure(found), out.suffix[1:]))
    for line in ["", *describe(found), ""]:
        console.say(line)
    console.say(f"picture: {out}, numbers: {beside}")
