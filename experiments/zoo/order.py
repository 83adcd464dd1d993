"""What `hwnas zoo` finds in few minutes, beside other orders with as many timings and the front of all networks.

    hwnas zoo target=epyc_fp32 minutes=8 out=RUN        # then keep the timed rows of RUN/zoo.csv as FIRST.csv
    python -m experiments.zoo.all_networks epyc_fp32 36 ALL.csv   # with another HWNAS_HOME; the same
    python -m experiments.zoo.order FIRST.csv ALL.csv --out experiments/zoo/results/order.csv   # int8: order_int8.csv

Rule, written before the run. All latencies are those of ALL.csv. Hypervolume is that of top-1 and log latency, from the
slowest latency and the lowest top-1 of all. An order may time as many networks as FIRST.csv has; it is good if its
front has 95 % of the hypervolume of the front of all.

    random     mean and least of 200 orders
    ratio      published top-1 over MACs, highest first
    layers     the front of top-1 and MACs, then the front of the others, and so on
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.common import hypervolume_2d, save_csv
from hwnas.stats import non_dominated

ORDERS, KEY = 200, ["name", "image_size", "deployment"]


def layers(rows: pd.DataFrame) -> NDArray[np.intp]:
    """Places by the layer of the front of top-1 and MACs that they are in; within a layer those of fewer MACs first."""
    left, order = np.arange(len(rows)), list[int]()
    points = rows[["gmacs", "top1_published"]].to_numpy(float)
    while len(left):
        layer = left[non_dominated(points[left], (True, False))]
        order += sorted(map(int, layer), key=lambda at: points[at, 0])
        left = np.setdiff1d(left, layer)
    return np.array(order)


def main() -> None:
    """Read both files and write a row for each order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("first", "all"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = pd.read_csv(given.all).query("latency_ms > 0").reset_index(drop=True)
    timed = pd.read_csv(given.first).query("latency_ms > 0")[KEY]
    ours = np.flatnonzero(rows.set_index(KEY).index.isin(timed.set_index(KEY).index))
    top1, log_ms, n = rows.top1_published.to_numpy(), np.log(rows.latency_ms.to_numpy()), len(ours)
    front = np.flatnonzero(non_dominated(np.column_stack([log_ms, top1]), (True, False)))

    def share(at: NDArray[np.intp]) -> float:
        reference = float(top1.min()), float(log_ms.max())
        return hypervolume_2d(top1[at], log_ms[at], reference) / hypervolume_2d(top1, log_ms, reference)

    rng = np.random.default_rng(0)
    orders = {"hwnas": [ours], "random": [rng.permutation(len(rows))[:n] for _ in range(ORDERS)],
              "ratio": [np.argsort(-top1 / rows.gmacs.to_numpy(), kind="stable")[:n]], "layers": [layers(rows)[:n]]}
    save_csv(given.out, [{"order": name, "timed": n, "of": len(rows), "share": round(np.mean(shares), 4),
                          "least": round(min(shares), 4), "on_front": len(front),
                          "of_front": round(np.mean([np.isin(front, at).sum() for at in places]), 1)}
                         for name, places in orders.items() if (shares := [share(at) for at in places])])


if __name__ == "__main__":
    main()
