"""How much worse networks of another process are predicted than held-out ones of the table's own.

The tables of 2026-11-21 were timed by one process each, wave after wave; each validation in
experiments/latency_validation timed 200 other networks in another process, minutes later. Both errors are taken at the
pace of their wave or run.

    python -m experiments.latency.sessions.processes --out experiments/latency/results/sessions/processes.csv
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from hwnas.latency.model import PARTS, Fit, LatencyModel, timed_networks, usable
from hwnas.latency.table import LatencyTable, find_table
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.documents import read_json

FOLDS = 10
WIDENED = (0.0, 0.023, 0.035)  # log standard deviations that intervals are widened by
VALIDATIONS = Path(__file__).parents[2] / "latency_validation"


def held_out_errors(table: LatencyTable, space: SearchSpace) -> np.ndarray:
    """Log errors of the table's networks [n], each predicted from nine tenths of the others."""
    networks = usable(table, space)
    timed = timed_networks(networks, table.quiet_ms)
    variances = np.array([table.learnt[space.name]["variances"][part] for part in PARTS])
    errors = np.zeros(len(networks))
    for fold in np.array_split(np.random.default_rng(0).permutation(len(networks)), FOLDS):
        fit = Fit.of(timed[np.setdiff1d(np.arange(len(networks)), fold)], None, variances)
        paces = np.log1p(fit.residual.of_runs(timed.runs[fold]))
        errors[fold] = np.log(timed.measured_ms[fold] / fit.networks(timed[fold].blocks)[0]) - paces
    return errors


def deviation(errors: np.ndarray) -> float:
    """Standard deviation of normal errors with this mean absolute one, which outliers move less."""
    return float(math.sqrt(math.pi / 2) * np.abs(errors).mean())


def judge(path: Path) -> dict[str, object]:
    """A row: errors held out in the table's process and in another, what lies between, and coverage there."""
    report = read_json(path)
    table = find_table(report["host"]["name"], report["table"]["key"])
    assert table is not None
    space = SearchSpace.load(report["space"]["name"], channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    timed = [entry for entry in report["networks"] if entry["valid"]]
    architectures = [Architecture.from_dict(entry["architecture"]) for entry in timed]
    measured = np.log([entry["latency_ms"] for entry in timed])
    inside = held_out_errors(table, space)
    model = LatencyModel.fit(table, space)
    errors = measured - np.log(model.predict_architectures(architectures).mean)
    pace = float(np.median(errors))
    row: dict[str, object] = {
        "host": table.host_name, "table": str(table.key), "n_table": len(inside), "n": len(timed),
        "same_process_mean": np.abs(inside).mean(), "other_process_mean": np.abs(errors - pace).mean(),
        "between": math.sqrt(max(0.0, deviation(errors - pace) ** 2 - deviation(inside) ** 2))}
    for more in WIDENED:
        of = model.in_session(math.exp(pace), more).predict_architectures(architectures)
        covered = (np.log(of.low) <= measured) & (measured <= np.log(of.high))
        thirds = np.array_split(covered[np.argsort(of.mean)], 3)
        row |= {f"covers_{more:g}": covered.mean(), f"least_third_{more:g}": min(each.mean() for each in thirds),
                f"half_width_{more:g}": np.median((of.high - of.low) / 2 / of.mean)}
    return row


def rows() -> Iterator[dict[str, object]]:
    """A row for each validation."""
    for path in sorted(VALIDATIONS.glob("*/*.json")):
        yield judge(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pd.DataFrame(rows()).to_csv(given.out, index=False, float_format="%.5f")
