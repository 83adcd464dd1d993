"""What a validation found, as data and in words: figures beside their noise ceilings, marks, the worst networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hwnas.latency.agreement import Compared, Verdict, intervals, quartiles, shared_kinds, summary, verdicts, worst
from hwnas.latency.model import Predictions
from hwnas.latency.validation import Pace, TimedOne, finite

N_WORST, N_KINDS = 10, 6
ABSOLUTE = ("within_5", "within_10", "mean_error", "coverage")  # also given for times as they were in this run
RUN_DRIFT = 0.03  # beside a calibration's quiet time: above, errors may be the machine's and not the model's


def compared(networks: Sequence[TimedOne], predictions: Predictions, quiet_ms: float | None) -> Compared:
    """Arrays of the valid ones; `predictions` has an entry for every network.

    Latencies are those at the calibration's speed, at which the reference takes `quiet_ms`; None: as they were.
    """
    valid = np.array([one.measurement.valid for one in networks], bool)
    found = [one.measurement for one in networks if one.measurement.valid]
    return Compared(predictions.mean[valid], predictions.low[valid], predictions.high[valid],
                    np.array([one.at_ms(quiet_ms) if quiet_ms else one.latency_ms for one in found]),
                    np.array([one.halves_ms() for one in found]).reshape(-1, 2),
                    np.array([one.half_width <= one.protocol.half_width for one in found], bool))


def evaluate(networks: Sequence[TimedOne], predictions: Predictions, quiet_ms: float, tied: Pace) -> dict[str, Any]:
    """The report: figures at the top level, then groups, quartiles, worst networks and the kinds they share.

    `quiet_ms` is the reference's quiet time in the calibration, `tied` the pace of this run by its anchors.
    """
    valid = [one for one in networks if one.measurement.valid]
    found = compared(networks, predictions, quiet_ms / tied.factor)
    figures = summary(found)
    absolute = summary(compared(networks, predictions, None))
    groups = {name: summary(found[np.array([one.group == name for one in valid], bool)])
              for name in sorted({one.group for one in valid})}
    runs = [one.measurement.quiet_ms for one in valid]
    run_ms = float(np.median(runs)) if runs else None
    figures |= {f"{name}_absolute": absolute[name] for name in ABSOLUTE}
    untied = summary(compared(networks, predictions, quiet_ms))
    figures |= {f"{name}_by_reference": untied[name] for name in ABSOLUTE}
    figures["anchors"] = {"n": tied.n, "factor": round(tied.factor, 5),
                          "standard_error": round(tied.standard_error, 5) if tied.n else None}
    return {**figures, "n_invalid": len(networks) - len(valid), "intervals": intervals(found), "groups": groups,
            "quantiles": quartiles(found),
            "reference": {"calibration_ms": quiet_ms, "run_ms": run_ms,
                          "ratio": round(run_ms / quiet_ms, 5) if run_ms and quiet_ms else None},
            "marks": [{"name": one.mark.name, "low": one.mark.low, "high": one.mark.high, "value": one.value,
                       "ceiling": one.ceiling, "met": one.met, "by_ceiling": one.by_ceiling}
                      for one in verdicts(figures)],
            "worst": [_worst_entry(valid[index], found, int(index)) for index in _order(found)[:N_WORST]],
            "kinds": [share.to_dict() for share in shared_kinds([one.architecture for one in valid], found.error)]}


def describe(report: Mapping[str, Any]) -> list[str]:
    """The report in lines for a reader, results first."""
    lines = [*_figures(report), "", *_goal(report), "", *_quartile_lines(report)]
    return [*lines, "", *_worst_lines(report), "", *_kind_lines(report), "", *_circumstances(report)]


def _order(found: Compared) -> np.ndarray:
    return np.argsort(-np.abs(found.error), kind="stable")


def _worst_entry(one: TimedOne, found: Compared, index: int) -> dict[str, Any]:
    return {"id": one.architecture.id, "group": one.group, "error": round(float(found.error[index]), 6),
            "predicted_ms": round(float(found.predicted_ms[index]), 6),
            "measured_ms": round(float(found.measured_ms[index]), 6), "inside": bool(found.inside[index]),
            "half_width": finite(one.measurement.half_width), "network": str(one.architecture)}


def _figures(report: Mapping[str, Any]) -> list[str]:
    groups = report["groups"]
    columns = [("all", report), *groups.items()] if len(groups) > 1 else [("all", report)]
    ends = report["intervals"]
    rows: list[list[str]] = [["", *(name for name, _ in columns), "90 % confidence", "noise ceiling"]]
    rows.append(["networks", *(str(figures["n"]) for _, figures in columns), "", f"of {report['n_ceiling']}"])
    for name, title, ceiling in (("within_5", "within 5 %", "ceiling_within_5"),
                                 ("within_10", "within 10 %", "ceiling_within_10"),
                                 ("mean_error", "mean error", "ceiling_mean"), ("bias", "median signed error", ""),
                                 ("spearman", "Spearman", "ceiling_spearman"), ("kendall", "Kendall", ""),
                                 ("coverage", "coverage of 90 %", ""), ("median_half_width", "its half-width", "")):
        form = _plain if name in ("spearman", "kendall") else _signed if name == "bias" else _percent
        between = ends.get(name)
        rows.append([title, *(form(figures[name]) for _, figures in columns),
                     f"{form(between[0])} to {form(between[1])}" if between else "",
                     form(report[ceiling]) if ceiling else ""])
    return _table(rows)


def _goal(report: Mapping[str, Any]) -> list[str]:
    found = verdicts(report)
    n_met = sum(one.met for one in found)
    return [f"goal: {n_met if n_met < len(found) else 'all'} of {len(found)} marks hold",
            *(f"  {'holds' if one.met else 'MISSED':<6}  {_value(one, one.value):>6}  {one.mark.title:<31}"
              f"{_remark(one)}" for one in found)]


def _remark(one: Verdict) -> str:
    asked = f"asked: {_asked(one)}"
    if one.ceiling is None or one.mark.low is None or one.ceiling >= one.mark.low:
        return asked
    return (f"{asked}, or the noise ceiling of {_value(one, one.ceiling)} less two points"
            f"{': reached' if one.by_ceiling else '' if one.met else ': not reached'}")


def _asked(one: Verdict) -> str:
    low, high = one.mark.low, one.mark.high
    if low is not None and high is not None:
        return f"{_value(one, low)} to {_value(one, high)}"
    return f"at least {_value(one, low)}" if low is not None else f"at most {_value(one, high)}"


def _value(one: Verdict, value: float | None) -> str:
    return _plain(value) if one.mark.name == "spearman" else _percent(value)


def _quartile_lines(report: Mapping[str, Any]) -> list[str]:
    rows = [["measured latency", "networks", "error p50", "p90", "p95", "max", "median signed", "coverage"]]
    for part in report["quantiles"]:
        rows.append([f"{part['from_ms']:.3g} to {part['to_ms']:.3g} ms", str(part["n"]),
                     *(_percent(part[f"error_{q}"]) for q in ("p50", "p90", "p95", "max")), _signed(part["bias"]),
                     _percent(part["coverage"])])
    return _table(rows)


def _worst_lines(report: Mapping[str, Any]) -> list[str]:
    rows = [[f"worst {len(report['worst'])}", "group", "predicted", "measured", "error", "network"]]
    for one in report["worst"]:
        rows.append([one["id"], one["group"], f"{one['predicted_ms']:.3f} ms", f"{one['measured_ms']:.3f} ms",
                     _signed(one["error"]) + ("" if one["inside"] else " !"), one["network"]])
    note = "; !: outside of its predicted interval" if any(not one["inside"] for one in report["worst"]) else ""
    return [*_table(rows), f"(errors above 0: the network is faster than predicted{note})"]


def _kind_lines(report: Mapping[str, Any]) -> list[str]:
    if not report["kinds"]:
        return ["No kind of block is more frequent among the worst tenth than chance explains."]
    n_worst = len(worst(np.zeros(report["n"])))
    lines = [f"More frequent among the {n_worst} worst than chance explains (with so many kinds, some are chance):"]
    for one in report["kinds"][:N_KINDS]:
        way = "too slow" if one["mean_error"] > 0 else "too fast"
        without = one["mean_error_without"]
        lines.append(f"  {one['kind']} in {one['place']}: in {one['n_worst']} of the {n_worst} worst, in "
                     f"{one['n_all']} of all {report['n']} ({one['lift']:.1f} times as often); networks with it are "
                     f"predicted {abs(one['mean_error']):.1%} {way} on average"
                     f"{'' if without is None else f', those without {_signed(without)}'}")
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
    lines.append(f"held against the reference alone, {_percent(report['within_5_by_reference'])} lie within 5 % and "
                 f"{_percent(report['within_10_by_reference'])} within 10 % of the prediction; as they were, "
                 f"{_percent(report['within_5_absolute'])} and {_percent(report['within_10_absolute'])}")
    if report["n_ceiling"] < report["n"]:
        lines.append(f"{report['n'] - report['n_ceiling']} of {report['n']} measurements stopped before their interval "
                     "was narrow enough: not counted in the noise ceiling (longer: seconds=NUMBER)")
    if report["n_invalid"]:
        lines.append(f"{report['n_invalid']} networks INVALID: the machine was too restless; in none of the figures")
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their entries; the first to the left, the last as it comes, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return ["  ".join(text if column == last and len(text) > 20 else text.ljust(width) if column == 0
                      else text.rjust(min(width, 20) if column == last else width)
                      for column, (text, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.1%}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
