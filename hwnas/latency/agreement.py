"""Agreement of predicted and measured latency: error, coverage, rank correlation, the worst networks.

First the figures, then the words and the picture of a validation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hwnas.cli.progress import interval, number, text_table
from hwnas.latency.held_out_networks import Pace, TimedOne
from hwnas.latency.model import Predictions
from hwnas.pictures import MUTED, new_figure, plain_log_ticks, title
from hwnas.stats import draws, kendall_tau, percentiles, spearman, wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NOISE_POINTS = 0.02  # how far below a lower noise ceiling a figure may lie
BOOTSTRAP = 1000


@dataclass(frozen=True)
class Compared:
    """Networks predicted and measured. `halves_ms` [n, 2] are two independent halves of each measurement.

    `converged` [n] marks the measurements that met the protocol's interval: only they tell the noise.
    """

    predicted_ms: np.ndarray
    low_ms: np.ndarray
    high_ms: np.ndarray
    measured_ms: np.ndarray
    halves_ms: np.ndarray
    converged: np.ndarray

    def __len__(self) -> int:
        return len(self.measured_ms)

    def __getitem__(self, chosen: np.ndarray) -> Compared:
        return Compared(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @property
    def error(self) -> np.ndarray:
        """Signed: above 0 where the network is faster than predicted."""
        return np.asarray(self.predicted_ms / self.measured_ms - 1)

    @property
    def inside(self) -> np.ndarray:
        """Whether the measured time lies in the predicted interval."""
        return np.asarray((self.low_ms <= self.measured_ms) & (self.measured_ms <= self.high_ms))


@dataclass(frozen=True, slots=True)
class Mark:
    """A figure, what is asked of it, and what is asked where the noise ceiling lies lower."""

    name: str
    title: str
    low: float | None = None
    high: float | None = None
    ceiling: str = ""


MARKS = (Mark("within_5", "within 5 %", 0.90, ceiling="ceiling_within_5"),
         Mark("within_10", "within 10 %", 0.985, ceiling="ceiling_within_10"),
         Mark("spearman", "Spearman", 0.99, ceiling="ceiling_spearman"),
         Mark("coverage", "coverage of the 90 % interval", 0.85, 0.95),
         Mark("median_half_width", "median half-width", high=0.08))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mark is met; `by_ceiling`: only at the noise ceiling less two points."""

    mark: Mark
    value: float | None
    ceiling: float | None
    met: bool
    by_ceiling: bool


def summary(comparison: Compared) -> dict[str, Any]:
    """The headline figures and the noise ceilings."""
    error = np.abs(comparison.error)
    return {"n": len(comparison), "within_5": _mean(error <= 0.05), "within_10": _mean(error <= 0.10),
            "mean_error": _mean(error), "bias": _plain(np.median(comparison.error)) if len(comparison) else None,
            "spearman": rank_correlation(comparison.predicted_ms, comparison.measured_ms, "spearman"),
            "kendall": rank_correlation(comparison.predicted_ms, comparison.measured_ms, "kendall"),
            "coverage": _mean(comparison.inside), "median_half_width": _median_half_width(comparison),
            **ceilings(comparison)}


def ceilings(comparison: Compared) -> dict[str, Any]:
    """Figures that a perfect predictor would reach. Two halves of one measurement differ by twice the noise of the
    whole."""
    halves = comparison.halves_ms[comparison.converged & np.isfinite(comparison.halves_ms).all(axis=1)]
    noise = np.abs(np.log(halves[:, 0] / halves[:, 1])) / 2
    return {"ceiling_within_5": _mean(noise <= 0.05), "ceiling_within_10": _mean(noise <= 0.10),
            "ceiling_mean": _mean(noise), "ceiling_spearman": rank_correlation(halves[:, 0], halves[:, 1], "spearman"),
            "n_ceiling": len(halves)}


def intervals(comparison: Compared, seed: int = 0) -> dict[str, list[float] | None]:
    """90 % intervals of the figures, because they rest on few networks: Wilson's for shares, resampling for the others.

    (Resampling a share of 100 % gives 100 to 100 %, which a few dozen networks cannot show.)
    """
    n, error = len(comparison), np.abs(comparison.error)
    shares = {"within_5": error <= 0.05, "within_10": error <= 0.10, "coverage": comparison.inside}
    values: dict[str, list[float] | None] = {
        name: _ends(wilson(int(hits.sum()), n, 0.9)) if n else None for name, hits in shares.items()}
    values["mean_error"] = values["spearman"] = None
    if n > 2:
        rows = draws(n, seed, BOOTSTRAP)
        values["mean_error"] = _ends(percentiles(error[rows].mean(axis=1), 0.9))
        few = rows[:300]
        values["spearman"] = _ends(percentiles(
            spearman(comparison.predicted_ms[few], comparison.measured_ms[few]), 0.9))
    return values


def quartiles(comparison: Compared) -> list[dict[str, Any]]:
    """Errors and coverage in each quarter of the measured latencies, fastest first."""
    rows = []
    for part in np.array_split(np.argsort(comparison.measured_ms, kind="stable"), 4):
        if len(part):
            quarter = comparison[part]
            error = np.abs(quarter.error)
            rows.append({"n": len(part), "from_ms": _plain(quarter.measured_ms[0]),
                         "to_ms": _plain(quarter.measured_ms[-1]),
                         **{f"error_p{q}": _plain(np.quantile(error, q / 100)) for q in (50, 90, 95)},
                         "error_max": _plain(error.max()), "bias": _plain(np.median(quarter.error)),
                         "coverage": _mean(quarter.inside), "within_5": _mean(error <= 0.05)})
    return rows


def verdicts(figures: Mapping[str, Any]) -> list[Verdict]:
    """Compare a `summary` with the marks. Where a noise ceiling lies below its mark, the ceiling less two points
    counts."""
    results = []
    for mark in MARKS:
        value, ceiling = figures.get(mark.name), figures.get(mark.ceiling)
        met = value is not None and (mark.low is None or value >= mark.low) and (
            mark.high is None or value <= mark.high)
        lower = ceiling is not None and mark.low is not None and ceiling < mark.low
        by_ceiling = not met and value is not None and lower and bool(value >= float(ceiling or 0) - NOISE_POINTS)
        results.append(Verdict(mark, value, ceiling, met or by_ceiling, by_ceiling))
    return results


def rank_correlation(first: np.ndarray, second: np.ndarray, kind: str) -> float | None:
    """Spearman's rho or Kendall's tau-b; None for fewer than three networks or where one side is constant."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return _plain((spearman if kind == "spearman" else kendall_tau)(first, second))


def _median_half_width(comparison: Compared) -> float | None:
    """Half of the predicted interval, as a share of the prediction."""
    if not len(comparison):
        return None
    return _plain(np.median((comparison.high_ms - comparison.low_ms) / 2 / comparison.predicted_ms))


def _ends(interval: tuple[float, float]) -> list[float] | None:
    return [_plain(end) for end in interval] if np.isfinite(interval).all() else None


def _mean(values: np.ndarray) -> float | None:
    return _plain(np.mean(values)) if len(values) else None


def _plain(value: Any) -> float:
    return round(float(value), 6)


def finite(value: float) -> float | None:
    """`value` to six decimals; None where it is infinite or NaN, which JSON cannot hold."""
    return round(float(value), 6) if math.isfinite(value) else None


N_WORST = 10
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
    """The report: figures at the top level, then groups, quartiles and worst networks.

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
            "worst": [_worst_entry(valid[index], comparison, int(index)) for index in _order(comparison)[:N_WORST]]}


def describe(report: Mapping[str, Any]) -> list[str]:
    """The report in lines for a reader, results first."""
    lines = [*_figures(report), "", *_goal(report), "", *_quartile_lines(report)]
    return [*lines, "", *_worst_lines(report), "", *_circumstances(report)]


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
    """Predicted against measured latency of `comparison`, whose networks are of `groups`; `report` is the content of
    the validation's file."""
    heading = f"{report['target']} on {report['space']['name']}: predicted against measured latency"
    with new_figure(8.0, 7.0, heading, _subtitle(report), left=0.1) as figure:
        axes = figure.subplots()
        figure.subplots_adjust(left=0.1, right=0.97, top=0.85, bottom=0.09)
        _draw_scatter(axes, comparison, groups)
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


def _by_group(groups: Sequence[str]) -> Iterable[tuple[np.ndarray, tuple[str, str, str]]]:
    for name in sorted(set(groups), reverse=True):
        yield np.array([group == name for group in groups], bool), GROUPS.get(name, OTHER)


def _legend(axes: Axes, place: Literal["upper left", "lower right"], note: str | None = None) -> None:
    axes.legend(loc=place, frameon=True, framealpha=0.92, edgecolor="none", fontsize=8.5, handletextpad=0.5,
                handlelength=1.6, title=note, title_fontsize=7.5, alignment="left")


def _log_axis(axes: Axes, which: str, ends: np.ndarray) -> None:
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    plain_log_ticks(axes.xaxis if which == "x" else axes.yaxis, float(ends[0]), float(ends[1]))
