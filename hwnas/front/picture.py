"""The picture of a front: trials, finalists and baselines, cap and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hwnas.accuracy.estimator import meaning
from hwnas.front.comparison import describe
from hwnas.front.lineage import draw_lineage, is_race
from hwnas.front.rows import FrontRow
from hwnas.pictures import MUTED, Line, draw_better, is_number, log_axis, new_figure, percent_axis, place_labels, title
from hwnas.study.objective import COSTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LEAST, _MOST = 4.5, 12.0  # diameters of marks in points
_MOST_NAMED = 16  # networks: of more, finalists that are not on the front bear their letter alone


def named(name: str, row: FrontRow) -> str:
    """`name` with the minimised costs besides latency. Price depends on latency, so it appears only if it is alone."""
    costs = [cost for cost in row.costs if not COSTS[cost.name].of_latency] or row.costs
    return " · ".join([name, *(COSTS[cost.name].shown(cost.best) for cost in costs if cost.best is not None)])


def diameters(rows: Iterable[FrontRow]) -> dict[str, float]:
    """Diameters of the rows' marks in points, by id. They grow with the log of the first cost, if there is one."""
    logs = {row.id: math.log(row.costs[0].best) for row in rows if row.costs and row.costs[0].best}
    low, high = min(logs.values(), default=0.0), max(logs.values(), default=0.0)
    return {name: _LEAST + (_MOST - _LEAST) * (value - low) / (high - low or 1.0) for name, value in logs.items()}


def explain(axes: Axes, rows: Sequence[FrontRow], sizes: dict[str, float], color: str) -> None:
    """Legend entries for the smallest and the largest mark."""
    known = sorted((row for row in rows if row.id in sizes), key=lambda row: sizes[row.id])
    for row in known[:1] + known[1:][-1:]:
        cost = COSTS[row.costs[0].name]
        axes.plot([], [], "o", ms=sizes[row.id], mfc="none", mec=color,
                  label=f"{cost.label} {cost.shown(row.costs[0].best)}")


def staircase(rows: Iterable[FrontRow]) -> list[tuple[float, float]]:
    """The front in latency and top-1 (in %) alone, as pairs, fastest first."""
    steps: list[tuple[float, float]] = []
    for latency_ms, top1 in sorted((row.best_latency_ms or 0.0, -100 * (row.best_top1 or 0.0)) for row in rows):
        if not steps or -top1 > steps[-1][1]:
            steps.append((latency_ms, -top1))
    return steps


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


def front_figure(rows: Sequence[FrontRow], trials: Sequence[Mapping[str, Any]], info: PlotInfo) -> Figure:
    """Left: test top-1 against measured latency, with intervals. Right: the search's estimates and predictions, or the
    lineage of a race.

    Rows that are not verified are hollow marks at their predicted latency. A further cost that the search minimised
    sets the size of a mark. `trials` are rows of `trials.csv`.
    """
    verified = any(row.verified for row in rows)
    where = f"measured on {info.host}" if verified else f"predicted for {info.host}, not verified"
    heading = f"{info.dataset} on {info.target}: {'verified' if verified else 'unverified'} front"
    subtitle = " · ".join(part for part in (info.training, where, info.space and f"space {info.space}", info.date)
                          if part)
    with new_figure(11.5, 6.2, heading, subtitle, left=0.065) as figure:
        main, seen = figure.subplots(1, 2, width_ratios=(1.75, 1))
        figure.subplots_adjust(left=0.065, right=0.985, top=0.84, bottom=0.225, wspace=0.2)
        _draw_front(main, rows, info, verified)
        _draw_trials(seen, rows, trials, info)
    return figure


def _draw_front(axes: Axes, rows: Sequence[FrontRow], info: PlotInfo, verified: bool) -> None:
    shown = [row for row in rows if row.best_latency_ms is not None and row.best_top1 is not None]
    mixed = verified and any(not row.verified for row in shown)
    title(axes, ("Test set, in the deployment runtime" + "; hollow: latency predicted" * mixed) if verified else
          "Test set, fp32; latency predicted")
    axes.set_ylabel("test top-1 (%)")
    axes.set_xlabel(f"latency of one {info.unit} (ms, log scale)")
    if not shown:
        axes.text(0.5, 0.5, "no network was scored", transform=axes.transAxes, ha="center", color=MUTED)
        return
    corners, sizes = staircase(row for row in shown if row.on_front), diameters(shown)
    axes.plot([x for x, _ in corners], [y for _, y in corners], color=FRONT, lw=1.4, alpha=0.55, zorder=2,
              drawstyle="steps-post")
    kinds: tuple[tuple[Callable[[FrontRow], bool], str, str, float, str], ...] = (
        (lambda row: row.on_front and row.is_finalist, FRONT, "o", 6.5, "on the front"),
        (lambda row: row.is_finalist and not row.on_front, OTHER, "o", 5.5, "other finalists"),
        (lambda row: row.is_control and not row.is_known, CONTROL, "s", 5.0, "random networks of the space"),
        (lambda row: row.is_known, CONTROL, "X", 7.0, "known networks of the space"),
        (lambda row: row.is_baseline, BASELINE, "D", 5.5, "baselines"))
    for chosen, color, marker, size, label in kinds:
        _draw_points(axes, [row for row in shown if chosen(row)], color, marker, size, label, sizes)
    explain(axes, shown, sizes, MUTED)
    _limits(axes, shown, info.cap_ms)
    _cap(axes, info.cap_ms)
    _legend(axes, "bars: 95 % of top-1, 90 % of latency")
    draw_better(axes, [end for line in _bars(shown) for end in line], MUTED)
    told = [row for row in shown if row.is_known or not row.is_control]
    short = len(told) > _MOST_NAMED
    labels = [(row.best_latency_ms or 0.0, 100 * (row.best_top1 or 0.0),
               row.label if short and row.label and not row.on_front else named(_short_name(row), row),
               BASELINE if row.is_baseline else FRONT if row.on_front else MUTED) for row in told]
    place_labels(axes, labels, lines=_bars(shown) + _steps(corners) + _cap_line(axes, info.cap_ms))


def _short_name(row: FrontRow) -> str:
    return row.name if row.is_known else describe(row)


def _draw_points(axes: Axes, rows: Sequence[FrontRow], color: str, marker: str, size: float, label: str,
                 sizes: Mapping[str, float]) -> None:
    for hollow in (False, True):
        part = [row for row in rows if row.verified != hollow]
        if not part:
            continue
        for row in part:  # drawn singly, because each mark may have its own size
            (left, x, right), (down, y, up) = _interval(row)
            axes.errorbar(x, y, [[y - down], [up - y]], [[x - left], [right - x]], fmt="none", ecolor=color,
                          elinewidth=1.2, alpha=0.5, zorder=2.5)
            axes.plot(x, y, marker, ms=sizes.get(row.id, size), color=color, mfc="white" if hollow else color,
                      mec=color if hollow else "white", mew=1.0, zorder=3)
        axes.plot([], [], marker, ms=size, color=color, mfc="white" if hollow else color,
                  mec=color if hollow else "white", mew=1.0, label=f"{label}, not verified" if hollow else label)


def _interval(row: FrontRow) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Low end, value and high end of the latency in ms and of the top-1 in per cent; all alike without an interval."""
    latency_ms, top1 = row.best_latency_ms or 0.0, row.best_top1 or 0.0
    ends = ((row.latency_ms_low, row.latency_ms_high) if row.verified
            else (row.latency_ms_predicted_low, row.latency_ms_predicted_high))
    low_ms, high_ms = (latency_ms if end is None else end for end in ends)
    low, high = (top1 if end is None else end for end in (row.top1_test_low, row.top1_test_high))
    return ((min(low_ms, latency_ms), latency_ms, max(high_ms, latency_ms)),
            (100 * min(low, top1), 100 * top1, 100 * max(high, top1)))


def _draw_trials(axes: Axes, rows: Sequence[FrontRow], trials: Sequence[Mapping[str, Any]], info: PlotInfo) -> None:
    if is_race(trials):
        draw_lineage(axes, rows, trials, info.cap_ms)
        _cap(axes, info.cap_ms)
        _legend(axes)
        return
    title(axes, "What the search saw: estimates")
    axes.set_ylabel(f"{meaning(info.accuracy)} (%)")
    axes.set_xlabel("predicted latency (ms, log scale)")
    points = [(trial["latency_ms_predicted"], 100 * trial["top1_proxy"]) for trial in trials
              if is_number(trial.get("latency_ms_predicted")) and is_number(trial.get("top1_proxy"))]
    chosen = [(row.latency_ms_predicted, 100 * row.top1_proxy) for row in rows if row.is_finalist
              and row.latency_ms_predicted is not None and row.top1_proxy is not None]
    if not points and not chosen:
        axes.text(0.5, 0.5, "no trials", transform=axes.transAxes, ha="center", color=MUTED)
        return
    if points:
        axes.scatter([x for x, _ in points], [y for _, y in points], s=16, color=MUTED, alpha=0.35, lw=0, zorder=2,
                     label=f"{len(points)} trials")
    if chosen:
        axes.scatter([x for x, _ in chosen], [y for _, y in chosen], s=34, facecolor="none", edgecolor=FRONT, lw=1.4,
                     zorder=3, label="chosen as finalists")
    believed = [(row.latency_ms_predicted, row.top1_estimated, row.top1_estimated_low, row.top1_estimated_high)
                for row in rows if row.is_finalist]
    for number, (x, middle, low, high) in enumerate(believed):
        if x is None or middle is None or low is None or high is None:
            continue
        axes.errorbar([x], [100 * middle], [[100 * (middle - low)], [100 * (high - middle)]], fmt="_", ms=7, lw=1.1,
                      color=FRONT, zorder=3, label=None if number else "believed by the model of all trials, 90 %")
    percent_axis(axes)
    log_axis(axes, [x for x, _ in points + chosen] + ([info.cap_ms] if info.cap_ms else []))
    _cap(axes, info.cap_ms)
    _legend(axes)


def _legend(axes: Axes, note: str = "") -> None:
    """Draw the legend below the axes, where it covers nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.01, -0.115), ncol=3 if note else 1, frameon=False, fontsize=8.5,
                handletextpad=0.5, handlelength=1.2, columnspacing=1.4, title=note or None, title_fontsize=7.5,
                alignment="left", borderpad=0.2)


def _bars(rows: Sequence[FrontRow]) -> list[Line]:
    """The intervals as lines in data coordinates."""
    return [line for (left, x, right), (down, y, up) in map(_interval, rows)
            for line in (((left, y), (right, y)), ((x, down), (x, up)))]


def _steps(corners: Sequence[tuple[float, float]]) -> list[Line]:
    return [line for (x0, y0), (x1, y1) in pairwise(corners) for line in (((x0, y0), (x1, y0)), ((x1, y0), (x1, y1)))]


def _cap_line(axes: Axes, cap_ms: float | None) -> list[Line]:
    low, high = axes.get_ylim()
    return [] if cap_ms is None else [((cap_ms, low), (cap_ms, high))]


def _limits(axes: Axes, rows: Sequence[FrontRow], cap_ms: float | None) -> None:
    latencies, shares = zip(*map(_interval, rows), strict=True)
    log_axis(axes, [end for low, _, high in latencies for end in (low, high)] + ([cap_ms] if cap_ms else []))
    low, high = min(share[0] for share in shares), max(share[2] for share in shares)
    room = max(0.12 * (high - low), 0.5)
    axes.set_ylim(max(low - 1.2 * room, -1.0), min(high + 1.2 * room, 100.0 + 0.7 * room))
    percent_axis(axes)


def _cap(axes: Axes, cap_ms: float | None) -> None:
    if cap_ms is not None:
        axes.axvline(cap_ms, color=CAP, lw=1.2, ls=(0, (4, 3)), zorder=1, label=f"cap {cap_ms:.4g} ms")
