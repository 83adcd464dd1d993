"""The picture: verified fronts in one plot, and the hypervolume after each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from experiments.common import COLOURS
from experiments.sampler_search.fronts import fronts, own_front
from experiments.sampler_search.reading import SearchRun
from experiments.sampler_search.scores import Scored
from hwnas.front.comparison import describe
from hwnas.front.picture import BASELINE
from hwnas.front.rows import FrontRow
from hwnas.pictures import INK, MUTED, Line, blank_figure, figure_bytes, place_labels, plain_log_ticks, style, title

NAMED = {"hwnas": "#1f5fbf", "nsga2": "#0e9384", "nsga3": "#7a5af8", "tpe": "#e9a23b", "gp": "#d444f1",
         "random": "#98a2b3"}
MARKERS, SIZES = "osv^P", (8.5, 6.5, 5.0)  # a network that two searches found shows both


def picture(found: Sequence[Scored], heading: str, subtitle: str) -> bytes:
    """Left: test top-1 against measured latency, first verified seed. Right: a thin line a search, a thick one a
    sampler's mean."""
    figure = blank_figure(12.2, 5.6)
    names = list(dict.fromkeys(one.run.sampler for one in found))
    with style():
        left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
        figure.subplots_adjust(left=0.06, right=0.985, top=0.83, bottom=0.11, wspace=0.16)
        figure.text(0.06, 0.935, heading, fontsize=14, fontweight="bold", color=INK)
        figure.text(0.06, 0.89, subtitle, fontsize=9.5, color=MUTED)
        _draw_fronts(left, _verified([one.run for one in found]), names)
        _draw_curves(right, found, names)
    return figure_bytes(figure, "png")


def colour(name: str, names: Sequence[str]) -> str:
    """Of a sampler; third parties' take what is left."""
    return NAMED.get(name, COLOURS[names.index(name) % len(COLOURS)])


def _verified(runs: Sequence[SearchRun]) -> list[SearchRun]:
    """Runs with verified finalists of the first seed that has any."""
    able = [run for run in runs if run.finalists]
    return [run for run in able if run.seed == able[0].seed]


def _draw_fronts(axes: Any, runs: Sequence[SearchRun], names: Sequence[str]) -> None:
    title(axes, f"Verified, seed {runs[0].seed}: test set, in the deployment runtime" if runs else "Verified")
    axes.set(ylabel="test top-1 (%)", xlabel="measured latency of one batch (ms, log scale)")
    if not runs:
        axes.text(0.5, 0.5, "no front was verified", transform=axes.transAxes, ha="center", color=MUTED)
        return
    lines: list[Line] = []
    joint = {one.sampler: one.joint for one in fronts(runs)}
    for run in runs:
        lines += _draw_run(axes, run, names, joint[run.sampler])
    baselines = runs[0].baselines
    lines += _points(axes, baselines, BASELINE, "D", 6.0, "baselines (timm)")
    shown = [row for run in runs for row in run.finalists] + baselines
    _limits(axes, lines)
    axes.legend(loc="lower right", frameon=True, framealpha=0.92, edgecolor="none", fontsize=8.5, title_fontsize=7.5,
                title="bars: 95 % of top-1, 90 % of latency; hollow: dominated in its own search", alignment="left")
    place_labels(axes, [(*_at(row), describe(row) if row.is_baseline else "", BASELINE) for row in shown],
                 lines=lines)


def _draw_run(axes: Any, run: SearchRun, names: Sequence[str], joint: int) -> list[Line]:
    index, shade = names.index(run.sampler), colour(run.sampler, names)
    marker, size = MARKERS[index % len(MARKERS)], SIZES[min(index, len(SIZES) - 1)]
    on = own_front(run)
    off = [row for row in run.finalists if row not in on]
    corners = [_at(row) for row in on]
    axes.plot([x for x, _ in corners], [y for _, y in corners], color=shade, lw=1.4, alpha=0.55, zorder=2,
              drawstyle="steps-post")
    label = f"{run.sampler}: {joint} of {len(run.finalists)} finalists on the joint front"
    lines = _points(axes, on, shade, marker, size, label)
    lines += _points(axes, off, shade, marker, size, "", hollow=True)
    return lines + [line for (x0, y0), (x1, y1) in pairwise(corners) for line in (((x0, y0), (x1, y0)),
                                                                                   ((x1, y0), (x1, y1)))]


def _points(axes: Any, rows: Sequence[FrontRow], shade: str, marker: str, size: float, label: str,
            hollow: bool = False) -> list[Line]:
    """Draws points with their intervals, which it returns as lines."""
    lines: list[Line] = []
    for row in rows:
        x, y = _at(row)
        across = (row.latency_ms_low or x, row.latency_ms_high or x)
        up = tuple(y if end is None else 100 * end for end in (row.top1_test_low, row.top1_test_high))
        lines += [((across[0], y), (across[1], y)), ((x, up[0]), (x, up[1]))]
    for (x0, y0), (x1, y1) in lines:
        axes.plot([x0, x1], [y0, y1], color=shade, lw=1.2, alpha=0.5, zorder=2.5)
    if rows:
        axes.plot([_at(row)[0] for row in rows], [_at(row)[1] for row in rows], marker, ms=size, mew=1.0, zorder=3,
                  color=shade, mfc="white" if hollow else shade, mec=shade if hollow else "white", label=label or None)
    return lines


def _at(row: FrontRow) -> tuple[float, float]:
    return row.latency_ms or 0.0, 100 * (row.top1_test or 0.0)


def _limits(axes: Any, lines: Sequence[Line]) -> None:
    """Room around all intervals, more below for the legend."""
    x, y = np.array(lines).reshape(-1, 2).T
    low, high = float(x.min()) / 1.18, float(x.max()) * 1.18
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    plain_log_ticks(axes.xaxis, low, high)
    room = max(0.12 * float(y.max() - y.min()), 0.5)
    axes.set_ylim(float(y.min()) - 2.2 * room, float(y.max()) + room)


def _draw_curves(axes: Any, found: Sequence[Scored], names: Sequence[str]) -> None:
    title(axes, "Search: proxy top-1 and predicted latency")
    axes.set(xlabel="networks evaluated", ylabel="hypervolume (% of what all searches found together)")
    budget = len(found[0].share)
    at = np.arange(1, budget + 1)
    for name in names:
        mine = [one for one in found if one.run.sampler == name]
        shares = 100 * np.array([one.share for one in mine])
        shade = colour(name, names)
        if len(shares) > 1:
            for row in shares:
                axes.step(at, row, where="post", color=shade, lw=0.8, alpha=0.4, zorder=2)
        mean = shares.mean(axis=0)
        label = f"{name}, mean of {len(shares)} seeds" if len(shares) > 1 else name + _reached(axes, mine[0], found[0])
        axes.step(at, mean, where="post", color=shade, lw=2.2 if name == names[0] else 1.5, zorder=3, label=label)
        axes.plot(budget, mean[-1], "o", ms=4.5, color=shade, zorder=4, clip_on=False)
    axes.set_xlim(1, max(budget, 2))
    axes.set_ylim(0, 105)
    axes.legend(loc="lower right", frameon=True, framealpha=0.92, edgecolor="none", fontsize=8.5)


def _reached(axes: Any, one: Scored, first: Scored) -> str:
    """Marks where the first search came to the final hypervolume of `one`, and says so; nothing for itself."""
    mine = first.needed(float(one.hypervolume[-1]))
    if one is first:
        return ""
    if mine is None:
        return f": {first.run.sampler} did not get so far"
    height = 100 * float(one.share[-1])
    axes.plot([mine, len(one.share)], [height, height], ls=":", lw=1.2, color=MUTED, zorder=2.5)
    return f": {first.run.sampler} got so far after {mine}"
