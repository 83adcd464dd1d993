"""Figures of each method on the same networks, who wins where, and the picture."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.common import COLOURS, figures, percent, text_table
from experiments.latency.peers.methods import Method
from hwnas.errors import MeasurementInvalid
from hwnas.latency.table import TimedNetwork
from hwnas.pictures import INK, MUTED, blank_figure, figure_bytes, plain_log_ticks, style

MEASURES = (("mean_error", "mean error"), ("within_5", "within 5 %"), ("within_10", "within 10 %"),
            ("spearman", "Spearman"), ("kendall", "Kendall"))
BAND = "#eef3fb"


@dataclass(frozen=True)
class Evaluated:
    """Predictions [n] of every method for the held-out networks; figures on those that all methods predict."""

    measured_ms: np.ndarray
    predicted_ms: dict[str, np.ndarray]
    common: np.ndarray
    summaries: dict[str, dict[str, Any]]
    rows: list[dict[str, Any]]


def evaluated(methods: Sequence[Method], held: Sequence[TimedNetwork], drawn: Collection[str],
              quiet_ms: float) -> Evaluated:
    """Predict the `held` networks by every method; blocks were timed alone for those of `drawn` ids."""
    architectures = [one.architecture for one in held]
    measured = np.array([one.measurement.at_ms(quiet_ms) for one in held])
    predicted = {method.name: method.predict(architectures) for method in methods}
    common = np.array([one.id in drawn for one in architectures])
    for values in predicted.values():
        common &= np.isfinite(values) & (values > 0)
    if not common.any():
        raise MeasurementInvalid("no held-out network is predicted by every method: too few parts could be timed. Give "
                                 "the command again on a quieter machine.")
    found = {}
    for method in methods:
        values = predicted[method.name]
        everywhere = bool(np.isfinite(values).all())
        found[method.name] = {"n": int(common.sum()), **figures(values[common], measured[common]),
                              "n_measured": method.n_measured,
                              "seconds": round(method.seconds, 1) if math.isfinite(method.seconds) else None,
                              "remark": method.remark, "all": figures(values, measured) if everywhere else None}
    rows = [{"id": one.architecture.id, "group": one.origin, "compared": int(common[index]),
             "measured_ms": round(float(measured[index]), 6),
             **{name: round(float(values[index]), 6) for name, values in predicted.items()}}
            for index, one in enumerate(held)]
    return Evaluated(measured, predicted, common, found, rows)


def describe(found: Evaluated) -> str:
    """The table, what each method is, and where a peer wins."""
    rows = [["method", *(title for _, title in MEASURES), "measurements", "seconds", "all: mean", "within 10 %"]]
    for name, one in found.summaries.items():
        every = one["all"] or {}
        rows.append([name, *(_cell(key, one[key]) for key, _ in MEASURES), str(one["n_measured"]),
                     "–" if one["seconds"] is None else f"{one['seconds']:.0f}", percent(every.get("mean_error")),
                     percent(every.get("within_10"))])
    remarks = [f"  {name}: {one['remark']}" for name, one in found.summaries.items()]
    return "\n".join([f"{found.common.sum()} held-out networks that every method predicts; behind them the mean error "
                      f"on all {len(found.common)}", text_table(rows), "", *remarks, "", verdict(found)])


def verdict(found: Evaluated) -> str:
    """Where another method is better than ours, and where none is."""
    mine = found.summaries["ours"]
    wins = []
    for key, title in MEASURES:
        sign = -1 if key == "mean_error" else 1
        better = [(name, one) for name, one in found.summaries.items()
                  if name != "ours" and one[key] is not None and sign * one[key] > sign * mine[key]]
        wins += [f"{name} beats ours in {title}: {_cell(key, one[key])} against {_cell(key, mine[key])}"
                 for name, one in better]
    return "\n".join(wins) if wins else "No other method beats ours in any of these figures."


def _cell(key: str, value: float | None) -> str:
    if key in ("spearman", "kendall"):
        return "–" if value is None else f"{value:.4f}"
    return percent(value)


def picture(found: Evaluated, target: str, space: str, host: str) -> bytes:
    """Predicted against measured for each method, and the shares of networks within an error."""
    names = list(found.summaries)
    figure = blank_figure(14.5, 7.4)
    with style():
        columns = -(-len(names) // 2)
        grid = figure.add_gridspec(2, columns + 1, left=0.05, right=0.985, top=0.825, bottom=0.075, wspace=0.32,
                                   hspace=0.42, width_ratios=[*[1.0] * columns, 1.15])
        figure.text(0.05, 0.95, f"{target} on {space}: the same held-out networks predicted", fontsize=14,
                    fontweight="bold", color=INK)
        figure.text(0.05, 0.915, f"{host} · {found.common.sum()} networks that no method has seen · "
                    "band: ± 10 %", fontsize=9.5, color=MUTED)
        for index, name in enumerate(names):
            axes = figure.add_subplot(grid[index // columns, index % columns])
            _scatter(axes, found, name, COLOURS[index % len(COLOURS)])
        shares = figure.add_subplot(grid[:, columns])
        _shares(shares, found)
        handles, labels = shares.get_legend_handles_labels()
        below = len(names) < 2 * columns  # an empty panel: the curves stay free
        (figure if below else shares).legend(handles, labels, frameon=False, fontsize=9, **(
            {"loc": "center", "bbox_to_anchor": grid[1, columns - 1].get_position(figure)} if below else
            {"loc": "lower right"}))
    return figure_bytes(figure, "png")


def _scatter(axes: Any, found: Evaluated, name: str, colour: str) -> None:
    measured, predicted = found.measured_ms[found.common], found.predicted_ms[name][found.common]
    every = np.concatenate([measured, *(values[found.common] for values in found.predicted_ms.values())])
    ends = np.array([every.min() / 1.1, every.max() * 1.1])
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color=BAND, lw=0)
    axes.plot(ends, ends, color=MUTED, lw=0.8)
    axes.plot(measured, predicted, "o", ms=3.5, color=colour, mec="white", mew=0.4)
    axes.set(xscale="log", yscale="log", xlim=(measured.min() / 1.15, measured.max() * 1.15), ylim=ends)
    plain_log_ticks(axes.xaxis, *axes.get_xlim())
    plain_log_ticks(axes.yaxis, *ends)
    one = found.summaries[name]
    axes.set_title(f"{name}\n{percent(one['within_10'])} within 10 %, mean error {percent(one['mean_error'])}",
                   loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")


def _shares(axes: Any, found: Evaluated) -> None:
    axes.set_title("Networks predicted within an error", loc="left", fontsize=10.5, color=INK)
    measured = found.measured_ms[found.common]
    for index, (name, values) in enumerate(found.predicted_ms.items()):
        error = np.sort(np.abs(values[found.common] / measured - 1)) * 100
        axes.step([0, *error, 1e4], [0, *(100 * np.arange(1, len(error) + 1) / len(error)), 100], where="post", lw=1.6,
                  color=COLOURS[index % len(COLOURS)], label=name)
    axes.set(xlim=(0, 40), ylim=(0, 103), xlabel="error (%)", ylabel="networks (%)")
