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
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.arms import Arm, interval, resampled, slowest_of, volumes_of, write_results

SAMPLERS = ("hwnas", "random")
BASELINES = ("mobilenetv3_small_050", "mobilenetv3_large_100", "resnet10t")
COLUMNS = ("sampler", "id", "kind", "control_of", "top1_test", "latency_ms", "latency_ms_low", "latency_ms_high",
           "verified", "on_front", "params", "training_steps")


def over_controls(arm: Arm, images: NDArray[np.int64]) -> float:
    """Points of top-1 by which finalists lie above the controls drawn for them, the mean over pairs."""
    controls = arm.timed[arm.timed.control_of.isin(arm.timed.id)]
    return 100 * float(np.mean([arm.right[of][images].mean() - arm.right[name][images].mean()
                                for name, of in zip(controls.id, controls.control_of, strict=True)]))


def commands(root: Path, out: Path, minutes: float, seed: int) -> list[list[str]]:
    """The two searches, which differ in their sampler and folder."""
    return [[sys.executable, "-m", "hwnas.search", "+target=xeon_int8", "dataset=imagefolder", f"dataset.root={root}",
             "dataset.image_size=64", "space=mnasnet_small", f"budget.minutes={minutes:g}", f"seed={seed}",
             f"sampler={sampler}", "controls=4", f"baselines=[{','.join(BASELINES)}]", f"out={out / sampler}"]
            for sampler in SAMPLERS]


def summary(arms: list[Arm]) -> dict[str, Any]:
    """What the rule asks for, with 95 % intervals over resamples of the test images."""
    images = resampled(arms)
    volumes = volumes_of(arms, images, finalists=True)
    return {
        "host": arms[0].environment["host"]["name"], "runtime": arms[0].environment["runtime"],
        "images": len(images[0]), "slowest_ms": slowest_of(arms), "trials": {arm.name: arm.trials for arm in arms},
        "hypervolume": dict(zip(SAMPLERS, volumes[0], strict=True)),
        "hypervolume_difference": interval(volumes[:, 0] - volumes[:, 1]),
        "over_controls_points": {arm.name: interval(np.array([over_controls(arm, part) for part in images]))
                                 for arm in arms}}


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
    arms = [Arm.read(given.runs, sampler, "sampler") for sampler in SAMPLERS]
    write_results(given.results, pd.concat([arm.rows for arm in arms]), COLUMNS, summary(arms))


if __name__ == "__main__":
    main()
