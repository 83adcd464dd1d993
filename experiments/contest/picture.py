"""The picture: every deployed file by measured latency and test top-1; left all, right the neighbourhood of ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from experiments.contest.entries import Entry
from hwnas.front.picture import BASELINE, FRONT
from hwnas.pictures import (
    INK,
    MUTED,
    Line,
    blank_figure,
    draw_better,
    figure_bytes,
    place_labels,
    plain_log_ticks,
    style,
    title,
)
from hwnas.stats import non_dominated

STOCK = "#e9a23b"
MARKERS = {"int8": ("o", 6.5), "bf16": ("s", 4.5), "fp32": ("^", 5.0)}
SHORT = {"mobilenetv3_small_100": "MobileNetV3-small", "mobilenetv3_large_100": "MobileNetV3-large",
         "mobilenetv2_050": "MobileNetV2 0.5", "mobilenetv2_100": "MobileNetV2 1.0", "semnasnet_100": "MnasNet-A1",
         "efficientnet_b0": "EfficientNet-B0", "resnet18": "ResNet-18", "resnet50": "ResNet-50"}
Point = tuple[float, float]


def picture(entries: Sequence[Entry], heading: str, subtitle: str) -> bytes:
    """As PNG. What was not timed is left out."""
    shown = [one for one in entries if one.latency]
    near = _near(shown)
    figure = blank_figure(14.0, 6.6)
    with style():
        panels = figure.subplots(1, 2, width_ratios=(1.0, 1.1)) if near else [figure.subplots()]
        figure.subplots_adjust(left=0.05, right=0.988, top=0.855, bottom=0.135, wspace=0.1)
        figure.text(0.05, 0.945, heading, fontsize=14, fontweight="bold", color=INK)
        figure.text(0.05, 0.908, subtitle, fontsize=9.5, color=MUTED)
        if shown:
            _legend(figure, shown)
        for axes, part, name in zip(panels, (shown, near), ("All", "Where ours are"), strict=False):
            title(axes, name)
            axes.set(ylabel="test top-1 (%)" if part is shown else "", xlabel="latency of one image (ms, log scale)")
            if part:
                _draw(axes, part, shown, [one for one in part if part is near or one not in near
                                          or one.network.is_ours])
            else:
                axes.text(0.5, 0.5, "nothing was timed", transform=axes.transAxes, ha="center", color=MUTED)
    return figure_bytes(figure, "png")


def _near(shown: Sequence[Entry]) -> list[Entry]:
    """Ours and what could rival them: from half the fastest's latency to five times the slowest's, and not far below
    them in top-1. Empty where that is nothing or everything."""
    ours = [one for one in shown if one.network.is_ours]
    if not ours:
        return []
    x, y = [_at(one)[0] for one in ours], [_at(one)[1] for one in ours]
    room = max(3.0, 1.2 * (max(y) - min(y)))
    found = [one for one in shown if 0.5 * min(x) <= _at(one)[0] <= 5 * max(x) and _at(one)[1] >= min(y) - room]
    return found if len(found) < len(shown) else []


def _draw(axes: Any, part: Sequence[Entry], shown: Sequence[Entry], named: Sequence[Entry]) -> None:
    """`part` of the files, with the front of all baselines; names at those of `named`."""
    bars = [line for one in part for line in _bars(one)]
    _limits(axes, bars)
    steps = _baseline_front([one for one in shown if not one.network.is_ours])
    axes.plot([x for x, _ in steps], [y for _, y in steps], color=BASELINE, lw=1.2, alpha=0.45, drawstyle="steps-post",
              zorder=1.5)
    for (x0, y0), (x1, y1) in bars:
        axes.plot([x0, x1], [y0, y1], color=MUTED, lw=0.9, alpha=0.45, zorder=2)
    links = [line for name in dict.fromkeys(one.network.label for one in part)
             for line in pairwise(sorted(_at(one) for one in part if one.network.label == name))]
    for (x0, y0), (x1, y1) in links:
        axes.plot([x0, x1], [y0, y1], color=MUTED, lw=0.7, alpha=0.5, zorder=1.8)
    for one in part:
        marker, size = MARKERS[one.precision]
        axes.plot(*_at(one), marker, ms=size + (2.5 if one.network.is_ours else 0), color=_colour(one), mec="white",
                  mew=0.8, zorder=4 if one.network.is_ours else 3)
    draw_better(axes, [_at(one) for one in part], MUTED)
    labels = [(*_at(one), _name(one) if one in named else "", _colour(one, text=True)) for one in part
              if one.precision == _named_precision(one, part)]
    place_labels(axes, labels, lines=[*bars, *links, *_stairs(steps)], fontsize=7.8)


def _legend(figure: Any, shown: Sequence[Entry]) -> None:
    """Below both panels, where it covers nothing."""
    from matplotlib.lines import Line2D

    looks: list[tuple[str, dict[str, Any]]] = [
        ("ours", {"color": FRONT, "marker": "o"}), ("baseline, stock", {"color": STOCK, "marker": "o"}),
        ("baseline, stride-1 stem (s1)", {"color": BASELINE, "marker": "o"})]
    looks += [(precision, {"color": MUTED, "marker": marker, "ms": size})
              for precision, (marker, size) in MARKERS.items() if any(one.precision == precision for one in shown)]
    handles = [Line2D([], [], label=text, mec="white", **{"ms": 6.5, "ls": "", **look}) for text, look in looks]
    handles.append(Line2D([], [], color=BASELINE, lw=1.2, alpha=0.45, label="best of the baselines"))
    handles.append(Line2D([], [], color=MUTED, lw=0.9, alpha=0.6, label="95 % of top-1, 90 % of latency"))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8.5,
                  bbox_to_anchor=(0.5, 0.005), handletextpad=0.4, columnspacing=1.6)


def _named_precision(one: Entry, part: Sequence[Entry]) -> str:
    """Where a network's name stands: at its int8 file, otherwise at its first."""
    held = [other.precision for other in part if other.network == one.network]
    return "int8" if "int8" in held else held[0]


def _name(one: Entry) -> str:
    if one.network.is_ours:
        return one.network.family
    return SHORT.get(one.network.family, one.network.family) + (" s1" if one.network.stem_stride else "")


def _colour(one: Entry, text: bool = False) -> str:
    if one.network.is_ours:
        return FRONT
    return BASELINE if one.network.stem_stride else "#b7791f" if text else STOCK


def _baseline_front(rivals: Sequence[Entry]) -> list[Point]:
    """The staircase of the baselines' files that no other baseline's file dominates, fastest first."""
    points = [_at(one) for one in rivals]
    if not points:
        return []
    on = non_dominated([(y, x) for x, y in points], (False, True))
    return sorted(point for point, chosen in zip(points, on, strict=True) if chosen)


def _stairs(corners: Sequence[Point]) -> list[Line]:
    return [line for (x0, y0), (x1, y1) in pairwise(corners) for line in (((x0, y0), (x1, y0)), ((x1, y0), (x1, y1)))]


def _at(one: Entry) -> Point:
    return one.latency.ms if one.latency else 0.0, 100 * one.top1


def _bars(one: Entry) -> list[Line]:
    assert one.latency is not None
    x, y = _at(one)
    low, high = one.top1_interval
    return [((max(one.latency.low, x / 5), y), (one.latency.high, y)), ((x, 100 * low), (x, 100 * high))]


def _limits(axes: Any, bars: Sequence[Line]) -> None:
    """Room around all intervals."""
    x, y = [point[0] for line in bars for point in line], [point[1] for line in bars for point in line]
    low, high = min(x) / 1.35, max(x) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    plain_log_ticks(axes.xaxis, low, high)
    room = max(0.08 * (max(y) - min(y)), 0.3)
    axes.set_ylim(min(y) - 1.5 * room, max(y) + 1.5 * room)
