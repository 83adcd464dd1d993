"""Did a race pay where nothing is pretrained? The same minutes for a race and for trials with finalists.

It did not, and was taken out (docs/decisions/race.md): `search` needs commit 3e99294, `table` does not.

    python -m experiments.from_scratch.run search --out RUNS/0 --seed 0 dataset=fashion_mnist dataset.root=DIR
    python -m experiments.from_scratch.run table RUNS/* --results experiments/from_scratch/results/NAME

`search` runs both arms at the same time, a core each; odd seeds swap the cores. Measure the latency table before. Arms:

    trials    the default: proxies of the networks that a sampler proposes, then the finalists are trained
    race      accuracy=race: the first rung trains what the sampler proposes, and those that a faster one surely beats
              are dropped; what is left is trained on

Written before the runs. All of an arm's verified networks count but baselines and controls, which neither arm has.
The level is the mean of the best top-1 that an arm has at no more latency (chance where it has none), on test images
that chose nothing, int8, over a third of the logarithm of latency between the fastest and the slowest network of both
arms. Intervals: 95 % of 2,000 resamples of the seeds and of the test images. **The race stays where nothing is
pretrained if it is ahead in one third at least and behind in none, on every data set; otherwise it goes.**
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.arms import RESAMPLES, Arm, interval, write_results
from experiments.hour.run import COLUMNS, SEEN, THIRDS, level_of

ARMS: dict[str, list[str]] = {"race": ["accuracy=race"], "trials": []}


def search(given: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Both arms at the same time, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if given.seed % 2:
        cores.reverse()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", "hwnas.search", f"target={given.target}",
         "space=mnasnet_small", "controls=0", "baselines=[]", f"budget.minutes={given.minutes:g}",
         f"seed={given.seed}", f"out={given.out / arm}", *own, *overrides], env=env)
        for core, (arm, own) in zip(cores, ARMS.items(), strict=False)]
    if codes := [process.returncode for process in running if process.wait()]:
        sys.exit(f"of {len(running)} commands {len(codes)} ended with {codes}.")


def tabulate(folders: Sequence[Path], results: Path) -> None:
    """Read a folder of runs for each seed, and write what the rule asks for."""
    seeds = [{name: Arm.read(folder, name) for name in ARMS} for folder in folders]
    rng, first = np.random.default_rng(0), seeds[0]["race"]
    n = len(next(iter(first.right.values())))
    images = [np.arange(n), *(rng.integers(0, n, n) for _ in range(RESAMPLES))]
    levels = []  # [arm, seed, resample, third]
    edges = []
    for arms in seeds:
        latency_ms = np.log(np.concatenate([arm.timed.latency_ms.to_numpy() for arm in arms.values()]))
        edges.append(np.linspace(latency_ms.min(), latency_ms.max(), THIRDS + 1))
    for name in ARMS:
        levels.append([[level_of(arms[name], edge, part) for part in images]
                       for arms, edge in zip(seeds, edges, strict=True)])
    values = 100 * np.array(levels)
    ahead, drawn = values[0] - values[1], rng.integers(0, len(seeds), (RESAMPLES, len(seeds)))
    means = np.array([ahead[:, 0].mean(axis=0),
                      *(ahead[drawn[at], at + 1].mean(axis=0) for at in range(RESAMPLES))])
    rows = pd.concat(arm.rows.assign(seed=folder.name) for folder, arms in zip(folders, seeds, strict=True)
                     for arm in arms.values())
    write_results(results, rows, COLUMNS, {
        "host": first.environment["host"]["name"], "runtime": first.environment["runtime"], "images": n,
        "seeds": len(seeds), "edges_ms": np.round(np.exp(edges), 4).tolist(),
        "level": {name: np.round(values[at, :, 0], 2).tolist() for at, name in enumerate(ARMS)},
        "points_ahead_by_seed": np.round(ahead[:, 0], 2).tolist(),
        "points_ahead": [{**interval(means[:, part]), "could_be_seen": round(float(SEEN * means[1:, part].std()), 2)}
                         for part in range(THIRDS)],
        "trained": {name: [arms[name].trials for arms in seeds] for name in ARMS},
        "most_accurate": {name: [float(arms[name].timed.top1_test.max()) for arms in seeds] for name in ARMS},
        "minutes": {name: [round(sum(arms[name].environment["spent_s"].values()) / 60, 1) for arms in seeds]
                    for name in ARMS}})


def main() -> None:
    """Run both arms of a seed, or compare what they have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    command = parts.add_parser("search")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--minutes", type=float, default=10)
    command.add_argument("--target", default="epyc_int8")
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.add_argument("--results", type=Path, required=True)
    given, overrides = parser.parse_known_args()
    if given.part == "search":
        search(given, overrides)
    else:
        tabulate(given.runs, given.results)


if __name__ == "__main__":
    main()
