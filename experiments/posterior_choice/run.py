"""Choosing by what a model of all trials believes, beside choosing by the trials' own values. Replayed on two tables.

    python -m experiments.posterior_choice.run --out experiments/posterior_choice/results

Each network is seen once: with the accuracy of one training (NAS-Bench-Macro: of seed 0; NAS-Bench-201: the mean) and a
normal error of NOISE points, as short trainings have. Of the networks that a search saw, the one with the highest value
is chosen at each of four caps on the known cost (quartiles of all networks). Truth is what took no part: the mean of
the other seeds on NAS-Bench-Macro, the table itself on NAS-Bench-201. Regret: how many points better the best network
seen below the cap is. Written before the run: the beliefs are better where the mean regret over ten seeds is lower on
both tables, for random search and for our sampler. The tables stand in the folder HWNAS_BENCHMARKS.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler

from hwnas.samplers.known import KnownObjectiveSampler
from hwnas.stats import kendall_tau

Array = NDArray[np.float64]
NOISE = 1.5  # points
SIZES, SEEDS = (24, 100), 10
OPERATIONS = ("op_01", "op_02", "op_12", "op_03", "op_13", "op_23")
COLUMNS = ("table", "sampler", "networks", "seed", "tau_raw", "tau_believed", "regret_raw", "regret_believed", "inside")


@dataclass(frozen=True)
class Table:
    """All networks of a benchmark: choices by column, what a training shows, truth, the known cost."""

    name: str
    choices: dict[str, list[str]]
    row_of: dict[tuple[str, ...], int]
    shown: Array
    truth: Array
    cost: Array


def tables(folder: Path) -> Iterator[Table]:
    """NAS-Bench-Macro with its FLOPs, NAS-Bench-201 with the latency of a Pixel 3."""
    macro = pd.read_csv(folder / "nas_bench_macro.csv", dtype={"arch": str})
    keys = [tuple(text) for text in macro.arch]
    yield Table("NAS-Bench-Macro", {f"layer{index}": ["0", "1", "2"] for index in range(8)},
                {key: row for row, key in enumerate(keys)}, macro.accuracy_seed0.to_numpy(float),
                macro[["accuracy_seed1", "accuracy_seed2"]].mean(axis=1).to_numpy(), macro.flops.to_numpy(float))
    whole = pd.read_parquet(folder / "nas_bench_201.parquet")
    whole = whole[whole.latency_ms_pixel3 >= 0.05].reset_index(drop=True)
    rows = {tuple(map(str, key)): row for row, key in enumerate(whole[list(OPERATIONS)].itertuples(index=False))}
    accuracy = whole.accuracy_cifar10.to_numpy(float)
    yield Table("NAS-Bench-201", {name: sorted(map(str, whole[name].unique())) for name in OPERATIONS}, rows, accuracy,
                accuracy, whole.latency_ms_pixel3.to_numpy(float))


def replay(table: Table, name: str, n: int, seed: int) -> dict[str, float]:
    """One search, and the choices from it."""
    rng = np.random.default_rng(seed)
    space = {key: CategoricalDistribution(values) for key, values in table.choices.items()}
    dearest = float(table.cost.max())

    def row_of(setting: dict[str, str]) -> int | None:
        return table.row_of.get(tuple(setting[key] for key in table.choices))

    def costs(settings: list[dict[str, str]]) -> list[list[float]]:
        return [[dearest if (row := row_of(setting)) is None else float(table.cost[row])] for setting in settings]

    ours = KnownObjectiveSampler(space, known=costs, seed=seed, learnt=lambda trial: (trial.values[0], NOISE))
    sampler: BaseSampler = ours if name == "hwnas" else RandomSampler(seed=seed)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    seen: dict[int, int] = {}
    while len(seen) < n:
        trial = study.ask(space)
        row = row_of(trial.params)
        if row is None or row in seen.values():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        seen[trial.number] = row
        study.tell(trial, (table.shown[row] + NOISE * rng.normal(), table.cost[row]))
    beliefs = ours.beliefs(study)
    rows = np.array(list(seen.values()))
    raw = np.array([study.trials[number].values[0] for number in seen])
    believed = np.array([beliefs[number].mean for number in seen])
    truth = table.truth[rows]
    inside = np.mean([beliefs[number].low <= table.truth[row] <= beliefs[number].high for number, row in seen.items()])
    regrets = []
    for cap in np.quantile(table.cost, (0.25, 0.5, 0.75, 1.0)):
        within = np.flatnonzero(table.cost[rows] <= cap)
        if len(within):
            regrets.append([truth[within].max() - truth[within][values[within].argmax()] for values in (raw, believed)])
    by_raw, by_belief = np.mean(regrets, axis=0)
    return {"tau_raw": float(kendall_tau(raw, truth)), "tau_believed": float(kendall_tau(believed, truth)),
            "regret_raw": float(by_raw), "regret_believed": float(by_belief), "inside": float(inside)}


def main() -> None:
    """Replay all searches, write choice.csv, print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of choice.csv")
    given = parser.parse_args()
    if not (folder := os.environ.get("HWNAS_BENCHMARKS")):
        parser.error("set HWNAS_BENCHMARKS to the folder of nas_bench_macro.csv and nas_bench_201.parquet")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    lines = [{"table": table.name, "sampler": name, "networks": n, "seed": seed, **replay(table, name, n, seed)}
             for table in tables(Path(folder)) for name in ("random", "hwnas") for n in SIZES for seed in range(SEEDS)]
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "choice.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([{key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}
                          for line in lines])
    frame = pd.DataFrame(lines)
    print(frame.groupby(["table", "sampler", "networks"], sort=False).mean(numeric_only=True).drop(columns="seed")
          .round(2).to_string())


if __name__ == "__main__":
    main()
