"""What a team gets in the same minutes: a search around a pretrained network, random choice from the same cuts, or the
cuts that anybody would try.

    python -m experiments.hour.run search --root EUROSAT --weights DIR --out RUNS [--minutes 20] [--seed 0] [--px 64]
    python -m experiments.hour.run table RUNS... --results experiments/hour/results/NAME
    python -m experiments.hour.run picture experiments/hour/results/NAME --title "EuroSAT, 64 px" --out docs/hour.png

`search` runs the commands of `--arms` one after another on one machine, or with `--beside` at the same time, a core
each, so that what disturbs one disturbs the other too; measure the latency table before, so that none pays for it
(`python -m hwnas.profile`). `table` reads a folder of runs for each seed. The arms:

    ours      around=NETWORK
    random    the same with sampler=random: random networks of the space, and the same known ones first
    obvious   no search: the whole network, its first blocks, and two shorter cuts, each at three image sizes,
              fine-tuned for the whole time; a minute more, as the command fine-tunes one of them a second time

Written before the first run: all of an arm's verified networks count, on test images that chose nothing. (1) The
hypervolume counts from chance and from the slowest network of any arm, over the logarithm of latency. Ours is ahead of
another arm where the 95 % interval of the difference over 2,000 resamples of the test images lies above zero. (2) At
each network on the obvious arm's front: the fastest network of ours whose top-1 is lower by less than 0.5 points at the
95 % bound of the paired difference, and how many times as fast it is. One seed decides nothing about searches.

Written before the runs of several seeds: (3) the range of latency is the one in which the obvious arm has networks,
from the fastest on its front to the slowest of all its own. It is cut into three equal parts of the logarithm. An arm's
level in a part is the mean over it of the best top-1 that the arm has at no more latency (chance where it has none).
Ours is ahead in a part where the 95 % interval of the difference, over 2,000 resamples of the seeds (of each arm by
itself) and of the test images, lies above zero. With three seeds such an interval is rough, and each seed's own
difference stands beside it. (2) is then told for each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.arms import RESAMPLES, Arm, interval, resampled, slowest_of, volumes_of, write_results
from hwnas.front.comparison import paired_bootstrap

ARMS = ("ours", "random", "obvious")
MARGIN = 0.005
THIRDS = 3
COLUMNS = ("seed", "arm", "id", "name", "kind", "architecture", "top1_test_fp32", "top1_test", "latency_ms",
           "latency_ms_low", "latency_ms_high", "latency_ms_predicted", "verified", "on_front", "params")


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
            for arm in given.arms]


def run(given: argparse.Namespace) -> None:
    """The arms one after another, or each on a core of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not given.beside:
        for command in commands(given):
            subprocess.run(command, check=True, env=env)
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(given.arms) > len(cores):
        sys.exit(f"--beside: {len(given.arms)} arms and {len(cores)} cores. Give fewer --arms at a time.")
    running = [subprocess.Popen(["taskset", "-c", str(core), *command], env=env)
               for core, command in zip(cores, commands(given), strict=False)]
    if codes := [process.returncode for process in running if process.wait()]:
        sys.exit(f"of {len(running)} commands {len(codes)} ended with {codes}.")


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


def edges_of(obvious: Arm) -> NDArray[np.float64]:
    """Ends of the three parts of the logarithm of latency."""
    return np.linspace(np.log(front_of(obvious).latency_ms.min()), np.log(obvious.timed.latency_ms.max()), THIRDS + 1)


def levels(latency_ms: NDArray[np.float64], top1: NDArray[np.float64], edges: NDArray[np.float64], chance: float
           ) -> NDArray[np.float64]:
    """The mean, over each part between two `edges` of log latency, of the best top-1 at no more latency."""
    order = np.argsort(latency_ms, kind="stable")
    at, best = np.log(latency_ms[order]), np.maximum.accumulate(np.maximum(top1[order], chance))
    ends, heights = np.append(at, np.inf), np.append(chance, best)  # from each of `at` on the height behind it
    starts = np.append(-np.inf, at)
    means = []
    for low, high in pairwise(edges):
        widths = np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None)
        means.append(float((widths * heights).sum() / (high - low)))
    return np.array(means)


def thirds(seeds: Sequence[Mapping[str, Arm]]) -> dict[str, Any]:
    """Part (3) of the rule, over runs by arm of each seed."""
    obvious = next(arms["obvious"] for arms in seeds if "obvious" in arms)
    edges, images = edges_of(obvious), resampled([obvious])
    chance = 1 / len(obvious.environment["dataset"]["class_names"])
    rng = np.random.default_rng(1)

    def level(arm: Arm, part: NDArray[np.int64]) -> NDArray[np.float64]:
        top1 = np.array([arm.right[id][part].mean() for id in arm.timed.id])
        return levels(arm.timed.latency_ms.to_numpy(), top1, edges, chance)

    reached = {name: np.array([[level(arms[name], part) for part in images] for arms in seeds if name in arms])
             for name in ARMS if any(name in arms for arms in seeds)}  # [seed, drawing, part]
    drawn = {name: rng.integers(0, len(values), (RESAMPLES, len(values))) for name, values in reached.items()}
    means = {name: np.concatenate([values[:, :1].mean(0), np.stack(
        [values[drawn[name][at], at + 1].mean(0) for at in range(RESAMPLES)])]) for name, values in reached.items()}
    own = {name: 100 * values[:, 0] for name, values in reached.items()}  # all images
    return {
        "edges_ms": [round(float(value), 4) for value in np.exp(edges)],
        "level": {name: [[round(float(value), 2) for value in row] for row in values] for name, values in own.items()},
        "ahead_of": {name: [interval(100 * (means["ours"] - means[name])[:, part]) for part in range(THIRDS)]
                     for name in reached if name != "ours"}}


LOOK = {"ours": ("#1f5fbf", "o", "searched around the network"),
        "random": ("#667085", "s", "random cuts, the obvious ones among them"),
        "obvious": ("#c2410c", "D", "whole network and obvious cuts, three image sizes")}


def draw(results: Path, title: str, out: Path) -> None:
    """Every network of every arm and seed, and the front of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, facts = pd.read_csv(results / "networks.csv"), json.loads((results / "summary.json").read_text())
    rows = rows if "seed" in rows else rows.assign(seed=0)  # a run of one seed, of before there were several
    told = facts.get("seeds", [facts])
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6), layout="constrained")
    for arm in reversed(ARMS):
        colour, marker, label = LOOK[arm]
        part = rows[rows.arm == arm].sort_values("latency_ms")
        for _, run in part.groupby("seed"):
            front = run[run.top1_test > run.top1_test.cummax().shift(fill_value=0)]
            axes.step(front.latency_ms, 100 * front.top1_test, where="post", color=colour, linewidth=1.2, alpha=0.6)
        axes.scatter(part.latency_ms, 100 * part.top1_test, color=colour, marker=marker, s=26, label=label, zorder=3)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)
             if rows.latency_ms.min() * 0.9 < tick < rows.latency_ms.max() * 1.1]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="latency of one image, int8, one thread (ms, log scale)", ylabel="test top-1 (%)")
    seeds = "one seed" if len(told) == 1 else f"{len(told)} seeds"
    axes.set_title(f"{told[0]['host']}, {told[0]['runtime']}, {told[0]['images']} test images, {seeds}", loc="left",
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
    search.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    search.add_argument("--beside", action="store_true")
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
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
        run(given)
        return
    tabulate(given.runs, given.results)


def tabulate(folders: Sequence[Path], results: Path) -> None:
    """Read a folder of runs for each seed, and write what the rule asks for."""
    seeds = []
    for folder in folders:
        arms = {name: Arm.read(folder, name) for name in ARMS if (folder / name).is_dir()}
        seeds.append({name: replace(arm, rows=arm.timed.assign(seed=folder.name)) for name, arm in arms.items()})
    every = [arm for arms in seeds for arm in arms.values()]
    obvious = next(arms["obvious"] for arms in seeds if "obvious" in arms)
    facts = [summary([({"obvious": obvious} | arms)[name] for name in ARMS if name in {"obvious", *arms}])
             for arms in seeds]
    write_results(results, every, COLUMNS, {**(facts[0] if len(seeds) == 1 else {"seeds": facts}),
                                            "thirds": thirds(seeds)})


if __name__ == "__main__":
    main()
