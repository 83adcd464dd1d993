"""The picture: mean hypervolume share against evaluations, with a band of one standard error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.sampler.contest.options import AWARE, OURS
from experiments.sampler.contest.scores import EVERY, Scores, mean_and_error
from hwnas.pictures import INK, MUTED, blank_figure, figure_bytes, style

COLOURS = {"hwnas": "#1f5fbf", "linas": "#7a5af8", "stratified": "#d444f1", "tpe": "#c2410c",
           "tpe_multivariate": "#e9a23b", "nsga2": "#0e9384", "nsga2_small": "#5fb8ab", "gp": "#667085",
           "random": "#98a2b3"}
FIRST = 10  # evaluations: before, all is chance
_GAP = 0.052  # between two labels, of the axes' height
_TICKS = (10, 25, 50, 100, 200, 400, 800, 1600, 3200, 6400, 12800)


def picture(found: Sequence[Scores], title: str, subtitle: str) -> bytes:
    """A line a sampler, named at its end; peers that know latency are dashed."""
    figure = blank_figure(8.6, 5.4)
    with style():
        axes = figure.add_axes((0.085, 0.105, 0.735, 0.735))
        figure.text(0.085, 0.935, title, fontsize=13.5, fontweight="bold", color=INK)
        figure.text(0.085, 0.89, subtitle, fontsize=9, color=MUTED)
        ends = [(one.sampler, *_line(axes, one)) for one in found]
        evals = max(one.evals for one in found)
        first = min(FIRST, max(evals // 2, 1))
        axes.set(xscale="log", xlim=(first, max(evals, first + 1)), xlabel="networks evaluated (log scale)",
                 ylabel="share of the true hypervolume (%)")
        ticks = [tick for tick in _TICKS if first <= tick < 0.8 * evals] + [evals]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        low = min(100 * _mean(one, first) for one in found)
        axes.set_ylim(max(0.0, low - 2), 100.5)
        _names(axes, ends)
    return figure_bytes(figure, "png")


def _line(axes: Any, one: Scores) -> tuple[int, float]:
    """Draws it; where it ends."""
    at = sorted({*range(EVERY, one.evals + 1, EVERY), one.evals, min(FIRST, one.evals)})
    found = [mean_and_error(one.shares[:, evals - 1]) for evals in at]
    mean = 100 * np.array([value for value, _ in found])
    error = 100 * np.array([error or 0.0 for _, error in found])
    colour = COLOURS[one.sampler]
    mine = one.sampler == OURS
    axes.fill_between(at, mean - error, mean + error, color=colour, alpha=0.16, lw=0, zorder=3 if mine else 2)
    axes.plot(at, mean, color=colour, lw=2.4 if mine else 1.4, ls="--" if one.sampler in AWARE else "-",
              zorder=4 if mine else 3)
    return one.evals, float(mean[-1])


def _mean(one: Scores, evals: int) -> float:
    return float(one.shares[:, min(evals, one.evals) - 1].mean())


def _names(axes: Any, ends: Sequence[tuple[str, int, float]]) -> None:
    """Names right of the axes, moved apart, each led to from the end of its line."""
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    ordered = sorted(ends, key=lambda end: end[2])
    heights = apart([(y - low) / (high - low) for _, _, y in ordered], _GAP)
    for (name, evals, y), height in zip(ordered, heights, strict=True):
        text = name if evals >= right else f"{name} (to {evals})"
        label = axes.transAxes.inverted().transform(axes.transData.transform((evals, y)))
        axes.plot([label[0], 1.015, 1.03], [label[1], label[1], height], transform=axes.transAxes, clip_on=False,
                  color=COLOURS[name], lw=0.7, ls=":" if evals < right else "-", zorder=1)
        axes.text(1.035, height, text, transform=axes.transAxes, va="center", fontsize=9, color=COLOURS[name],
                  fontweight="bold" if name == OURS else "normal")


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as keeps neighbours `gap` apart, and below 1."""
    placed: list[list[float]] = []  # blocks of touching labels: wanted heights, each less its place in the block
    for height in heights:
        placed.append([height])
        while len(placed) > 1 and _bottom(placed[-1]) < _bottom(placed[-2]) + gap * len(placed[-2]):
            upper = placed.pop()
            placed[-1] += [wanted - gap * len(placed[-1]) for wanted in upper]
    found = [_bottom(block) + gap * index for block in placed for index in range(len(block))]
    for index in range(len(found)):
        found[-1 - index] = min(found[-1 - index], 1.0 - gap * index)
    return found


def _bottom(block: Sequence[float]) -> float:
    return float(np.mean(block))
