"""Whether it pays to train the leading networks once more, or to see as many others: replayed on two tables.

    python -m experiments.posterior_choice.second --out experiments/posterior_choice/results

A search sees n networks as in `run.py`; or n - 12, and then each of the twelve leading ones again: for four caps on the
known cost (quartiles of all networks) the three that the model believes most, the next ones where caps share them. A
second value has an error of its own; the model is told the mean of both and its smaller error. Choice at each cap by
what the model believes in the end. Regret: how many points better the best network of the *table* below the cap is.

Written before the run: second evaluations are built if the mean regret over ten seeds is lower with them on both
tables, at both sizes, for our sampler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler

from experiments.posterior_choice.run import NOISE, SEEDS, SIZES, Table, tables
from hwnas.samplers.known import Belief, KnownObjectiveSampler

AGAIN = 12
CAPS = (0.25, 0.5, 0.75, 1.0)


def replay(table: Table, name: str, n: int, again: int, seed: int) -> float:
    """The mean regret over the caps, in points, after `n` evaluations of which `again` are second ones."""
    rng = np.random.default_rng(seed)
    space = {key: CategoricalDistribution(values) for key, values in table.choices.items()}
    values: dict[int, list[float]] = {}
    rows: dict[int, int] = {}

    def costs(settings: list[dict[str, str]]) -> list[list[float]]:
        found = (table.row_of.get(tuple(setting[key] for key in table.choices)) for setting in settings)
        return [[float(table.cost.max() if row is None else table.cost[row])] for row in found]

    def value_of(trial: optuna.trial.FrozenTrial) -> tuple[float, float]:
        return float(np.mean(values[trial.number])), NOISE / len(values[trial.number]) ** 0.5

    def model() -> KnownObjectiveSampler:  # one that has read no value yet: each value is read once
        return KnownObjectiveSampler(space, known=costs, seed=seed, learnt=value_of)

    sampler: BaseSampler = model() if name == "hwnas" else RandomSampler(seed=seed)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    while len(rows) < n - again:
        trial = study.ask(space)
        row = table.row_of.get(tuple(trial.params[key] for key in table.choices))
        if row is None or row in rows.values():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            continue
        rows[trial.number] = row
        values[trial.number] = [float(table.shown[row] + NOISE * rng.normal())]
        study.tell(trial, (values[trial.number][0], table.cost[row]))
    for number in leaders(model().beliefs(study), rows, table, again):
        values[number].append(float(table.shown[rows[number]] + NOISE * rng.normal()))
    beliefs = model().beliefs(study)
    regrets = []
    for cap in np.quantile(table.cost, CAPS):
        within = [number for number, row in rows.items() if table.cost[row] <= cap]
        if within:
            chosen = max(within, key=lambda number: beliefs[number].mean)
            regrets.append(best(table, cap) - table.truth[rows[chosen]])
    return float(np.mean(regrets))


def leaders(beliefs: Mapping[int, Belief], rows: Mapping[int, int], table: Table, n: int) -> list[int]:
    """Numbers of `n` trials: the caps in turn name the most believed one that is not named yet."""
    ranked = sorted(rows, key=lambda number: -beliefs[number].mean)
    named: list[int] = []
    caps: NDArray[np.float64] = np.quantile(table.cost, CAPS)
    for turn in range(4 * n):
        below = (number for number in ranked if table.cost[rows[number]] <= caps[turn % len(caps)])
        if len(named) < n and (new := next((number for number in below if number not in named), None)) is not None:
            named.append(new)
    return named


def best(table: Table, cap: float) -> float:
    """The highest true accuracy below the cap."""
    return float(table.truth[table.cost <= cap].max())


def main() -> None:
    """Replay all searches, write second.csv, print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of second.csv")
    given = parser.parse_args()
    if not (folder := os.environ.get("HWNAS_BENCHMARKS")):
        parser.error("set HWNAS_BENCHMARKS to the folder of nas_bench_macro.csv and nas_bench_201.parquet")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    lines = [{"table": table.name, "sampler": name, "evaluations": n, "seed": seed,
              "regret_others": round(replay(table, name, n, 0, seed), 4),
              "regret_again": round(replay(table, name, n, AGAIN, seed), 4)}
             for table in tables(Path(folder)) for name in ("random", "hwnas") for n in SIZES for seed in range(SEEDS)]
    frame = pd.DataFrame(lines)
    frame.to_csv(given.out / "second.csv", index=False, lineterminator="\n")
    print(frame.groupby(["table", "sampler", "evaluations"], sort=False).mean().drop(columns="seed").round(2)
          .to_string())


if __name__ == "__main__":
    main()
