"""The picture of a front: finalists, controls and baselines, cap and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hwnas.front.comparison import describe
from hwnas.front.rows import FrontRow
from hwnas.pictures import MUTED, Line, draw_arrow, draw_better, log_axis, new_figure, place_labels, title
from hwnas.study.objective import COSTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hwnas.front.pairs import Pair


_LEAST_RANGE = (math.log(2), 4.0)  # least size of a front: log of latencies in ms, points of top-1
_MOST_NAMED = 16  # networks: with more, finalists that are not on the front show their letter alone


def named(name: str, row: FrontRow) -> str:
    """Return `name` with the minimised costs besides latency; price, which depends on it, only if it is alone."""
    costs = [cost for cost in row.costs if not COSTS[cost.name].of_latency] or row.costs
    return " · ".join([name, *(COSTS[cost.name].shown(cost.best) for cost in costs if cost.best is not None)])


def _place(row: FrontRow) -> tuple[float, float]:
    """Return latency in ms and top-1 in per cent; 0 if unknown."""
    return row.best_latency_ms or 0.0, 100 * (row.best_top1 or 0.0)


def staircase(rows: Iterable[FrontRow]) -> list[tuple[float, float]]:
    """Return the front in latency and top-1 alone, as pairs, fastest first."""
    steps: list[tuple[float, float]] = []
    for latency_ms, top1 in sorted(map(_place, rows), key=lambda place: (place[0], -place[1])):
        if not steps or top1 > steps[-1][1]:
            steps.append((latency_ms, top1))
    return steps


# Colours of the kinds of networks, and of the cap.
FRONT, OTHER, BASELINE, CONTROL, CAP = "#1f5fbf", "#8fb3e6", "#c2410c", "#5b7083", "#b42318"


@dataclass(frozen=True, slots=True)
class PlotInfo:
    """The facts in the title. `date` is a day, `cap_ms` the hard cap (None: none), `accuracy` the estimator's name,
    `training` how finalists and baselines were trained, `unit` what one call takes."""

    target: str
    host: str
    dataset: str
    date: str
    space: str = ""
    cap_ms: float | None = None
    accuracy: str = "proxy"
    training: str = ""
    unit: str = "image"


def front_figure(rows: Sequence[FrontRow], info: PlotInfo, pairs: Sequence[Pair] = ()) -> Figure:
    """Draw test top-1 against latency, with intervals; pairs at their mean latency. Rows that are not verified are
    hollow marks at their predicted latency. The axes fit the front. Networks far from it are arrows at the edge, with
    their values."""
    verified = any(row.verified for row in rows)
    where = f"measured on {info.host}" if verified else f"predicted for {info.host}, not verified"
    heading = f"{info.dataset} on {info.target}: {'verified' if verified else 'unverified'} front"
    subtitle = " · ".join(part for part in (info.training, where, info.space and f"space {info.space}", info.date)
                          if part)
    with new_figure(9.6, 6.4, heading, subtitle, left=0.075) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.075, right=0.975, top=0.845, bottom=0.215)
        _draw_front(axes, rows, info, verified, pairs)
    return figure


def _draw_front(axes: Axes, rows: Sequence[FrontRow], info: PlotInfo, verified: bool, pairs: Sequence[Pair]) -> None:
    shown = [row for row in rows if row.best_latency_ms is not None and row.best_top1 is not None]
    mixed = verified and any(not row.verified for row in shown)
    title(axes, ("Test set, in the deployment runtime" + "; hollow: latency predicted" * mixed) if verified else
          "Test set, fp32; latency predicted")
    axes.set_ylabel(f"test {rows[0].metric if rows else 'top-1'} (%)")
    axes.set_xlabel(f"latency of one {info.unit} (ms, log scale)")
    if not shown:
        axes.text(0.5, 0.5, "no network was scored", transform=axes.transAxes, ha="center", color=MUTED)
        return
    # The axes fit the networks near the front. The limits leave room for bars and the cap, so that further networks may
    # be inside too: these are drawn as well.
    near = near_front(shown)
    _limits(axes, [row for row in shown if row.id in near], info.cap_ms)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    near |= {row.id for row in shown for x, y in (_place(row),)
             if left <= x <= right and low <= y <= high}
    inside = [row for row in shown if row.id in near]
    corners = staircase(row for row in shown if row.on_front)
    axes.plot(*np.reshape(corners, (-1, 2)).T, color=FRONT, lw=1.4, alpha=0.55, zorder=2, drawstyle="steps-post")
    # Each kind of network: its rows, colour, marker, size of the marker, and text in the legend.
    kinds: tuple[tuple[Callable[[FrontRow], bool], str, str, float, str], ...] = (
        (lambda row: row.on_front and row.is_finalist, FRONT, "o", 6.5, "on the front"),
        (lambda row: row.is_finalist and not row.on_front, OTHER, "o", 5.5, "other finalists"),
        (lambda row: row.is_control and not row.is_known, CONTROL, "s", 5.0, "random networks of the space"),
        (lambda row: row.is_known, CONTROL, "X", 7.0, "known networks of the space"),
        (lambda row: row.is_baseline, BASELINE, "D", 5.5, "baselines"))
    for chosen, color, marker, size, label in kinds:
        _draw_points(axes, [row for row in shown if chosen(row)], near, color, marker, size, label)
    # The lines of the front, so that labels avoid them.
    steps = [line for (x0, y0), (x1, y1) in pairwise(corners) for line in (((x0, y0), (x1, y0)), ((x1, y0), (x1, y1)))]
    of_pairs = [(pair.latency_ms_mean, 100 * pair.top1_test) for pair in pairs]
    if of_pairs:  # between two networks of the front, so that the axes have room for them
        axes.plot(*zip(*of_pairs, strict=True), "p", ms=6.5, color=FRONT, mfc="white", zorder=3,
                  label="pairs of networks, mean latency (estimate)")
    outside, arrows = _draw_outside(axes, [row for row in shown if row.id not in near])
    cap = _draw_cap(axes, info.cap_ms)
    far = "; arrows: far outside, as written there" * bool(outside)
    notes = f"bars: 95 % of {shown[0].metric}, 90 % of latency{far}"
    axes.legend(loc="upper left", bbox_to_anchor=(-0.01, -0.115), ncol=3, frameon=False, fontsize=8.5,
                handletextpad=0.5, handlelength=1.2, columnspacing=1.4, title=notes, title_fontsize=7.5,
                alignment="left", borderpad=0.2)
    draw_better(axes, [place for (x0, y0), (x1, y1) in _bars(inside)
                       for place in zip(np.linspace(x0, x1, 9), np.linspace(y0, y1, 9), strict=True)], MUTED)
    # Random controls have no label: they only show what chance finds.
    labelled = [row for row in inside if row.is_known or not row.is_control]
    unnamed = [_place(row) for row in inside if row not in labelled]
    short = len(labelled) > _MOST_NAMED
    labels = [(*_place(row), row.label if short and row.label and not row.on_front else named(_short_name(row), row),
               _color(row)) for row in labelled]
    place_labels(axes, labels + outside, _bars(inside) + steps + cap + arrows, unnamed + of_pairs)


def near_front(rows: Sequence[FrontRow]) -> set[str]:
    """Return ids of rows that set the axes: the front (or all), and rows within half its width and height of it."""
    # Places as the axes show them, with the logarithm of latency.
    places = {row.id: (math.log(latency_ms or 1e-9), top1) for row in rows for latency_ms, top1 in (_place(row),)}
    front = [places[row.id] for row in rows if row.on_front] or [*places.values()]
    ends = []
    for values, least in zip(zip(*front, strict=True), _LEAST_RANGE, strict=True):
        room = max(max(values) - min(values), least) / 2
        ends.append((min(values) - room, max(values) + room))
    return {name for name, place in places.items()
            if all(low <= value <= high for value, (low, high) in zip(place, ends, strict=True))}


def _draw_outside(axes: Axes, rows: Sequence[FrontRow]) -> tuple[list[tuple[float, float, str, str]], list[Line]]:
    """Draw an arrow at the edge for each of these rows. Return their labels, with their values, and the arrows."""
    labels, arrows = [], list[Line]()
    for row in sorted(rows, key=lambda row: row.best_top1 or 0.0):
        latency_ms, top1 = _place(row)
        arrows.append(draw_arrow(axes, (latency_ms, top1), _color(row), arrows))
        name = "" if row.is_control and not row.is_known else f"{row.label or _short_name(row)}: "
        predicted = "" if row.verified else "~"
        labels.append((*arrows[-1][0], f"{name}{top1:.1f} %, {predicted}{latency_ms:.3g} ms", _color(row)))
    return labels, arrows


def _color(row: FrontRow) -> str:
    if row.is_baseline:
        return BASELINE
    return CONTROL if row.is_control and not row.is_known else FRONT if row.on_front else MUTED


def _short_name(row: FrontRow) -> str:
    return row.name if row.is_known else describe(row)


def _draw_points(axes: Axes, rows: Sequence[FrontRow], near: Set[str], color: str, marker: str, size: float, label: str
                 ) -> None:
    """Draw the `rows` whose ids are in `near`. The legend names all of them, near or not."""
    for hollow in (False, True):
        part = [row for row in rows if row.verified != hollow]
        if not part:
            continue
        places = [_interval(row) for row in part if row.id in near]
        for (left, x, right), (down, y, up) in places:
            axes.errorbar(x, y, [[y - down], [up - y]], [[x - left], [right - x]], fmt="none", ecolor=color,
                          elinewidth=1.2, alpha=0.5, zorder=2.5)
        axes.plot([x for (_, x, _), _ in places], [y for _, (_, y, _) in places], marker, ms=size, color=color,
                  mfc="white" if hollow else color, mec=color if hollow else "white", mew=1.0, zorder=3,
                  label=f"{label}, not verified" if hollow else label)


def _interval(row: FrontRow) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return low end, value and high end of latency in ms and of top-1 in per cent; all equal without an interval."""
    latency_ms, top1 = _place(row)
    ends = ((row.latency_ms_low, row.latency_ms_high) if row.verified
            else (row.latency_ms_predicted_low, row.latency_ms_predicted_high))
    low_ms, high_ms = (latency_ms if end is None else end for end in ends)
    low, high = (top1 if end is None else 100 * end for end in (row.top1_test_low, row.top1_test_high))
    return (min(low_ms, latency_ms), latency_ms, max(high_ms, latency_ms)), (min(low, top1), top1, max(high, top1))


def _bars(rows: Sequence[FrontRow]) -> list[Line]:
    """Return the intervals as lines in data coordinates."""
    return [line for (left, x, right), (down, y, up) in map(_interval, rows)
            for line in (((left, y), (right, y)), ((x, down), (x, up)))]


def _limits(axes: Axes, rows: Sequence[FrontRow], cap_ms: float | None) -> None:
    latencies, shares = zip(*map(_interval, rows), strict=True)
    ends = [end for low, _, high in latencies for end in (low, high)]
    # The axis includes the cap only if its range about doubles at most: a far cap would squeeze the networks.
    widest = max(ends) / min(ends) * 2
    log_axis(axes, ends + ([cap_ms] if cap_ms and min(ends) / widest <= cap_ms <= max(ends) * widest else []))
    low, high = min(share[0] for share in shares), max(share[2] for share in shares)
    room = max(0.12 * (high - low), 0.5)
    axes.set_ylim(max(low - 1.2 * room, -1.0), min(high + 1.2 * room, 100.0 + 0.7 * room))


def _draw_cap(axes: Axes, cap_ms: float | None) -> list[Line]:
    """Draw the cap, if there is one. Return its line, so that labels keep off it."""
    if cap_ms is None:
        return []
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    outside = "" if left <= cap_ms <= right else ", outside"
    axes.axvline(cap_ms, color=CAP, lw=1.2, ls=(0, (4, 3)), zorder=1, label=f"cap {cap_ms:.4g} ms{outside}")
    axes.set_xlim(left, right)
    return [((cap_ms, low), (cap_ms, high))]
