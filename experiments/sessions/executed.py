"""Whether the graph that OpenVINO executes tells what the latency model leaves over.

Every network of this host's shipped OpenVINO tables is compiled. Features of a network are, over its predicted
latency: the counts and output elements of executed nodes by type and kernel, the counts by layout, the elements by
precision. Ridge and boosted trees learn the held-out errors of the model from them, and predict those of networks left
out. The control is the same with the graphs of other networks. Nothing is measured.

    python -m experiments.sessions.executed --out experiments/sessions/executed.csv
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.latency.model import between_runs, cross_validate, stored_variances, timed_networks, usable
from hwnas.latency.prior import stored_prior
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import prepare_network
from hwnas.runtimes.openvino import OpenVinoRuntime, _text
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.system.libraries import declare_missing
from hwnas.system.paths import table_dirs, temporary_folder
from hwnas.target import Host, Target

Array = NDArray[np.float64]
FOLDS = 10
LEAST_SHARED = 10  # networks that have a feature; others tell nothing of it


def read_graph(network: Architecture, target: Target) -> Counter[str]:
    """What OpenVINO executes for it: counts of nodes and output elements, in hundred thousands."""
    found: Counter[str] = Counter()
    with temporary_folder() as folder:
        compiled = OpenVinoRuntime().compile(prepare_network(network, target, Path(folder)), target)
        for node in compiled._compiled.get_runtime_model().get_ordered_ops():
            info = node.get_rt_info()
            kind, kernel, layout, precision = (_text(info, key) for key in
                                               ("layerType", "primitiveType", "outputLayouts", "outputPrecisions"))
            elements = sum(float(np.prod([*output.get_shape()])) for output in node.outputs()) * 1e-5
            for name, value in ((f"{kind} {kernel} nodes", 1.0), (f"{kind} {kernel} elements", elements),
                                (f"{kind} in {layout} nodes", 1.0), (f"{kind} as {precision} elements", elements)):
                found[name] += value
    return found


def judge(table: LatencyTable, processes: int) -> list[dict[str, Any]]:
    """A row for each regressor and each of its inputs: the graphs, and those of other networks."""
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.linear_model import RidgeCV
    from sklearn.model_selection import KFold

    name, = table.spaces()
    space = SearchSpace.load(name, channels=table.key.channels, classes=table.key.classes,
                             image_size=max(table.key.sizes))
    networks, variances = usable(table, space), stored_variances(table.learnt[name])
    prior, notes = stored_prior(table, space)
    assert variances is not None, notes
    assert not notes, notes
    held = cross_validate(timed_networks(networks, table.quiet_ms),
                          np.array([network.measurement.halves_ms() for network in networks]),
                          np.array([network.origin for network in networks]), variances, between_runs(networks),
                          apart=True, prior=prior)
    target = Target("", "openvino", table.key.precision, 1, 1)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=declare_missing) as pool:
        graphs = list(pool.map(partial(read_graph, target=target), [network.architecture for network in networks],
                               chunksize=4))
    names = [feature for feature, n in Counter(key for graph in graphs for key in graph).items() if n >= LEAST_SHARED]
    rows = np.array([[graph[feature] for feature in names] for graph in graphs]) / np.exp(held.log_mean)[:, None]
    rows = (rows - rows.mean(axis=0)) / (rows.std(axis=0) + 1e-9)
    errors = held.log_measured - held.log_mean
    regressors: dict[str, Callable[[], Any]] = {
        "ridge": lambda: RidgeCV(np.logspace(0, 6, 25)),
        "boosted trees": lambda: GradientBoostingRegressor(n_estimators=150, max_depth=2, learning_rate=0.05,
                                                           subsample=0.6, random_state=0)}
    told = []
    for told_by, given in (("its graph", rows), ("another's graph", np.random.default_rng(0).permutation(rows))):
        for method, make in regressors.items():
            predicted = np.zeros(len(errors))
            for rest, fold in KFold(FOLDS, shuffle=True, random_state=0).split(given):
                predicted[fold] = make().fit(given[rest], errors[rest]).predict(given[fold])
            left = errors - predicted
            told.append({"host": table.host_name, "table": str(table.key), "n": len(errors), "features": len(names),
                         "told_by": told_by, "method": method, "r2": 1 - (left**2).mean() / errors.var(),
                         "mean_error_before": np.abs(errors).mean(), "mean_error_after": np.abs(left).mean()})
    return told


def main() -> None:
    """Judge every shipped OpenVINO table of this host with one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    declare_missing()
    tables = [LatencyTable.load(path) for path in
              sorted((table_dirs()[-1] / Host.detect().name).glob("openvino-*-t1-*.json.gz"))]
    told = pd.DataFrame([row for table in tables for row in judge(table, given.processes)])
    told.to_csv(given.out, index=False, float_format="%.5f")
    print(told.drop(columns=["host"]).to_string(index=False))


if __name__ == "__main__":
    main()
