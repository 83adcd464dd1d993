"""The words and the picture of a validation: errors, the noise beside them, intervals' coverage, worst networks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hwnas.cli.progress import interval, number, text_table
from hwnas.latency.agreement import (
    Compared,
    Verdict,
    finite,
    intervals,
    quartiles,
    shared_kinds,
    summary,
    verdicts,
    worst,
)
from hwnas.latency.held_out_networks import Pace, TimedOne
from hwnas.latency.model import Predictions
from hwnas.pictures import INK, MUTED, new_figure, plain_log_ticks, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


N_WORST, N_KINDS = 10, 6
ABSOLUTE = ("within_5", "within_10", "mean_error", "coverage")  # also given for times as they were in this run
RUN_DRIFT = 0.03  # beside a calibration's quiet time: beyond it, errors may be the machine's and not the model's


def compared(networks: Sequence[TimedOne], predictions: Predictions, quiet_ms: float | None) -> Compared:
    """Arrays of the valid networks; `predictions` has an entry for every network.

    Latencies are at the calibration's speed, at which the reference takes `quiet_ms`; None leaves them as they were.
    """
    valid = np.array([network.measurement.valid for network in networks], bool)
    measurements = [network.measurement for network in networks if network.measurement.valid]
    return Compared(predictions.mean[valid], predictions.low[valid], predictions.high[valid],
                    np.array([measurement.at_ms(quiet_ms) if quiet_ms else measurement.latency_ms
                              for measurement in measurements]),
                    np.array([measurement.halves_ms() for measurement in measurements]).reshape(-1, 2),
                    np.array([measurement.half_width <= measurement.protocol.half_width
                              for measurement in measurements], bool))


def evaluate(networks: Sequence[TimedOne], predictions: Predictions, quiet_ms: float, tied: Pace) -> dict[str, Any]:
    """The report: figures at the top level, then groups, quartiles, worst networks and the kinds they share.

    `quiet_ms` is the reference's quiet time in the calibration, `tied` the pace of this run by its anchors.
    """
    valid = [network for network in networks if network.measurement.valid]
    comparison = compared(networks, predictions, quiet_ms / tied.factor)
    figures = summary(comparison)
    absolute = summary(compared(networks, predictions, None))
    groups = {name: summary(comparison[np.array([network.group == name for network in valid], bool)])
              for name in sorted({network.group for network in valid})}
    runs = [network.measurement.quiet_ms for network in valid]
    run_ms = float(np.median(runs)) if runs else None
    figures |= {f"{name}_absolute": absolute[name] for name in ABSOLUTE}
    untied = summary(compared(networks, predictions, quiet_ms))
    figures |= {f"{name}_by_reference": untied[name] for name in ABSOLUTE}
    figures["anchors"] = {"n": tied.n, "factor": round(tied.factor, 5),
                          "standard_error": round(tied.standard_error, 5) if tied.n else None}
    return {**figures, "n_invalid": len(networks) - len(valid), "intervals": intervals(comparison), "groups": groups,
            "quantiles": quartiles(comparison),
            "reference": {"calibration_ms": quiet_ms, "run_ms": run_ms,
                          "ratio": round(run_ms / quiet_ms, 5) if run_ms and quiet_ms else None},
            "marks": [{"name": verdict.mark.name, "low": verdict.mark.low, "high": verdict.mark.high,
                       "value": verdict.value, "ceiling": verdict.ceiling, "met": verdict.met,
                       "by_ceiling": verdict.by_ceiling}
                      for verdict in verdicts(figures)],
            "worst": [_worst_entry(valid[index], comparison, int(index)) for index in _order(comparison)[:N_WORST]],
            "kinds": [share.to_dict()
                      for share in shared_kinds([network.architecture for network in valid], comparison.error)]}


def describe(report: Mapping[str, Any]) -> list[str]:
    """The report in lines for a reader, results first."""
    lines = [*_figures(report), "", *_goal(report), "", *_quartile_lines(report)]
    return [*lines, "", *_worst_lines(report), "", *_kind_lines(report), "", *_circumstances(report)]


def _order(comparison: Compared) -> np.ndarray:
    return np.argsort(-np.abs(comparison.error), kind="stable")


def _worst_entry(network: TimedOne, comparison: Compared, index: int) -> dict[str, Any]:
    return {"id": network.architecture.id, "group": network.group, "error": round(float(comparison.error[index]), 6),
            "predicted_ms": round(float(comparison.predicted_ms[index]), 6),
            "measured_ms": round(float(comparison.measured_ms[index]), 6), "inside": bool(comparison.inside[index]),
            "half_width": finite(network.measurement.half_width), "network": str(network.architecture)}


def _figures(report: Mapping[str, Any]) -> list[str]:
    groups = report["groups"]
    columns = [("all", report), *groups.items()] if len(groups) > 1 else [("all", report)]
    ends = report["intervals"]
    rows: list[list[str]] = [["", *(name for name, _ in columns), "90 % confidence", "noise ceiling"]]
    rows.append(["networks", *(str(figures["n"]) for _, figures in columns), "", f"of {report['n_ceiling']}"])
    for name, text, ceiling in (("within_5", "within 5 %", "ceiling_within_5"),
                                 ("within_10", "within 10 %", "ceiling_within_10"),
                                 ("mean_error", "mean error", "ceiling_mean"), ("bias", "median signed error", ""),
                                 ("spearman", "Spearman", "ceiling_spearman"), ("kendall", "Kendall", ""),
                                 ("coverage", "coverage of 90 %", ""), ("median_half_width", "its half-width", "")):
        form = ".4f" if name in ("spearman", "kendall") else "+.1%" if name == "bias" else ".1%"
        between = ends.get(name)
        rows.append([text, *(number(figures[name], form) for _, figures in columns),
                     interval(between[0], between[1], form) if between else "",
                     number(report[ceiling], form) if ceiling else ""])
    return text_table(rows)


def _goal(report: Mapping[str, Any]) -> list[str]:
    judged = verdicts(report)
    n_met = sum(verdict.met for verdict in judged)
    return [f"goal: {n_met if n_met < len(judged) else 'all'} of {len(judged)} marks hold",
            *(f"  {'holds' if verdict.met else 'MISSED':<6}  {_value(verdict, verdict.value):>6}  "
              f"{verdict.mark.title:<31}{_remark(verdict)}" for verdict in judged)]


def _remark(verdict: Verdict) -> str:
    asked = f"asked: {_say_asked(verdict)}"
    if verdict.ceiling is None or verdict.mark.low is None or verdict.ceiling >= verdict.mark.low:
        return asked
    return (f"{asked}, or the noise ceiling of {_value(verdict, verdict.ceiling)} less two points"
            f"{': reached' if verdict.by_ceiling else '' if verdict.met else ': not reached'}")


def _say_asked(verdict: Verdict) -> str:
    low, high = verdict.mark.low, verdict.mark.high
    if low is not None and high is not None:
        return f"{_value(verdict, low)} to {_value(verdict, high)}"
    return f"at least {_value(verdict, low)}" if low is not None else f"at most {_value(verdict, high)}"


def _value(verdict: Verdict, value: float | None) -> str:
    return number(value, ".4f" if verdict.mark.name == "spearman" else ".1%")


def _quartile_lines(report: Mapping[str, Any]) -> list[str]:
    rows = [["measured latency", "networks", "error p50", "p90", "p95", "max", "median signed", "coverage"]]
    for part in report["quantiles"]:
        rows.append([f"{part['from_ms']:.3g} to {part['to_ms']:.3g} ms", str(part["n"]),
                     *(number(part[f"error_{q}"], ".1%") for q in ("p50", "p90", "p95", "max")),
                     number(part["bias"], "+.1%"), number(part["coverage"], ".1%")])
    return text_table(rows)


def _worst_lines(report: Mapping[str, Any]) -> list[str]:
    rows = [[f"worst {len(report['worst'])}", "group", "predicted", "measured", "error", "network"]]
    for entry in report["worst"]:
        rows.append([entry["id"], entry["group"], f"{entry['predicted_ms']:.3f} ms", f"{entry['measured_ms']:.3f} ms",
                     number(entry["error"], "+.1%") + ("" if entry["inside"] else " !"), entry["network"]])
    note = "; !: outside of its predicted interval" if any(not entry["inside"] for entry in report["worst"]) else ""
    return [*text_table(rows, words=(0, 5)), f"(errors above 0: the network is faster than predicted{note})"]


def _kind_lines(report: Mapping[str, Any]) -> list[str]:
    if not report["kinds"]:
        return ["No kind of block is more frequent among the worst tenth than chance explains."]
    n_worst = len(worst(np.zeros(report["n"])))
    lines = [f"More frequent among the {n_worst} worst than chance explains (with so many kinds, some are chance):"]
    for share in report["kinds"][:N_KINDS]:
        way = "too slow" if share["mean_error"] > 0 else "too fast"
        without = share["mean_error_without"]
        lines.append(f"  {share['kind']} in {share['place']}: in {share['n_worst']} of the {n_worst} worst, in "
                     f"{share['n_all']} of all {report['n']} ({share['lift']:.1f} times as often); networks with it "
                     f"are predicted {abs(share['mean_error']):.1%} {way} on average"
                     + ("" if without is None else f", those without {without:+.1%}"))
    return lines


def _circumstances(report: Mapping[str, Any]) -> list[str]:
    reference = report["reference"]
    lines = []
    if reference["ratio"] is not None:
        away, run_ms, quiet_ms = reference["ratio"] - 1, reference["run_ms"], reference["calibration_ms"]
        remark = ": the machine is in another state" if abs(away) > RUN_DRIFT else ""
        lines.append(f"reference network: quiet at {run_ms:.4f} ms, {abs(away):.1%} "
                     f"{'above' if away >= 0 else 'below'} the calibration's {quiet_ms:.4f} ms{remark}")
    anchors = report["anchors"]
    if anchors["n"]:
        lines.append(f"{anchors['n']} networks of the calibration measured again: {anchors['factor'] - 1:+.1%} (± "
                     f"{anchors['standard_error']:.1%}) by the reference; this pace of the run is taken out above")
    within = [number(report[name], ".1%") for name in ("within_5_by_reference", "within_10_by_reference",
                                                       "within_5_absolute", "within_10_absolute")]
    lines.append(f"held against the reference alone, {within[0]} lie within 5 % and {within[1]} within 10 % of the "
                 f"prediction; as they were, {within[2]} and {within[3]}")
    if report["n_ceiling"] < report["n"]:
        lines.append(f"{report['n'] - report['n_ceiling']} of {report['n']} measurements stopped before their interval "
                     "was narrow enough: not counted in the noise ceiling (longer: seconds=NUMBER)")
    if report["n_invalid"]:
        lines.append(f"{report['n_invalid']} networks INVALID: the machine was too restless; in none of the figures")
    return lines


BAND_5, BAND_10, NOISE, OUTSIDE = "#d7e4f7", "#eef3fb", "#c2410c", "#b42318"
GROUPS = {"random": ("#1f5fbf", "o", "random"), "front": ("#0e9384", "D", "near the predicted front")}
OTHER = ("#667085", "s", "other")


def validation_figure(comparison: Compared, groups: Sequence[str], report: Mapping[str, Any]) -> Figure:
    """Four panels of `comparison`, whose networks are of `groups`; `report` is the content of the validation's file."""
    heading = f"{report['target']} on {report['space']['name']}: predicted against measured latency"
    with new_figure(11.5, 9.4, heading, _subtitle(report), left=0.07) as figure:
        (scatter, errors), (shares, cover) = figure.subplots(2, 2)
        figure.subplots_adjust(left=0.07, right=0.985, top=0.875, bottom=0.06, wspace=0.18, hspace=0.3)
        _draw_scatter(scatter, comparison, groups)
        _draw_errors(errors, comparison, groups, report)
        _draw_shares(shares, comparison)
        _draw_coverage(cover, comparison, report)
    return figure


def _subtitle(report: Mapping[str, Any]) -> str:
    invalid = f", {report['n_invalid']} INVALID" if report["n_invalid"] else ""
    return (f"{report['host']['name']} · {report['runtime']} · {report['n']} networks never used in calibration"
            f"{invalid} · measured {str(report['measured_at'])[:10]}")


def _draw_scatter(axes: Axes, comparison: Compared, groups: Sequence[str]) -> None:
    title(axes, "Predicted and measured latency")
    axes.set_xlabel("measured (ms, log scale)")
    axes.set_ylabel("predicted (ms, log scale)")
    ends = np.array([min(comparison.measured_ms.min(), comparison.predicted_ms.min()) / 1.15,
                     max(comparison.measured_ms.max(), comparison.predicted_ms.max()) * 1.15])
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color=BAND_10, lw=0, zorder=0.5, label="± 10 %")
    axes.fill_between(ends, ends * 0.95, ends * 1.05, color=BAND_5, lw=0, zorder=0.6, label="± 5 %")
    axes.plot(ends, ends, color=MUTED, lw=0.8, zorder=1)
    for chosen, (color, marker, label) in _by_group(groups):
        part = comparison[chosen]
        axes.errorbar(part.measured_ms, part.predicted_ms, ecolor=color, fmt="none", elinewidth=0.8, alpha=0.35,
                      yerr=[part.predicted_ms - part.low_ms, part.high_ms - part.predicted_ms], zorder=2)
        axes.plot(part.measured_ms, part.predicted_ms, marker, ms=4.5, color=color, mec="white", mew=0.6, zorder=3,
                  label=f"{len(part)} {label}")
    for axis, limit in (("x", axes.set_xlim), ("y", axes.set_ylim)):
        _log_axis(axes, axis, ends)
        limit(*ends)
    _legend(axes, "upper left", "bars: 90 % interval")


def _draw_errors(axes: Axes, comparison: Compared, groups: Sequence[str], report: Mapping[str, Any]) -> None:
    title(axes, "Error by latency; quartiles: median and 90th percentile")
    axes.set_xlabel("measured (ms, log scale)")
    axes.set_ylabel("predicted / measured − 1 (%)")
    ends = np.array([comparison.measured_ms.min() / 1.15, comparison.measured_ms.max() * 1.15])
    axes.axhspan(-10, 10, color=BAND_10, lw=0, zorder=0.5)
    axes.axhspan(-5, 5, color=BAND_5, lw=0, zorder=0.6)
    axes.axhline(0, color=MUTED, lw=0.8, zorder=1)
    for chosen, (color, marker, label) in _by_group(groups):
        part = comparison[chosen]
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
    furthest = max(12.0, 115 * float(np.abs(comparison.error).max()))
    axes.set_ylim(-furthest, furthest * 1.75)
    _log_axis(axes, "x", ends)
    axes.set_xlim(*ends)
    _legend(axes, "upper left")


def _draw_shares(axes: Axes, comparison: Compared) -> None:
    title(axes, "Share of networks nearer than …, and the noise of measuring")
    axes.set_xlabel("error (%)")
    axes.set_ylabel("networks (%)")
    halves = comparison.halves_ms[comparison.converged & np.isfinite(comparison.halves_ms).all(axis=1)]
    noise = np.abs(np.log(halves[:, 0] / halves[:, 1])) / 2
    error = np.abs(comparison.error)
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


def _draw_coverage(axes: Axes, comparison: Compared, report: Mapping[str, Any]) -> None:
    title(axes, "Coverage of the predicted interval, as it is and scaled")
    axes.set_xlabel("width, in predicted 90 % intervals")
    axes.set_ylabel("networks inside (%)")
    needed = np.sort(interval_scales(comparison))
    axes.axhspan(85, 95, color=BAND_5, lw=0, zorder=0.5, label="asked: 85 to 95 %")
    axes.step([0.0, *needed, max(9.0, needed[-1])], [0.0, *(100 * np.arange(1, len(needed) + 1) / len(needed)), 100.0],
              where="post", color=INK, lw=1.6, label=f"all {len(comparison)} networks")
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


def interval_scales(comparison: Compared) -> np.ndarray:
    """The factor by which each interval must be stretched to reach the measured time (in log latency, each side on
    its own)."""
    away = np.log(comparison.measured_ms / comparison.predicted_ms)
    side = np.where(away >= 0, np.log(comparison.high_ms / comparison.predicted_ms),
                    np.log(comparison.predicted_ms / comparison.low_ms))
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
