"""Does the sampler beat random choice in whole searches from scratch, of as many trials and steps?

    python -m experiments.sampler.from_scratch search --data fashion_mnist --root DIR --sampler hwnas --seed 0 --out RUN
    python -m experiments.sampler.from_scratch table RUN … --results experiments/sampler/results/from_scratch

A pair of searches, with sampler=hwnas and sampler=random, has one seed, TRIALS trials of the proxy's own length and
FINALISTS finalists of STEPS steps each. Both try the space's known networks first. Rule, written before the runs: over
two data sets and three seeds each, the mean over the three thirds of the latencies of the points of top-1 by which the
verified front of hwnas lies above that of random choice, at equal latency. If its 95 % interval, over test images,
seeds and data sets, is above zero, an advantage is shown; otherwise none is. The thirds are those of random choice
(experiments/race/arms.py). Steps are counted and not seconds, so that a busy machine changes nothing but latencies.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.common import hypervolume_2d
from experiments.race.arms import RESAMPLES, Arm, ahead_of, interval
from hwnas.front.finalists import usable_trials
from hwnas.system.run_folder import RunFolder

TRIALS, FINALISTS, STEPS, PX = 40, 4, 400, 32
SAMPLERS = ("hwnas", "random")


def search(given: argparse.Namespace) -> None:
    """Run one of the two searches on one core."""
    given.out.mkdir(parents=True)
    (given.out / "given.json").write_text(json.dumps({key: getattr(given, key) for key in ("data", "sampler", "seed")}))
    command = [sys.executable, "-m", "hwnas.search", f"target={given.target}", "space=mnasnet_small",
               f"dataset={'imagefolder' if given.data == 'eurosat' else given.data}", f"dataset.root={given.root}",
               f"dataset.image_size={PX}", f"sampler={given.sampler}", f"seed={given.seed}", f"n_trials={TRIALS}",
               f"finalists.k={FINALISTS}", f"finalists.recipe.min_steps={STEPS}",
               f"finalists.recipe.max_steps={STEPS}", "controls=0", "baselines=[]", "workers=1", "threads=1",
               f"out={given.out / 'run'}"]
    sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


def read_arm(folder: Path) -> tuple[Arm, pd.DataFrame, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the verified networks of a search with their answers, their rows, and the labels."""
    run = RunFolder(folder / "run")
    rows = pd.read_csv(run.front_csv).query("verified")
    answers = run.read_predictions()
    labels = answers.pop("labels")
    right = {id: each == labels for id, each in answers.items()}
    return Arm.of(dict(zip(rows.id, rows.latency_ms, strict=True)), right), rows, labels


def judge(folders: list[Path]) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return what the rule asks, and the networks of all searches."""
    given = {folder: json.loads((folder / "given.json").read_text()) for folder in folders}
    pairs: dict[tuple[str, int], dict[str, Path]] = {}
    for folder, said in given.items():
        pairs.setdefault((said["data"], said["seed"]), {})[said["sampler"]] = folder
    rng, ahead, told, kept = np.random.default_rng(0), dict[str, list[Any]](), [], []
    for (data, seed), by_sampler in sorted(pairs.items()):
        arms = {sampler: read_arm(by_sampler[sampler]) for sampler in SAMPLERS}
        labels = arms["hwnas"][2]
        images = [np.arange(len(labels)), *(rng.integers(0, len(labels), len(labels)) for _ in range(RESAMPLES))]
        values = [ahead_of(arms["hwnas"][0], arms["random"][0], some, 1 / len(np.unique(labels))) for some in images]
        ahead.setdefault(data, []).append(values)
        told.append({"data": data, "seed": seed, "points_ahead": [round(float(each), 2) for each in values[0]],
                     "mean": round(float(np.mean(values[0])), 2), **{
                         f"best_{sampler}": float(arm[1].top1_test.max()) for sampler, arm in arms.items()}, **{
                         f"proxies_{sampler}": proxies_of(by_sampler[sampler]) for sampler in SAMPLERS}})
        kept += [rows.assign(data=data, seed=seed, sampler=sampler) for sampler, (_, rows, _) in arms.items()]
    facts: dict[str, Any] = {"host": RunFolder(folders[0] / "run").read_environment()["host"]["name"], "runs": told}
    drawn = {data: np.array(values) for data, values in ahead.items()}  # [seeds, resamples, thirds]
    for data, values in drawn.items():
        facts[data] = [interval(resampled([values], rng)[:, third]) for third in range(values.shape[2])]
        facts[f"{data}_mean"] = interval(resampled([values], rng).mean(axis=1))
    facts["mean"] = interval(resampled([*drawn.values()], rng).mean(axis=1))
    return facts, pd.concat(kept)


def resampled(sets: list[np.ndarray[Any, Any]], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the mean over data sets and their seeds for all images, which comes first, and for each resample of images
    and seeds [resamples, thirds]."""
    means = []
    for at in range(sets[0].shape[1]):
        parts = [values[rng.integers(0, len(values), len(values)) if at else slice(None), at].mean(axis=0)
                 for values in sets]
        means.append(np.mean(parts, axis=0))
    return np.array(means)


def proxies_of(folder: Path) -> float:
    """Return the area under the front of the proxies, below 1 ms, by the logarithm of latency to base two."""
    rows = usable_trials(RunFolder(folder / "run").read_trials())
    return round(hypervolume_2d([row["top1_proxy"] for row in rows],
                                [np.log2(row["latency_ms_predicted"]) for row in rows], (0.0, 0.0)), 4)


def main() -> None:
    """Run a search, or compare searches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("search")
    run.add_argument("--data", choices=["eurosat", "fashion_mnist"], required=True)
    run.add_argument("--sampler", choices=SAMPLERS, required=True)
    run.add_argument("--seed", type=int, required=True)
    run.add_argument("--target", default="xeon_int8")
    for name in ("root", "out"):
        run.add_argument(f"--{name}", type=Path, required=True)
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    if given.part == "search":
        search(given)
        return
    facts, networks = judge(given.runs)
    given.results.mkdir(parents=True, exist_ok=True)
    columns = ["data", "seed", "sampler", "id", "name", "top1_proxy", "top1_test_fp32", "top1_test", "latency_ms"]
    networks[columns].to_csv(given.results / "networks.csv", index=False)
    text = json.dumps(facts, indent=1)
    (given.results / "summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
