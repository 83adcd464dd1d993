"""The first asks of the contest's search, replayed with made-up accuracies: which picks owe nothing to what was learnt?

    python experiments/contest/asks.py out=experiments/contest/results/fashion_mnist/asks.csv

Same sampler, seed, space and shipped latency table; accuracy grows with MACs in one replay and falls in the other. An
ask that is the same in both was decided before any accuracy counted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import save_csv
from hwnas.accuracy.estimator import Estimate
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable
from hwnas.samplers.informed import Context
from hwnas.samplers.loading import load_sampler
from hwnas.search.loop import run_search
from hwnas.search.trial import SearchOptions
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.objective import Objective
from hwnas.study.study import open_study

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "latency_tables" / "amd-epyc-f26m2s1-2c" / "openvino-int8-t1-b1-32px-c1-k10.json.gz"
ASKS = 12


@dataclass(frozen=True)
class MadeUp:
    """Top-1 by log MACs; `slope` 1: the larger the better, -1: the smaller."""

    slope: float

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]], seed: int) -> Estimate:
        """As an accuracy estimator does."""
        top1 = 0.7 + self.slope * 0.02 * float(np.log(architecture.macs / 1e7))
        return Estimate(top1, top1, top1, 0.002, "made up", 0.1, (top1,))


def asked(slope: float, folder: Path) -> list[str]:
    """Ids of the networks that a search with seed 0 asks for, in order: first those that the space knows."""
    table = LatencyTable.load(TABLE)
    space = SearchSpace.load("mnasnet_small", channels=table.key.channels, classes=table.key.classes)
    predict = LatencyModel.fit(table, space).predict
    known = [space.encode(network) for network in space.known.values()]
    objective = Objective(target_ms=0.1)
    sampler = load_sampler("hwnas", 0, Context(space, predict, objective))
    study = open_study(f"sqlite:///{folder / 'study.db'}", {"replay": "asks"}, objective, sampler)
    run_search(study, space, predict, MadeUp(slope), SearchOptions(ASKS, objective, seed=0, enqueue=known))
    return [str(trial.user_attrs["architecture_id"]) for trial in study.trials[:ASKS]]


def main(out: Path) -> None:
    """Replay twice; write both orders."""
    orders = []
    for slope in (1.0, -1.0):
        with tempfile.TemporaryDirectory() as folder:
            orders.append(asked(slope, Path(folder)))
    save_csv(out, [{"ask": ask, "larger_is_better": first, "smaller_is_better": second}
                   for ask, (first, second) in enumerate(zip(*orders, strict=True), 1)])


if __name__ == "__main__":
    main(Path(dict(argument.split("=", 1) for argument in sys.argv[1:])["out"]))
