"""The picture of a certificate: rank correlations with their intervals, and each estimate against full training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.accuracy.certificate import ranked
from hwnas.front.picture import CAP, FRONT, OTHER
from hwnas.pictures.style import INK, MUTED, new_figure, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ACROSS = 3


def certificate_figure(content: Mapping[str, Any]) -> Figure:
    """Left: Kendall's tau of each estimator, beside what full training reaches. Right: estimates against truth, marked
    by cost."""
    labels = [label for label, _ in ranked(content)]
    down = max(1, math.ceil(len(labels) / _ACROSS))
    height = 1.9 + 2.6 * down
    heading = (f"How well estimates rank: {content['space']['name']} on {_data(content)}, "
               f"{content['dataset']['image_size']} px")
    with new_figure(13.5, height, heading, _subtitle(content), left=0.02) as figure:
        halves = figure.add_gridspec(1, 2, left=0.02, right=0.985, top=1 - 1.3 / height, bottom=0.62 / height,
                                     width_ratios=(1, 1.9), wspace=0.13)
        inner = halves[0].subgridspec(1, 2, width_ratios=(0.38, 1), wspace=0)
        _draw_taus(figure.add_subplot(inner[1]), content, labels)
        grid = halves[1].subgridspec(down, _ACROSS, hspace=0.62, wspace=0.28)
        for index, label in enumerate(labels):
            axes = figure.add_subplot(grid[index // _ACROSS, index % _ACROSS])
            _draw_scatter(axes, content, label, first=index % _ACROSS == 0)
    return figure


def _data(content: Mapping[str, Any]) -> str:
    """The data set's name; `imagefolder` says little, its folder's name more."""
    data = content["dataset"]
    return str(data["folder"] if data["name"] == "imagefolder" and data.get("folder") else data["name"])


def _subtitle(content: Mapping[str, Any]) -> str:
    truth = content["truth"]
    times = f"{truth['trainings']} trainings in full ({truth['epochs']} epochs)"
    dear = "MACs" if content["cost"] == "macs" else "predicted latency"
    return (f"{truth['networks']} networks, {times} · {content['host']} · {str(content['created'])[:10]} · marks are "
            f"larger with {dear}, red intervals hold 0")


def _draw_taus(axes: Axes, content: Mapping[str, Any], labels: Sequence[str]) -> None:
    title(axes, f"Kendall's tau with {content['level']:.0%} intervals")
    axes.set_xlabel("rank correlation with full training")
    one = content["ceiling"]
    if one is not None and one["kendall_tau"] is not None:
        axes.axvspan(one["low"], one["high"], color=MUTED, alpha=0.1, lw=0, zorder=0)
        axes.axvline(one["kendall_tau"], color=MUTED, lw=1, ls="--", zorder=1, label="one full training, other seed")
    for at, label in enumerate(labels):
        entry = content["estimators"][label]
        color = FRONT if label == content["best"] else CAP if (entry["low"] or 0) <= 0 else OTHER
        axes.plot([entry["low"], entry["high"]], [at, at], color=color, lw=2.2, alpha=0.6, solid_capstyle="round")
        axes.plot(entry["kendall_tau"], at, "o", color=color, mec="white", ms=7, zorder=3)
        axes.annotate(f"{entry['kendall_tau']:.2f}", (entry["kendall_tau"], at), (0, 7), textcoords="offset points",
                      ha="center", fontsize=8.5, color=INK)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(range(len(labels)), [f"{label}\n{_cost(content['estimators'][label])}" for label in labels],
                    color=INK, fontsize=8.5)
    axes.set_xlim(right=1.04)
    axes.set_ylim(len(labels) - 0.4, -0.75 if one is None else -0.95)
    axes.grid(visible=False, axis="y")
    if one is not None:
        axes.legend(loc="upper left", frameon=True, facecolor="white", edgecolor="none", framealpha=1, fontsize=8,
                    borderaxespad=0)


def _cost(entry: Mapping[str, Any]) -> str:
    share = entry["share_of_full"]
    return f"{share:.1%} of a training" if share >= 0.001 else f"{entry['cpu_seconds_amortised']:.2g} s"


def _draw_scatter(axes: Axes, content: Mapping[str, Any], label: str, first: bool) -> None:
    title(axes, label)
    found = [(one["estimates"][label], one["top1"], one["cost"]) for one in content["networks"]
             if one["estimates"].get(label) is not None and one["top1"] is not None]
    x, y, cost = (np.array(values) for values in zip(*found, strict=True))
    dearness = np.argsort(np.argsort(cost)) / max(1, len(cost) - 1)
    axes.scatter(100 * x, 100 * y, s=18 + 46 * dearness, color=FRONT if label == content["best"] else OTHER,
                 edgecolor="white", lw=0.8, zorder=3)
    axes.margins(0.12)
    axes.set_xlabel("estimate (%)", fontsize=8.5)
    if first:
        axes.set_ylabel("test top-1 in full (%)", fontsize=8.5)
