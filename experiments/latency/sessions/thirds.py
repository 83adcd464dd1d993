"""How many held-out networks lie in their 90 % interval, by third of the latencies, in every shipped table.

    python -m experiments.latency.sessions.thirds --out experiments/latency/results/sessions/thirds.csv

Cross-validated errors within the session of each table; each network's interval is made without it. Three ways to make
one: `all` networks together; wide enough for each `origin` (random, front), which was the way before; by `third` of the
predicted latencies, and then wide enough for each origin, which is the way now.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.latency.model import LEAST_OF_ORIGIN, PARTS, RUN, Ends, between_runs, cross_validate, interval_ends, usable
from hwnas.latency.model import timed_networks as timed
from hwnas.latency.prior import stored_prior
from hwnas.latency.table import LatencyTable
from hwnas.space.search_space import SearchSpace
from hwnas.stats import conformal_quantile
from hwnas.system.paths import table_dirs

Array = NDArray[np.float64]


def ends_of_all(scores: Array, log_mean: Array, origins: NDArray[np.str_]) -> Ends:
    """One interval for all networks."""
    return Ends((), (conformal_quantile(scores, 0.05),), (conformal_quantile(scores, 0.95),))


def ends_by_origin(scores: Array, log_mean: Array, origins: NDArray[np.str_]) -> Ends:
    """One interval, wide enough for each origin of enough networks."""
    groups = [scores[origins == name] for name in np.unique(origins) if (origins == name).sum() >= LEAST_OF_ORIGIN]
    lows, highs = ([conformal_quantile(group, q) for group in groups or [scores]] for q in (0.05, 0.95))
    return Ends((), (min(lows),), (max(highs),))


WAYS: dict[str, Callable[[Array, Array, NDArray[np.str_]], Ends]] = {
    "all": ends_of_all, "origin": ends_by_origin, "third": Ends.of}


def judge_table(path: Path) -> dict[str, object]:
    """A row: coverage in all, least coverage of a third, coverage of the front, and median half-width by each way."""
    table = LatencyTable.load(path)
    name, = table.spaces()
    space = SearchSpace.load(name, channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    networks, stored = usable(table, space), table.learnt[name]
    variances = np.array([stored["variances"][part] for part in PARTS])
    prior, notes = stored_prior(table, space)
    assert not notes, notes
    origins = np.array([network.origin for network in networks])
    run_to_run = max(between_runs(networks), float(np.sqrt(variances[RUN])))
    held_out = cross_validate(timed(networks, table.quiet_ms), origins, variances, run_to_run, apart=False, prior=prior)
    row: dict[str, object] = {"host": table.host_name, "table": str(table.key), "n": len(networks),
                              "front": int((origins == "front").sum())}
    errors = held_out.log_measured - held_out.log_mean
    thirds = np.array_split(np.argsort(held_out.log_mean), 3)
    for way, make in WAYS.items():
        ends = np.array([make(*(np.delete(values, i) for values in (held_out.scores, held_out.log_mean, origins))).at(
            held_out.log_mean[i]) for i in range(len(errors))])
        low, high = interval_ends(ends[:, 0], ends[:, 1], held_out.log_std, run_to_run)
        inside = (low <= errors) & (errors <= high)
        row |= {f"covered_{way}": inside.mean(), f"least_third_{way}": min(inside[third].mean() for third in thirds),
                f"most_third_{way}": max(inside[third].mean() for third in thirds),
                f"front_{way}": inside[origins == "front"].mean(),
                f"half_width_{way}": np.median(np.sinh((high - low) / 2))}
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    files = sorted(table_dirs()[-1].glob("*/*.json.gz"))
    pd.DataFrame([judge_table(file) for file in files]).to_csv(given.out, index=False, float_format="%.4f")
