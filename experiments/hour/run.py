"""What a team gets in the same minutes: a search around a pretrained network, random choice from the same cuts, or the
cuts that anybody would try.

    python -m experiments.hour.run search --root EUROSAT --weights DIR --out RUNS [--minutes 20] [--seed 0] [--px 64]
    python -m experiments.hour.run table RUNS --results experiments/hour/results/NAME
    python -m experiments.hour.run picture experiments/hour/results/NAME --title "EuroSAT, 64 px" --out docs/hour.png

`search` runs the three commands one after another on one machine; measure the latency table before, so that none pays
for it (`python -m hwnas.profile`). `table` reads the run folders. The arms:

    ours      around=NETWORK
    random    the same with sampler=random: random networks of the space, and the same first four
    obvious   no search: the whole network, its first blocks, and two shorter cuts, each at three image sizes,
              fine-tuned for the whole time; a minute more, as the command fine-tunes one of them a second time

Written before the first run: all of an arm's verified networks count, on test images that chose nothing. (1) The
hypervolume counts from chance and from the slowest network of any arm, over the logarithm of latency. Ours is ahead of
another arm where the 95 % interval of the difference over 2,000 resamples of the test images lies above zero. (2) At
each network on the obvious arm's front: the fastest network of ours whose top-1 is lower by less than 0.5 points at the
95 % bound of the paired difference, and how many times as fast it is. One seed decides nothing about searches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.arms import Arm, interval, resampled, slowest_of, volumes_of, write_results
from hwnas.front.comparison import paired_bootstrap

ARMS = ("ours", "random", "obvious")
MARGIN = 0.005
COLUMNS = ("arm", "id", "name", "kind", "architecture", "top1_test_fp32", "top1_test", "latency_ms", "latency_ms_low",
           "latency_ms_high", "latency_ms_predicted", "verified", "on_front", "params")


def front_of(arm: Arm) -> pd.DataFrame:
    """Its networks that no other one of it beats, fastest first."""
    rows = arm.timed.sort_values(["latency_ms", "top1_test"], ascending=[True, False])
    return rows[rows.top1_test > rows.top1_test.cummax().shift(fill_value=0)]


def commands(given: argparse.Namespace) -> list[list[str]]:
    """The command of each arm."""
    shared = [sys.executable, "-m", "hwnas.search", f"+target={given.target}", "dataset=imagefolder",
              f"dataset.root={given.root}", f"dataset.image_size={given.px}", f"around={given.around}",
              f"pretrained.folder={given.weights}", f"seed={given.seed}", "controls=0", "baselines=[]"]
    sizes = ",".join(str(int(given.px * share) // 8 * 8) for share in (0.75, 0.5))
    own = {"ours": ["finalists.k=5"], "random": ["finalists.k=5", "sampler=random"],
           "obvious": ["n_trials=2", "inherited.epochs=1", "inherited.min_steps=1", "inherited.max_steps=1",
                       "finalists.k=1", "cuts=true", f"image_sizes=[{sizes}]"]}
    return [[*shared, *own[arm], f"budget.minutes={given.minutes + (arm == 'obvious'):g}", f"out={given.out / arm}"]
            for arm in ARMS]


def summary(arms: list[Arm]) -> dict[str, Any]:
    """What the rule asks for."""
    images = resampled(arms)
    volumes, ours, others = volumes_of(arms, images), arms[0], arms[1:]
    return {
        "host": ours.environment["host"]["name"], "runtime": ours.environment["runtime"], "images": len(images[0]),
        "slowest_ms": slowest_of(arms),
        "hypervolume": {arm.name: round(float(volumes[0, i]), 4) for i, arm in enumerate(arms)},
        "trials": {arm.name: arm.trials for arm in arms},
        "steps": {arm.name: int(arm.environment["training"]["steps"]) for arm in arms},
        "ahead_of": {arm.name: interval(volumes[:, 0] - volumes[:, i + 1]) for i, arm in enumerate(others)},
        "as_fast": {arm.name: [_as_fast(ours, arm, row) for row in front_of(arm).itertuples()] for arm in others}}


def _as_fast(ours: Arm, arm: Arm, rival: Any) -> dict[str, Any]:
    """How many times as fast as `rival` our fastest network is that is no less accurate."""
    said: dict[str, Any] = {"rival": rival.id, "top1": rival.top1_test, "latency_ms": rival.latency_ms}
    for row in ours.timed.sort_values("latency_ms").itertuples():
        difference, low, high = paired_bootstrap(ours.right[str(row.id)], arm.right[rival.id])
        if low > -MARGIN:
            return {**said, "ours": row.id, "our_top1": row.top1_test, "our_latency_ms": row.latency_ms,
                    "points": [round(100 * value, 2) for value in (difference, low, high)],
                    "times_as_fast": round(rival.latency_ms / float(row.latency_ms), 3)}
    return {**said, "ours": None}


LOOK = {"ours": ("#1f5fbf", "o", "searched around the network"),
        "random": ("#667085", "s", "random cuts, the obvious ones among them"),
        "obvious": ("#c2410c", "D", "whole network and obvious cuts, three image sizes")}


def draw(results: Path, title: str, out: Path) -> None:
    """Every network of every arm, and each arm's front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, facts = pd.read_csv(results / "networks.csv"), json.loads((results / "summary.json").read_text())
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6), layout="constrained")
    for arm in reversed(ARMS):
        colour, marker, label = LOOK[arm]
        part = rows[rows.arm == arm].sort_values("latency_ms")
        front = part[part.top1_test > part.top1_test.cummax().shift(fill_value=0)]
        axes.step(front.latency_ms, 100 * front.top1_test, where="post", color=colour, linewidth=1.2, alpha=0.7)
        axes.scatter(part.latency_ms, 100 * part.top1_test, color=colour, marker=marker, s=26, label=label, zorder=3)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)
             if rows.latency_ms.min() * 0.9 < tick < rows.latency_ms.max() * 1.1]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="latency of one image, int8, one thread (ms, log scale)", ylabel="test top-1 (%)")
    axes.set_title(f"{facts['host']}, {facts['runtime']}, {facts['images']} test images, one seed", loc="left",
                   fontsize=8, color="#667085")
    figure.suptitle(f"{title}: what the same minutes give, from the same pretrained network", x=0.01, ha="left",
                    fontsize=11, fontweight="bold")
    axes.grid(color="#eaecf0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(out, dpi=150)


def main() -> None:
    """Run the arms, compare what they have, or draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    search = parts.add_parser("search")
    for name in ("root", "weights", "out"):
        search.add_argument(f"--{name}", type=Path, required=True)
    search.add_argument("--target", default="epyc_int8")
    search.add_argument("--around", default="tf_efficientnet_lite0")
    search.add_argument("--minutes", type=float, default=20)
    search.add_argument("--seed", type=int, default=0)
    search.add_argument("--px", type=int, default=64)
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path)
    table.add_argument("--results", type=Path, required=True)
    picture = parts.add_parser("picture")
    picture.add_argument("results", type=Path)
    picture.add_argument("--title", required=True)
    picture.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.part == "picture":
        draw(given.results, given.title, given.out)
        return
    if given.part == "search":
        for command in commands(given):
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return
    arms = [Arm.read(given.runs, arm) for arm in ARMS]
    verified = [replace(arm, rows=arm.timed) for arm in arms]
    write_results(given.results, verified, COLUMNS, summary(arms))


if __name__ == "__main__":
    main()
