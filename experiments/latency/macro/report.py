"""What came out: a row for each row of the benchmark, a summary, and both in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from experiments.common import percent, text_table
from experiments.latency.macro.benchmark import ACCURACY, ARCH, SPREAD, Benchmark
from experiments.latency.macro.choice import Chosen, calibrated_on, front_of
from hwnas.latency.held_out_networks import TimedOne
from hwnas.latency.measurement import Measurement
from hwnas.latency.model import Predictions
from hwnas.validate import Job, compare, summarise

PREDICTED = "latency_ms_predicted"
FIGURES = ("n", "within_5", "within_10", "mean_error", "bias", "spearman", "coverage", "median_half_width",
           "ceiling_mean", "ceiling_within_5", "n_ceiling")


@dataclass(frozen=True)
class Outcome:
    """Everything at hand; `predictions` are of the benchmark's networks, `measured` is empty where nothing was timed.

    `report` is that of hwnas.validate on the measured networks which the table does not hold.
    """

    job: Job
    benchmark: Benchmark
    predictions: Predictions
    chosen: Chosen
    measured: Sequence[TimedOne]
    report: dict[str, Any] | None

    @cached_property
    def valid(self) -> dict[str, Measurement]:
        """Of the networks that have a time, by id."""
        return {one.architecture.id: one.measurement for one in self.measured if one.measurement.valid}

    @cached_property
    def pace_ms(self) -> float:
        """The reference's time at which this run's networks take what they took in the table's session."""
        if self.report is None:
            return self.job.table.quiet_ms
        return float(self.report["reference"]["run_ms"] / self.report["session"]["factor"])

    @cached_property
    def measured_ms(self) -> np.ndarray:
        """Of the benchmark's networks [m], at the calibration's pace; NaN where there is none."""
        return np.array([self.valid[one.id].at_ms(self.pace_ms) if one.id in self.valid else np.nan
                         for one in self.benchmark.networks])

    @cached_property
    def predicted_front(self) -> np.ndarray:
        """Mask [m]."""
        return front_of(self.benchmark.accuracy, self.predictions.mean)

    @cached_property
    def true_front(self) -> np.ndarray:
        """Mask [m]: what no measured network beats, among those measured."""
        return front_of(self.benchmark.accuracy, self.measured_ms)

    @cached_property
    def undecided(self) -> np.ndarray:
        """Mask [m] of networks without a time whose predicted interval reaches beyond the true front."""
        accuracy, front = self.benchmark.accuracy, self.true_front
        beaten = ((accuracy[front][None] >= accuracy[:, None])
                  & (self.measured_ms[front][None] < self.predictions.low[:, None])).any(axis=1)
        return np.asarray(np.isnan(self.measured_ms) & ~beaten)


def rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    """One for each row of the benchmark, in its order. Empty: not measured, or not chosen to be."""
    benchmark = outcome.benchmark
    groups = {one.id: group for group, one in outcome.chosen}
    known = calibrated_on(outcome.job.table)
    latencies = [_latencies(outcome, index) for index in range(len(benchmark.networks))]
    rows = []
    for row, index in zip(benchmark.rows, benchmark.network_of, strict=True):
        name = benchmark.networks[index].id
        rows.append({"arch": row[ARCH], "network": name, "accuracy": row[ACCURACY], "accuracy_std": row[SPREAD],
                     "params": row["params"], "flops": row["flops"], **latencies[index],
                     "group": groups.get(name, ""), "calibrated": int(name in known),
                     "true_front": int(outcome.true_front[index]) if name in outcome.valid else ""})
    return rows


def _latencies(outcome: Outcome, index: int) -> dict[str, Any]:
    predicted = outcome.predictions
    found = outcome.valid.get(outcome.benchmark.networks[index].id)
    measured = [""] * 4 if found is None else [round(ms * scale, 6) for ms, scale in zip(
        (found.latency_ms, found.latency_ms_low, found.latency_ms_high, found.latency_ms),
        [outcome.pace_ms / found.quiet_ms] * 3 + [1.0], strict=True)]
    names = ("latency_ms_measured", "latency_ms_measured_low", "latency_ms_measured_high", "latency_ms_as_timed")
    return {PREDICTED: round(float(predicted.mean[index]), 6),
            f"{PREDICTED}_low": round(float(predicted.low[index]), 6),
            f"{PREDICTED}_high": round(float(predicted.high[index]), 6), **dict(zip(names, measured, strict=True))}


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """As data, with what each column of latencies is."""
    job, benchmark, predicted = outcome.job, outcome.benchmark, outcome.predictions
    half_width = float(np.median((predicted.high - predicted.low) / 2 / predicted.mean))
    return {
        "target": job.deployment.target.name, "host": job.table.host_name, "runtime": job.table.runtime_version,
        "table": job.identity["table"], "benchmark": {
            "file": benchmark.path.name, "sha256": benchmark.sha256, "rows": len(benchmark.rows),
            "networks": len(benchmark.networks)},
        "columns": _columns(outcome),
        "predicted": {"networks": len(benchmark.networks), "median_half_width": round(half_width, 6),
                      "held_out_error": job.model.error, "front": _front(outcome, outcome.predicted_front)},
        "measured": _measured(outcome) if outcome.report else None}


def _columns(outcome: Outcome) -> dict[str, str]:
    """What was predicted and what was measured."""
    error = outcome.job.model.error
    n = int(np.isfinite(outcome.measured_ms).sum())
    total = len(outcome.benchmark.networks)
    return {
        PREDICTED: f"predicted, for all {total} different networks (mean error {percent(error['mean_error'])} on "
                   f"{error['n']:.0f} networks held out of the calibration), with a 90 % interval",
        "latency_ms_measured": f"measured, for {n} of {total} different networks, and put to the pace of the "
                               "calibration; with a 90 % interval" if outcome.report else "not measured",
        "latency_ms_as_timed": "measured, as the clock said in that run" if outcome.report else "not measured",
        "accuracy": "as published: CIFAR-10 test top-1 in per cent, mean of three trainings"}


def _measured(outcome: Outcome) -> dict[str, Any]:
    report = outcome.report
    assert report is not None
    part = {"all": report, **report["groups"]}
    both = outcome.true_front & outcome.predicted_front
    return {
        "networks": int(np.isfinite(outcome.measured_ms).sum()),
        "invalid": len(outcome.measured) - len(outcome.valid),
        "failed": report["n_failed"], "measured_at": report["measured_at"], "seed": report["seed"],
        "held_out": {name: {figure: figures[figure] for figure in FIGURES} for name, figures in part.items()},
        "front_with_calibrated": _front_figures(outcome), "session": report["session"],
        "reference": report["reference"], "true_front": _front(outcome, outcome.true_front),
        "true_front_predicted": int(both.sum()), "perhaps_on_front": int(outcome.undecided.sum())}


def _front_figures(outcome: Outcome) -> dict[str, Any]:
    """Of the predicted front as a whole, with those of it that the table was calibrated on."""
    by_id = {one.architecture.id: one for one in outcome.measured}
    where = [index for index in np.flatnonzero(outcome.predicted_front).tolist()
             if outcome.benchmark.networks[index].id in by_id]
    timed = [by_id[outcome.benchmark.networks[index].id] for index in where]
    found = outcome.predictions
    predictions = Predictions(found.mean[where], found.low[where], found.high[where], found.std[where])
    figures = summarise(compare(timed, predictions, outcome.pace_ms))
    return {name: figures[name] for name in FIGURES}


def _front(outcome: Outcome, on: np.ndarray) -> list[str]:
    """The first row of each network of a front, fastest first."""
    benchmark = outcome.benchmark
    first = np.unique(benchmark.network_of, return_index=True)[1]
    where = np.flatnonzero(on)
    order = where[np.argsort(outcome.predictions.mean[where], kind="stable")]
    return [benchmark.rows[first[index]][ARCH] for index in order]


def describe(outcome: Outcome) -> str:
    """Results first, and which latency is which."""
    found = summary_of(outcome)
    lines = ["", f"NAS-Bench-Macro, {found['target']} on {found['host']}: {found['benchmark']['rows']} rows, "
             f"{found['benchmark']['networks']} different networks"]
    lines += [f"  {name}: {text}" for name, text in found["columns"].items()]
    lines.append(f"predicted front: {len(found['predicted']['front'])} networks; half of a predicted 90 % interval: "
                 f"{percent(found['predicted']['median_half_width'])} (median)")
    if found["measured"] is None:
        groups = [group for group, _ in outcome.chosen]
        counts = ", ".join(f"{groups.count(name)} {name}" for name in dict.fromkeys(groups))
        return "\n".join([*lines, f"nothing was measured; measure=true would time {len(groups)} networks: {counts}"])
    return "\n".join([*lines, *_measured_lines(found["measured"])])


def _measured_lines(measured: dict[str, Any]) -> list[str]:
    parts = {**measured["held_out"], "whole front*": measured["front_with_calibrated"]}
    rows = [["predicted against measured", "networks", "within 5 %", "within 10 %", "mean error", "Spearman",
             "interval covers", "noise"]]
    for name, one in parts.items():
        rows.append([name, str(one["n"]), *(percent(one[key]) for key in ("within_5", "within_10", "mean_error")),
                     "–" if one["spearman"] is None else f"{one['spearman']:.4f}", percent(one["coverage"]),
                     percent(one["ceiling_mean"])])
    return [text_table(rows), "* with those of it that the table was calibrated on; the other lines are without such",
            f"true front among the {measured['networks']} measured: {len(measured['true_front'])} networks, "
            f"{measured['true_front_predicted']} of them on the predicted front; {measured['perhaps_on_front']} not "
            "measured may be on it by their predicted 90 % interval",
            *([f"{measured['invalid']} networks INVALID: the machine was too restless; the same command times them "
               "again"] if measured["invalid"] else [])]
