"""The pictures of a choice: p99 against load for each deployment, and what a million images cost against top-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hwnas.choose.choice import Option, Slo
from hwnas.choose.traffic import Traffic
from hwnas.pictures import INK, MUTED, new_figure, percent_axis, place_labels, plain_log_ticks, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POINTS = 9
_DRAWN = 6  # curves; more cannot be told apart
_COLORS = ("#1d4ed8", "#c2410c", "#047857", "#7c3aed", "#b45309", "#0e7490")


def choice_figure(options: Sequence[Option], traffic: Traffic, slo: Slo, date: str) -> Figure:
    """`options`, cheapest first."""
    best = options[0]
    where = (f"{traffic.peak:g} queries/s at the peak · p99 within {slo.p99_ms:g} ms · "
             f"points: measured by LoadGen, lines: interpolated · {date}")
    with new_figure(11.4, 4.8, f"{best.served.said}: {best.machines} × {best.served.host}"[:96], where, left=0.06
                    ) as figure:
        load, money = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.06, right=0.985, top=0.79, bottom=0.13, wspace=0.2)
        _draw_load(load, options[:_DRAWN], traffic, slo)
        _draw_money(money, options)
    return figure


def _short(option: Option) -> str:
    served = option.served
    return f"{(served.name or served.id)[:24]}, {served.target}, b{served.curve.batch} s{served.curve.streams}"


def _draw_load(axes: Axes, options: Sequence[Option], traffic: Traffic, slo: Slo) -> None:
    title(axes, "p99 against the load of one machine")
    for option, color in zip(options, _COLORS, strict=False):
        curve = option.served.curve
        rates = np.linspace(curve.runs[0].rate, curve.runs[-1].rate, _POINTS)
        axes.plot(rates, [curve.p99_ms(rate) for rate in rates], color=color, lw=1.3,
                  label=_short(option))
        axes.plot([run.rate for run in curve.runs], [run.p99_ms for run in curve.runs], "o", color=color, ms=4.5)
    axes.axhline(slo.p99_ms, color=INK, lw=1.0, ls=(0, (4, 3)))
    shown = [slo.p99_ms, *(run.p99_ms for option in options for run in option.served.curve.runs)]
    low, high = 0.3 * min(shown), 3 * max(shown)
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    plain_log_ticks(axes.yaxis, low, high)
    axes.set_xlabel("queries/s")
    axes.set_ylabel("ms")
    axes.set_xlim(left=0)
    axes.legend(fontsize=7.5, frameon=False, loc="upper left")


def _draw_money(axes: Axes, options: Sequence[Option]) -> None:
    title(axes, "Top-1 against the price of a million images (bars: interval)")
    axes.set_ylabel("%")
    for number, option in enumerate(options):
        color = _COLORS[number] if number < _DRAWN else MUTED
        top1 = 100 * option.served.top1
        axes.plot([option.per_million_low, option.per_million_high], [top1] * 2, color=color, lw=1.2)
        axes.plot([option.per_million], [top1], "o", color=color, ms=6)
    axes.set_xlabel("price of a million images, in the prices' currency")
    axes.set_xlim(left=0)
    percent_axis(axes)
    place_labels(axes, [(option.per_million, 100 * option.served.top1, _short(option), INK)
                        for option in options[:_DRAWN]])
