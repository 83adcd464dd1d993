"""Ways to say that a machine is other than when its table was made, on recorded networks; nothing is measured.

    python -m experiments.latency.sessions.moments --out experiments/latency/results/sessions/moments.csv

`later`: networks of hours_later.csv.gz beside the session of an earlier validation of their table (as it was, or on by
the reference), beside their own panel, and by the reference alone. `wave`: seven networks of each validation in
experiments/latency_validation, as if all had got 6 % slower, predict the others: by the median of their ratios, as a
session does, or as a wave that is fitted with its table and has a level of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.latency.sessions.processes import VALIDATIONS
from hwnas.latency.features import Residual, covariance
from hwnas.latency.measurement import robust_error
from hwnas.latency.model import COSTS, Fit, FitData, LatencyModel, _Physical, stored_fit, timed_networks, usable
from hwnas.latency.session import BETWEEN_SESSIONS, NETWORKS_APART, PANEL
from hwnas.latency.table import find_table
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.documents import read_json

RESULTS = Path(__file__).parents[1] / "results" / "sessions"
SLOWER, DRAWS = 1.06, 2
REFERENCE_LANDS, MOST_DRIFT = 0.01, math.log(2)  # beyond the second a reference tells no drift
STEPS = np.linspace(-0.6, 0.6, 120_001)


def judge(way: str, px: str, mean: np.ndarray, ends: tuple[np.ndarray, np.ndarray], measured: np.ndarray,
          hours: float = 0.0) -> dict[str, object]:
    """A row of `moments.csv`; `hours`: how much earlier the session was measured."""
    error = np.abs(mean / measured - 1)
    return {"way": way, "px": px, "hours": hours, "n": len(error), "within_5": (error <= 0.05).mean(),
            "mean_error": error.mean(), "covers": ((ends[0] <= measured) & (measured <= ends[1])).mean()}


def drift(reference_ms: np.ndarray, before_ms: float) -> np.ndarray:
    """How many times as long networks take when the reference takes `reference_ms` [n] as when it took `before_ms`.

    Small steps are mostly how the reference landed in a process: each counts by its square over its square and that
    variance.
    """
    log = np.log(reference_ms / before_ms)
    log[np.abs(log) > MOST_DRIFT] = 0
    return np.asarray(np.exp(log * log**2 / (log**2 + REFERENCE_LANDS**2)))


def judge_later() -> Iterator[dict[str, object]]:
    """Rows of `later`, for each validation, and once more for each earlier one of its table."""
    told = pd.read_csv(RESULTS / "hours_later.csv.gz").dropna(subset="reference_ms")
    runs = [(key, run, reference_of(run)) for key, run in told.groupby(["table", "table_created", "measured_at"])]
    for key, run, own_ms in runs:
        table_ms = run.panel_ms / run.factor
        calibrated_ms = run.reference_ms.median() / run.reference_ratio.iloc[0]
        for other, earlier, then_ms in runs:
            if other[:2] != key[:2] or other[2] > key[2]:
                continue
            hours = (pd.Timestamp(key[2]) - pd.Timestamp(other[2])).total_seconds() / 3600
            before, now_ms = table_ms * earlier.factor.iloc[0], run.reference_ms.to_numpy()
            for way, ms in (("earlier session", before),
                            ("earlier session, reference", before * drift(now_ms, then_ms)),
                            ("own panel", run.panel_ms), ("own panel, reference", run.panel_ms * drift(now_ms, own_ms)),
                            ("reference", table_ms * drift(now_ms, calibrated_ms))):
                if hours or not way.startswith("earlier"):
                    scale = ms / run.predicted_ms
                    yield judge(way, key[0].split("-")[4], ms, (scale * run.low_ms, scale * run.high_ms),
                                run.measured_ms, hours)


def reference_of(run: pd.DataFrame) -> float:
    """The reference's time beside the panel, ms, from how far predictions have followed it."""
    moved = np.log(run.predicted_ms / run.panel_ms)
    most = moved.abs().idxmax()
    return float(run.reference_ms[most] / np.exp(np.interp(moved[most], np.log(drift(np.exp(STEPS), 1.0)), STEPS)))


def judge_wave(path: Path) -> Iterator[dict[str, object]]:
    """Rows of `wave` for a validation."""
    report = read_json(path)
    table = find_table(report["host"]["name"], report["table"]["key"])
    assert table is not None
    space = SearchSpace.load(report["space"]["name"], channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    valid = [entry for entry in report["networks"] if entry["valid"]]
    networks = [Architecture.from_dict(entry["architecture"]) for entry in valid]
    measured = SLOWER * np.array([entry["latency_ms"] for entry in valid])
    model, timed = LatencyModel.fit(table, space), timed_networks(usable(table, space), table.quiet_ms)
    learnt = stored_fit(table, space.name)
    assert learnt is not None
    variances = np.array(learnt.variances)
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        panel = [int(rng.choice(part)) for part in np.array_split(np.argsort(measured), PANEL)]
        rest = [index for index in range(len(measured)) if index not in panel]
        some = [networks[index] for index in rest]
        logs = np.log(measured[panel] / model.predict_architectures([networks[index] for index in panel]).mean)
        both = FitData([*timed.blocks, *(networks[index].blocks() for index in panel)],
                       np.append(timed.measured_ms, measured[panel]), np.append(timed.runs, np.full(PANEL, -1.0)))
        physical, wave = _Physical.of(both, None), np.append(np.zeros(len(timed.runs)), np.ones(PANEL))
        inverse = np.linalg.inv(covariance(variances, physical.parts) + BETWEEN_SESSIONS**2 * np.outer(wave, wave))
        weights = inverse @ (both.measured_ms / physical.base_ms - 1)
        corrected = physical.costs.values + variances[COSTS] * (physical.linear.T @ weights) / physical.scale
        fit = Fit(physical.features, physical.costs, corrected, Residual(
            variances, physical.groups, physical.positions, both.runs, weights, inverse))
        level = BETWEEN_SESSIONS**2 * wave @ weights
        spread = math.sqrt(max(BETWEEN_SESSIONS**2 - BETWEEN_SESSIONS**4 * wave @ inverse @ wave, 0.0))
        by_wave = fit.networks([network.blocks() for network in some])[0] * (1 + level)
        for way, factor, error, ms in (("median", math.exp(np.median(logs)), robust_error(logs), None),
                                       ("wave", 1 + level, spread, by_wave)):
            of = model.in_session(factor, math.hypot(error, NETWORKS_APART)).predict_architectures(some)
            ms = of.mean if ms is None else ms
            yield judge(way, str(max(table.key.sizes)) + "px", ms, (of.low * ms / of.mean, of.high * ms / of.mean),
                        measured[rest])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = [*judge_later(), *(row for path in sorted(VALIDATIONS.glob("*/*.json")) for row in judge_wave(path))]
    pd.DataFrame(rows).to_csv(given.out, index=False, float_format="%.4f")
