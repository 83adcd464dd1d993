"""A search beside random search: the same minutes, space, images, table and baselines, on EuroSAT at 64 px.

    python -m experiments.against_random.run search --root EUROSAT --out RUNS [--minutes 30] [--seed 0]
    python -m experiments.against_random.run table RUNS --results experiments/against_random/results

`search` runs the two commands one after another, our sampler first; measure the latency table before, so that neither
pays for it. `table` reads the run folders. The trials choose by validation images; what is compared are the verified
finalists on test images, at the latency measured in the same run.

Written before the first run: (1) The hypervolume of each search's finalists counts from chance and from the slowest
network verified in either run, over the logarithm of latency. Ours is better where the 95 % interval of the difference
over 2,000 resamples of the test images lies above zero. (2) The finalists beat their controls where the interval of the
mean difference over all pairs of a finalist and a control drawn for it lies above zero. One seed decides nothing about
searches; it shows how a claim would be made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.stats import hypervolume_2d
from hwnas.system.run_folder import RunFolder

SAMPLERS = ("hwnas", "random")
BASELINES = ("mobilenetv3_small_050", "mobilenetv3_large_100", "resnet10t")
RESAMPLES = 2000
COLUMNS = ("sampler", "id", "kind", "control_of", "top1_test", "latency_ms", "latency_ms_low", "latency_ms_high",
           "verified", "on_front", "params", "training_steps")


@dataclass(frozen=True)
class Run:
    """One search: its rows, and by network id which test images it answers rightly."""

    sampler: str
    rows: pd.DataFrame
    right: dict[str, NDArray[np.bool_]]
    environment: dict[str, Any]
    trials: int

    @classmethod
    def read(cls, folder: Path, sampler: str) -> Run:
        """The run in `folder`/`sampler`."""
        run = RunFolder(folder / sampler)
        rows, answers = pd.read_csv(run.front_csv), run.read_predictions()
        rows["kind"] = np.where(rows.is_control, "control", np.where(rows.is_baseline, "baseline", "finalist"))
        labels, environment = answers.pop("labels"), run.read_environment()
        return cls(sampler, rows.assign(sampler=sampler), {name: labels == given for name, given in answers.items()},
                   environment, int(environment["search"]["n_trials"]))

    @property
    def timed(self) -> pd.DataFrame:
        """Rows with a measured latency."""
        return self.rows[self.rows.verified]

    def hypervolume(self, images: NDArray[np.int64], slowest_ms: float, chance: float) -> float:
        """Of the finalists, on these test images."""
        finalists = self.timed[self.timed.kind == "finalist"]
        top1 = [float(self.right[name][images].mean()) for name in finalists.id]
        return hypervolume_2d(top1, np.log(finalists.latency_ms), (chance, float(np.log(slowest_ms))))

    def over_controls(self, images: NDArray[np.int64]) -> float:
        """Points of top-1 by which finalists lie above the controls drawn for them, the mean over pairs."""
        controls = self.timed[self.timed.control_of.isin(self.timed.id)]
        return 100 * float(np.mean([self.right[of][images].mean() - self.right[name][images].mean()
                                    for name, of in zip(controls.id, controls.control_of, strict=True)]))


def commands(root: Path, out: Path, minutes: float, seed: int) -> list[list[str]]:
    """The two searches, which differ in their sampler and folder."""
    return [[sys.executable, "-m", "hwnas.search", "+target=xeon_int8", "dataset=imagefolder", f"dataset.root={root}",
             "dataset.image_size=64", "space=mnasnet_small", f"budget.minutes={minutes:g}", f"seed={seed}",
             f"sampler={sampler}", "controls=4", f"baselines=[{','.join(BASELINES)}]", f"out={out / sampler}"]
            for sampler in SAMPLERS]


def summary(runs: list[Run]) -> dict[str, Any]:
    """What the rule asks for, with 95 % intervals over resamples of the test images."""
    n = len(next(iter(runs[0].right.values())))
    chance = 1 / len(runs[0].environment["dataset"]["class_names"])
    slowest_ms = max(float(run.timed.latency_ms.max()) for run in runs)
    rng = np.random.default_rng(0)
    images = [np.arange(n), *(rng.integers(0, n, n) for _ in range(RESAMPLES))]
    volumes = np.array([[run.hypervolume(part, slowest_ms, chance) for run in runs] for part in images])
    facts: dict[str, Any] = {
        "host": runs[0].environment["host"]["name"], "runtime": runs[0].environment["runtime"], "images": n,
        "slowest_ms": slowest_ms, "trials": {run.sampler: run.trials for run in runs},
        "hypervolume": dict(zip(SAMPLERS, volumes[0], strict=True)),
        "hypervolume_difference": _interval(volumes[:, 0] - volumes[:, 1])}
    facts["over_controls_points"] = {
        run.sampler: _interval(np.array([run.over_controls(part) for part in images])) for run in runs}
    return facts


def _interval(values: NDArray[np.float64]) -> dict[str, float]:
    """The value of all images, which comes first, and what 95 % of the resamples hold."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return {"value": round(float(values[0]), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def main() -> None:
    """Search, or compare what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    search = parts.add_parser("search")
    search.add_argument("--root", type=Path, required=True)
    search.add_argument("--out", type=Path, required=True)
    search.add_argument("--minutes", type=float, default=30)
    search.add_argument("--seed", type=int, default=0)
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path)
    table.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    if given.part == "search":
        for command in commands(given.root, given.out, given.minutes, given.seed):
            subprocess.run(command, check=True)
        return
    runs = [Run.read(given.runs, sampler) for sampler in SAMPLERS]
    given.results.mkdir(parents=True, exist_ok=True)
    rows = pd.concat([run.rows for run in runs])
    rows[[name for name in COLUMNS if name in rows]].to_csv(given.results / "networks.csv", index=False)
    text = json.dumps(summary(runs), indent=1)
    (given.results / "summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
