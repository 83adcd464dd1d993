"""The picture of a validation: predicted against measured, errors, the noise beside them, the intervals' coverage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hwnas.latency.agreement import Compared
from hwnas.pictures.style import INK, MUTED, plain_log_ticks, style, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND_5, BAND_10, NOISE, OUTSIDE = "#d7e4f7", "#eef3fb", "#c2410c", "#b42318"
GROUPS = {"random": ("#1f5fbf", "o", "random"), "front": ("#0e9384", "D", "near the predicted front")}
OTHER = ("#667085", "s", "other")


def validation_figure(found: Compared, groups: Sequence[str], report: Mapping[str, Any]) -> Figure:
    """Four panels of `found`, whose networks are of `groups`; `report` is the content of the validation's file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 9.4), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    with style():
        (scatter, errors), (shares, cover) = figure.subplots(2, 2)
        figure.subplots_adjust(left=0.07, right=0.985, top=0.875, bottom=0.06, wspace=0.18, hspace=0.3)
        figure.suptitle(f"{report['target']} on {report['space']['name']}: predicted against measured latency",
                        x=0.07, y=0.972, ha="left", fontsize=14, fontweight="bold", color=INK)
        figure.text(0.07, 0.924, _subtitle(report), fontsize=9.5, color=MUTED, ha="left")
        _draw_scatter(scatter, found, groups)
        _draw_errors(errors, found, groups, report)
        _draw_shares(shares, found)
        _draw_coverage(cover, found, report)
    return figure


def _subtitle(report: Mapping[str, Any]) -> str:
    invalid = f", {report['n_invalid']} INVALID" if report["n_invalid"] else ""
    return (f"{report['host']['name']} · {report['runtime']} · {report['n']} networks never used in calibration"
            f"{invalid} · measured {str(report['measured_at'])[:10]}")


def _draw_scatter(axes: Axes, found: Compared, groups: Sequence[str]) -> None:
    title(axes, "Predicted and measured latency")
    axes.set_xlabel("measured (ms, log scale)")
    axes.set_ylabel("predicted (ms, log scale)")
    ends = np.array([min(found.measured_ms.min(), found.predicted_ms.min()) / 1.15,
                     max(found.measured_ms.max(), found.predicted_ms.max()) * 1.15])
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color=BAND_10, lw=0, zorder=0.5, label="± 10 %")
    axes.fill_between(ends, ends * 0.95, ends * 1.05, color=BAND_5, lw=0, zorder=0.6, label="± 5 %")
    axes.plot(ends, ends, color=MUTED, lw=0.8, zorder=1)
    for chosen, (color, marker, label) in _by_group(groups):
        part = found[chosen]
        axes.errorbar(part.measured_ms, part.predicted_ms, ecolor=color, fmt="none", elinewidth=0.8, alpha=0.35,
                      yerr=[part.predicted_ms - part.low_ms, part.high_ms - part.predicted_ms], zorder=2)
        axes.plot(part.measured_ms, part.predicted_ms, marker, ms=4.5, color=color, mec="white", mew=0.6, zorder=3,
                  label=f"{len(part)} {label}")
    for axis, limit in (("x", axes.set_xlim), ("y", axes.set_ylim)):
        _log_axis(axes, axis, ends)
        limit(*ends)
    _legend(axes, "upper left", "bars: 90 % interval")


def _draw_errors(axes: Axes, found: Compared, groups: Sequence[str], report: Mapping[str, Any]) -> None:
    title(axes, "Error by latency; quartiles: median and 90th percentile")
    axes.set_xlabel("measured (ms, log scale)")
    axes.set_ylabel("predicted / measured − 1 (%)")
    ends = np.array([found.measured_ms.min() / 1.15, found.measured_ms.max() * 1.15])
    axes.axhspan(-10, 10, color=BAND_10, lw=0, zorder=0.5)
    axes.axhspan(-5, 5, color=BAND_5, lw=0, zorder=0.6)
    axes.axhline(0, color=MUTED, lw=0.8, zorder=1)
    for chosen, (color, marker, label) in _by_group(groups):
        part = found[chosen]
        for inside in (True, False):
            some = part[part.inside == inside]
            if len(some):
                axes.plot(some.measured_ms, 100 * some.error, marker, ms=4.5, color=color, zorder=3, mew=1.0,
                          mec="white" if inside else OUTSIDE,
                          label=None if inside else f"{label}, outside its interval")
    for index, part in enumerate(report["quantiles"]):
        x = [part["from_ms"], part["to_ms"]]
        axes.plot(x, [100 * part["bias"]] * 2, color=INK, lw=1.6, zorder=4, label=None if index else "median error")
        for sign in (-1, 1):
            axes.plot(x, [sign * 100 * part["error_p90"]] * 2, color=INK, lw=1.0, ls=(0, (3, 2)), zorder=4,
                      label=None if index or sign < 0 else "90 % are nearer than this")
    furthest = max(12.0, 115 * float(np.abs(found.error).max()))
    axes.set_ylim(-furthest, furthest * 1.75)
    _log_axis(axes, "x", ends)
    axes.set_xlim(*ends)
    _legend(axes, "upper left")


def _draw_shares(axes: Axes, found: Compared) -> None:
    title(axes, "Share of networks nearer than …, and the noise of measuring")
    axes.set_xlabel("error (%)")
    axes.set_ylabel("networks (%)")
    halves = found.halves_ms[found.converged & np.isfinite(found.halves_ms).all(axis=1)]
    noise = np.abs(np.log(halves[:, 0] / halves[:, 1])) / 2
    error = np.abs(found.error)
    right = 100 * max(0.14, float(np.quantile(error, 0.98)) * 1.1)
    for values, color, dashes, label in (
            (noise, NOISE, (0, (4, 2)), f"noise ceiling: half the difference of two halves ({len(noise)} networks)"),
            (error, INK, "-", f"error of prediction ({len(error)} networks)")):
        if len(values):
            axes.step([0.0, *np.sort(100 * values), 100.0], [0.0, *(100 * np.arange(1, len(values) + 1) / len(values)),
                                                             100.0], where="post", color=color, ls=dashes, lw=1.6,
                      label=label)
    for at, asked in ((5, 90.0), (10, 98.5)):
        share = 100 * float(np.mean(error <= at / 100))
        axes.plot([at], [asked], "_", color=MUTED, ms=16, mew=2.2, zorder=4,
                  label="asked: 90 % within 5 %, 98.5 % within 10 %" if at == 5 else None)
        axes.plot([at], [share], "o", color=INK, ms=5, zorder=5)
        axes.annotate(f"{share:.1f} % within {at} %", (at, share), (6, -13), textcoords="offset points", fontsize=9,
                      color=INK)
    axes.set_xlim(0, right)
    axes.set_ylim(0, 104)
    _legend(axes, "lower right")


def _draw_coverage(axes: Axes, found: Compared, report: Mapping[str, Any]) -> None:
    title(axes, "Coverage of the predicted interval, as it is and scaled")
    axes.set_xlabel("width, in predicted 90 % intervals")
    axes.set_ylabel("networks inside (%)")
    needed = np.sort(interval_scales(found))
    axes.axhspan(85, 95, color=BAND_5, lw=0, zorder=0.5, label="asked: 85 to 95 %")
    axes.step([0.0, *needed, max(9.0, needed[-1])], [0.0, *(100 * np.arange(1, len(needed) + 1) / len(needed)), 100.0],
              where="post", color=INK, lw=1.6, label=f"all {len(found)} networks")
    axes.axvline(1, color=MUTED, lw=0.9, ls=(0, (4, 3)))
    share = 100 * float(report["coverage"])
    axes.plot([1], [share], "o", color=INK, ms=5, zorder=5)
    axes.annotate(f"{share:.1f} % inside\nmedian half-width {report['median_half_width']:.1%}", (1, share), (8, -30),
                  textcoords="offset points", fontsize=9, color=INK)
    by_quarter = ", ".join(f"{part['coverage']:.0%}" for part in report["quantiles"])
    axes.plot([], [], " ", label=f"by quartile of latency: {by_quarter}")
    axes.set_xlim(0, 2.5)
    axes.set_ylim(0, 104)
    _legend(axes, "lower right")


def interval_scales(found: Compared) -> np.ndarray:
    """By how much each interval must be stretched (in log latency, each side on its own) to reach the measured time."""
    away = np.log(found.measured_ms / found.predicted_ms)
    side = np.where(away >= 0, np.log(found.high_ms / found.predicted_ms), np.log(found.predicted_ms / found.low_ms))
    return np.asarray(np.abs(away) / np.maximum(side, 1e-9))


def _by_group(groups: Sequence[str]) -> Iterable[tuple[np.ndarray, tuple[str, str, str]]]:
    for name in sorted(set(groups), reverse=True):
        yield np.array([group == name for group in groups], bool), GROUPS.get(name, OTHER)


def _legend(axes: Axes, place: Literal["upper left", "lower right"], note: str | None = None) -> None:
    axes.legend(loc=place, frameon=True, framealpha=0.92, edgecolor="none", fontsize=8.5, handletextpad=0.5,
                handlelength=1.6, title=note, title_fontsize=7.5, alignment="left")


def _log_axis(axes: Axes, which: str, ends: np.ndarray) -> None:
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    plain_log_ticks(axes.xaxis if which == "x" else axes.yaxis, float(ends[0]), float(ends[1]))
