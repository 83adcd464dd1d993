"""Whole-network regressors on the table's own networks, beside ours: the strongest rivals that need nothing else.

    python experiments/latency_peers/regressors.py --table T.json.gz --validation V.summary.json \
        --measured experiments/latency_peers/results/peers.csv --out R.csv

Measures nothing: ridge, gradient boosting and a Gaussian process learn log latency from the architecture's choices (one
column a value) and log MACs, log parameters and depth. Held-out networks are those of the validation, their latencies
(at the reference's quiet time) those that `run.py` wrote.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import command, figures, networks_of, percent, save_csv, space_of, text_table, timed_of
from hwnas.latency.model import Fit, LatencyModel
from hwnas.latency.table import LatencyTable
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace

Regressor = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # rows, log ms, wanted rows: log ms


def main() -> None:
    """Fit all on the table's networks, predict the held-out ones, write one line a network, print the figures."""
    options = _parser().parse_args()
    table = LatencyTable.load(options.table)
    validation = json.loads(options.validation.read_text(encoding="utf-8"))
    space = space_of(validation["space"]["name"], table)
    with options.measured.open(encoding="utf-8", newline="") as file:
        measured_ms = {row["id"]: float(row["measured_ms"]) for row in csv.DictReader(file)}
    held = [Architecture.from_dict(entry["architecture"]) for entry in validation["networks"]]
    predicted = predictions(table, space, held)
    truth = np.array([measured_ms[network.id] for network in held])
    save_csv(options.out, [{"id": network.id, "measured_ms": truth[row],
                            **{name: round(float(ms[row]), 6) for name, ms in predicted.items()}}
                           for row, network in enumerate(held)])
    print(text_table([["method", "mean", "within 5 %", "within 10 %", "Spearman"],
                      *[[name, percent(of["mean_error"]), percent(of["within_5"]), percent(of["within_10"]),
                         f"{of['spearman']:.3f}"] for name, of in
                        ((name, figures(ms, truth)) for name, ms in predicted.items())]]))


def predictions(table: LatencyTable, space: SearchSpace, held: Sequence[Architecture]) -> dict[str, np.ndarray]:
    """Latency [n] in ms of the `held` networks by each method, all fitted on the table's networks of `space`."""
    timed, known = timed_of(table, space.name), [network.architecture for network in networks_of(table, space.name)]
    log_ms = np.log(timed.measured_ms)
    choices, totals = (_choices(space, [*known, *held]), _totals([*known, *held]))
    both, n = np.hstack([choices, totals]), len(known)
    fits: dict[str, tuple[Regressor, np.ndarray]] = {
        "ridge on choices": (_ridge, choices), "gradient boosting": (_boosting, both), "ridge": (_ridge, both),
        "Gaussian process": (_process, both)}
    predicted = {name: np.exp(fit(rows[:n], log_ms, rows[n:])) for name, (fit, rows) in fits.items()}
    costs = Fit.of(timed)
    sums = costs.features.of_networks([network.blocks() for network in held])
    predicted["ours, costs alone"] = costs.costs.latency_ms(costs.features.design(sums))
    predicted["ours"] = LatencyModel.fit(table, space).predict_architectures(held).mean
    return predicted


def _choices(space: SearchSpace, networks: Sequence[Architecture]) -> np.ndarray:
    """[n, values]: one column for each value of each parameter."""
    codes = space.canonical_codes(np.array([space.to_codes(space.encode(network)) for network in networks]))
    return np.hstack([codes[:, [column]] == np.arange(len(parameter.choices))
                      for column, parameter in enumerate(space.parameters)]).astype(float)


def _totals(networks: Sequence[Architecture]) -> np.ndarray:
    """[n, 3] log MACs, log parameters and depth, in standard deviations."""
    rows = np.array([(np.log(network.macs), np.log(network.params), len(network.blocks())) for network in networks])
    return (rows - rows.mean(axis=0)) / rows.std(axis=0)


def _ridge(rows: np.ndarray, log_ms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    from sklearn.linear_model import RidgeCV

    return np.asarray(RidgeCV(np.logspace(-3, 3, 25)).fit(rows, log_ms).predict(wanted))


def _boosting(rows: np.ndarray, log_ms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The best of twelve settings in five folds."""
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.model_selection import GridSearchCV

    grid = {"n_estimators": [200, 500], "max_depth": [2, 3, 4], "learning_rate": [0.05, 0.1]}
    search = GridSearchCV(GradientBoostingRegressor(subsample=0.7, random_state=0), grid, cv=5)
    return np.asarray(search.fit(rows, log_ms).predict(wanted))


def _process(rows: np.ndarray, log_ms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """A linear and a squared-exponential part with noise; marginal likelihood chooses their sizes."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

    kernel = ConstantKernel(0.1) * DotProduct() + ConstantKernel(0.1) * RBF(3.0) + WhiteKernel(1e-3, (1e-8, 1.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
    return np.asarray(process.fit(rows, log_ms).predict(wanted))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("table", "validation", "measured", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser


if __name__ == "__main__":
    command(main)
