"""Few measurements on a new host: the worth of other hosts' tables as a start, and whether it can do harm.

    python -m experiments.latency.transfer.run --out DIR [--seeds 3] [--processes 2]

Nothing is measured. Each shipped table whose runtime and precision another host has too is a new host in its turn.
Half of its networks, 200 at most, are judged on. The nearest tables of other hosts, as many as a calibration takes, are
fitted without them. A few of the others are drawn, at random or (of a random two thirds) those that tell most. The
judged ones are predicted by a fit from scratch, and by one that starts from the other hosts' tables. The stored file
has two things more: a start from random entries (`control`), and whether cross-validation would have `taken` a start.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hwnas.latency.features import Prior
from hwnas.latency.model import Fit, FitData, most_telling, timed_networks
from hwnas.latency.prior import MOST_TABLES, TablesPrior, distance, fit_of
from hwnas.latency.table import LatencyTable, TableKey
from hwnas.system.paths import write_atomic

SIZES = (10, 20, 50)
MOST_JUDGED = 200
LOSS = 0.005  # of mean error that counts as harm, beyond two standard errors


def key_of(path: Path) -> TableKey:
    """The key that a table's file is named after."""
    key = TableKey.read(path.name.removesuffix(".json.gz"))
    assert key is not None, path
    return key


def kind(path: Path) -> tuple[str, ...]:
    """Runtime and precision of a table of one thread, by its name; ('',) for others, which are left out."""
    runtime, precision, threads, *_ = path.name.split("-")
    return (runtime, precision) if threads == "t1" else ("",)


def judge_table(path: Path, seeds: int) -> list[dict[str, Any]]:
    """A row for each draw: size, way of choosing, seed, way of predicting."""
    table = LatencyTable.load(path)
    networks = [network for network in table.networks if network.measurement.valid]
    order = np.random.default_rng(0).permutation(len(networks))
    judged, rest = np.split(order, [min(len(order) // 2, MOST_JUDGED)])
    hidden = {networks[int(index)].architecture for index in judged}
    others = [other for other in path.parents[1].glob("*/*.json.gz")
              if other.parent.name != path.parent.name and kind(other) == kind(path)]
    fits = {}
    for other in sorted(others, key=lambda other: distance(
            other.parent.name, key_of(other), table.host_name, table.key))[:MOST_TABLES]:
        foreign = LatencyTable.load(other)
        foreign.networks = [network for network in foreign.networks if network.architecture not in hidden]
        fits[f"{other.parent.name}/{other.name}"] = fit_of(foreign)
    prior, timed = TablesPrior(fits), timed_networks(networks, table.quiet_ms)
    rows = []
    for n in (n for n in SIZES if n <= 2 * len(rest) // 3):
        for seed in range(seeds):
            drawn = np.random.default_rng((seed, n)).permutation(rest)
            some = drawn[: max(2 * len(drawn) // 3, n)]
            telling = some[most_telling([timed.blocks[int(index)] for index in some], prior, n)]
            for chosen, given in (("random", drawn[:n]), ("telling", telling)):
                told = judge(timed[given], timed[judged], prior)
                rows += [{"host": table.host_name, "table": str(table.key), "n_tables": len(fits), "n": n,
                          "chosen": chosen, "seed": seed, **row} for row in told]
    return rows


def judge(few: FitData, others: FitData, prior: Prior) -> list[dict[str, Any]]:
    """Errors of `others` by a fit on `few` from scratch, and by one from other tables, and what this one gains."""
    rows, scratch = [], np.empty(0)
    for name, start in (("scratch", None), ("tables", prior)):
        errors = np.abs(Fit.of(few, start).networks(others.blocks)[0] / others.measured_ms - 1)
        scratch = scratch if start else errors
        gain = scratch - errors
        rows.append({"start": name, "mean_error": errors.mean(), "within_5": (errors <= 0.05).mean(),
                     "within_10": (errors <= 0.1).mean(), "gain": gain.mean(),
                     "gain_error": gain.std(ddof=1) / np.sqrt(len(gain))})
    return rows


def harmed(rows: pd.DataFrame) -> pd.Series:
    """Whether each start from tables predicts surely worse than a fit from scratch."""
    return -rows.gain > np.maximum(2 * rows.gain_error, LOSS)


def beside_scratch(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each draw: the mean error of the start from tables, and of the fit from `scratch`."""
    scratch = rows[rows.start == "scratch"].reset_index(drop=True).mean_error
    return rows[rows.start == "tables"].reset_index(drop=True).assign(scratch=scratch)


def main() -> None:
    """Judge every table, write each draw to `transfer.csv`, print means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tables", type=Path, default=Path("latency_tables"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    paths = sorted(given.tables.glob("*/*.json.gz"))
    shared = [path for path in paths if kind(path) != ("",) and any(
        kind(other) == kind(path) and other.parent != path.parent for other in paths)]
    with ProcessPoolExecutor(given.processes) as pool:
        found = pd.DataFrame([row for rows in pool.map(judge_table, shared, [given.seeds] * len(shared))
                              for row in rows])
    given.out.mkdir(parents=True, exist_ok=True)
    write_atomic(given.out / "transfer.csv", found.to_csv(index=False, float_format="%.5f"))
    means = beside_scratch(found).groupby(["table", "host", "chosen", "n"])[["scratch", "mean_error"]].mean()
    print((100 * means).round(1).unstack(["chosen", "n"]).to_string())
    rows = found[found.start == "tables"]
    print(f"did harm in {harmed(rows).sum()} of {len(rows)} draws")


if __name__ == "__main__":
    main()
