"""Whole-network regressors beside ours, on the networks of every shipped table: rivals that need nothing else.

    python -m experiments.latency_peers.regressors --out experiments/latency_peers/results/regressors.csv

Measures nothing. Ridge, gradient boosting and a Gaussian process learn log latency from the architecture's choices (one
column a value), log MACs, log parameters, depth, and the wave in which a network was measured (one column each). Ours
knows blocks and waves. All are fitted on the same four fifths of a table's networks and predict the last fifth; each
network is predicted once. A rival is surely ahead or behind where the paired difference of absolute log errors lies two
standard errors from zero.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.common import figures
from hwnas.latency.model import PARTS, RUN, between_runs, cross_validate, timed_networks, usable
from hwnas.latency.prior import stored_prior
from hwnas.latency.table import LatencyTable
from hwnas.space.search_space import SearchSpace
from hwnas.system.paths import table_dirs

Array = NDArray[np.float64]
FOLDS = 5


def judge_table(path: Path) -> list[dict[str, Any]]:
    """A row for each method."""
    table = LatencyTable.load(path)
    name, = table.spaces()
    space = SearchSpace.load(name, channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    networks, stored = usable(table, space), table.learnt[name]
    timed = timed_networks(networks, table.quiet_ms)
    variances = np.array([stored["variances"][part] for part in PARTS])
    prior, notes = stored_prior(table, space)
    assert not notes, notes
    halves = np.array([network.measurement.halves_ms() for network in networks])
    ours = cross_validate(timed, halves, np.array([network.origin for network in networks]), variances,
                          max(between_runs(networks), float(np.sqrt(variances[RUN]))), apart=False, prior=prior,
                          folds=FOLDS)
    architectures = [network.architecture for network in networks]
    codes = space.canonical_codes(np.array([space.to_codes(space.encode(each)) for each in architectures]))
    choices = np.hstack([codes[:, [column]] == np.arange(len(parameter.choices))
                         for column, parameter in enumerate(space.parameters)]).astype(float)
    totals = np.array([(np.log(each.macs), np.log(each.params), len(each.blocks())) for each in architectures])
    totals = (totals - totals.mean(axis=0)) / totals.std(axis=0)
    rows = np.hstack([choices, totals, timed.runs[:, None] == np.unique(timed.runs)])
    log_ms = np.log(timed.measured_ms)
    folds = np.array_split(np.random.default_rng(0).permutation(len(log_ms)), FOLDS)  # as in cross_validate
    predicted = {"ours": ours.log_mean}
    for method, fit in REGRESSORS.items():
        predicted[method] = np.zeros(len(log_ms))
        for fold in folds:
            rest = np.setdiff1d(np.arange(len(log_ms)), fold)
            predicted[method][fold] = fit(rows[rest], log_ms[rest], rows[fold])
    found = []
    for method, log_mean in predicted.items():
        apart = np.abs(log_mean - log_ms) - np.abs(ours.log_mean - log_ms)
        found.append({"host": table.host_name, "table": str(table.key), "space": name, "n": len(log_ms),
                      "method": method, **figures(np.exp(log_mean), timed.measured_ms), "behind_ours": apart.mean(),
                      "standard_error": apart.std() / np.sqrt(len(apart))})
    return found


def fit_ridge(rows: Array, log_ms: Array, wanted: Array) -> Array:
    """Ridge, its penalty chosen by cross-validation."""
    from sklearn.linear_model import RidgeCV

    return np.asarray(RidgeCV(np.logspace(-3, 3, 25)).fit(rows, log_ms).predict(wanted))


def fit_boosting(rows: Array, log_ms: Array, wanted: Array) -> Array:
    """Gradient boosting: the better of two depths by a fifth that is left out."""
    from sklearn.ensemble import GradientBoostingRegressor

    def grow(depth: int) -> Any:
        return GradientBoostingRegressor(n_estimators=500, learning_rate=0.05, max_depth=depth, subsample=0.7,
                                         random_state=0)

    kept = np.arange(len(rows)) % 5 > 0
    error = {depth: float(np.abs(grow(depth).fit(rows[kept], log_ms[kept]).predict(rows[~kept]) - log_ms[~kept]).mean())
             for depth in (2, 4)}
    return np.asarray(grow(min(error, key=lambda depth: error[depth])).fit(rows, log_ms).predict(wanted))


def fit_process(rows: Array, log_ms: Array, wanted: Array) -> Array:
    """A Gaussian process of a linear and a squared-exponential part with noise, sized by marginal likelihood."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

    kernel = ConstantKernel(0.1) * DotProduct() + ConstantKernel(0.1) * RBF(3.0) + WhiteKernel(1e-3, (1e-8, 1.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    return np.asarray(process.fit(rows, log_ms).predict(wanted))


REGRESSORS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "ridge": fit_ridge, "gradient boosting": fit_boosting, "Gaussian process": fit_process}


def main() -> None:
    """Judge all tables, and say how the methods do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")  # bounds of kernels, which are the rivals' own
    with ProcessPoolExecutor(given.processes) as pool:
        rows = [row for found in pool.map(judge_table, sorted(table_dirs()[-1].glob("*/*.json.gz"))) for row in found]
    told = pd.DataFrame(rows)
    told.to_csv(given.out, index=False, float_format="%.5f")
    print(told.groupby("method")[["mean_error", "within_5", "within_10", "spearman"]].mean().round(4).to_string())


if __name__ == "__main__":
    main()
