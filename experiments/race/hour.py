"""What the same minutes give around one pretrained network: a race, or what anybody would try.

    python -m experiments.race.hour search --root EUROSAT --weights DIR --out RUNS/0 --seed 0 --arms ours obvious
    python -m experiments.race.hour table RUNS/* --results experiments/race/results/hour/NAME
    python -m experiments.race.hour picture experiments/race/results/hour/NAME --title EuroSAT --out docs/hour.png
    python -m experiments.race.hour longer experiments/race/results/hour/NAME … --out docs/longer.png

`search` runs the commands of two `--arms` at the same time, a core each, so that what disturbs one disturbs the other
too; odd seeds swap the cores. Measure the latency tables before (`hwnas.profile`), so that no arm pays for them.
`table` reads a folder of runs for each seed. The arms:

    ours      around=NETWORK: the race
    obvious   no search: the whole network and its obvious cuts, each on images of three sizes, all fine-tuned for as
              many steps; one minute more, as the command trains one of them a second time

Up to commit 3e99294 a race also tried children, networks one structural move away from its lines, which a sampler
proposed (results/eurosat_lite0_children). Two more arms were run then, and are read where they lie:

    carried   the race without children, which is what the race is now
    random    the race with children that sampler=random proposed

Written before the runs. All of an arm's verified networks count, on test images that chose nothing, int8.

(1) Speed. At each network on the front of the obvious arm: how many times as fast is the fastest network of the arm
whose top-1 is not lower by 0.5 points or more, at the 95 % bound of the paired difference over the test images? Where
there is none, the slowest network of both arms counts. The mean of the logarithm over the networks of each third, then
over the seeds. Thirds: equal parts of the logarithm of latency between the fastest network of the obvious front and the
slowest network of the obvious arm; they are cut for each seed by itself, as latencies differ between sessions.
(2) Level. The mean over a third of the best top-1 that an arm has at no more latency (chance where it has none).
(3) Intervals: 95 % of 2,000 resamples of the seeds and of the test images; for (1) non-inferiority is judged anew in
each. An arm is faster in a third where the interval of its mean lies above 1, more accurate where that of the
difference lies above 0. Beside each stands the smallest difference that could have been seen (2.8 standard errors).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.race.arms import RESAMPLES, Arm, interval, write_results

ARMS = {"ours": [],
        "obvious": ["n_trials=2", "proxy.epochs=1", "proxy.min_steps=1", "proxy.max_steps=1", "finalists.k=1",
                    "cuts=true", "pretrained.use=true"]}
READ = ("ours", "carried", "random", "obvious")
MARGIN, Z = 0.005, 1.96
THIRDS, SEEN = 3, 2.8
COLUMNS = ("seed", "arm", "id", "name", "kind", "architecture", "top1_test_fp32", "top1_test", "latency_ms",
           "latency_ms_low", "latency_ms_high", "latency_ms_predicted", "verified", "on_front", "params")
LINES = ("seed", "arm", "number", "id", "outcome", "rungs", "source", "move", "gain", "steps", "seconds", "top1_proxy",
         "latency_ms_predicted", "reason")  # of the race's trials.csv
Array = NDArray[np.float64]


def command_of(arm: str, given: argparse.Namespace) -> list[str]:
    """The command of an arm."""
    sizes = ",".join(str(int(given.px * share) // 8 * 8) for share in (0.75, 0.5))
    own = [*ARMS[arm], *([f"image_sizes=[{sizes}]"] if arm == "obvious" else [])]
    weights = f"pretrained.{'file' if given.weights.is_file() else 'folder'}={given.weights}"
    cap = [] if given.cap_ms is None else [f"budget.latency_ms={given.cap_ms:g}"]
    return [sys.executable, "-m", "hwnas.search", f"target={given.target}", "dataset=imagefolder",
            f"dataset.root={given.root}", f"dataset.image_size={given.px}", weights, f"seed={given.seed}",
            *([f"baselines=[{given.around}]"] if arm == "obvious" else ["baselines=[]", f"around={given.around}"]),
            "controls=0",
            f"budget.minutes={given.minutes + (arm == 'obvious'):g}", f"out={given.out / arm}", *cap, *own]


def run(given: argparse.Namespace) -> None:
    """Two arms at the same time, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    if len(given.arms) > len(cores):
        sys.exit(f"{len(given.arms)} arms and {len(cores)} cores. Give fewer --arms at a time.")
    if given.seed % 2:
        cores.reverse()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(["taskset", "-c", str(core), *command_of(arm, given)], env=env)
               for core, arm in zip(cores, given.arms, strict=False)]
    if codes := [process.returncode for process in running if process.wait()]:
        sys.exit(f"of {len(running)} commands {len(codes)} ended with {codes}.")


def front_of(arm: Arm) -> pd.DataFrame:
    """Its networks that no other one of it beats, fastest first."""
    rows = arm.timed.sort_values(["latency_ms", "top1_test"], ascending=[True, False])
    return rows[rows.top1_test > rows.top1_test.cummax().shift(fill_value=0)]


def edges_of(obvious: Arm) -> Array:
    """Ends of the thirds, logarithms of ms."""
    return np.linspace(np.log(front_of(obvious).latency_ms.min()), np.log(obvious.timed.latency_ms.max()), THIRDS + 1)


def thirds_of(latency_ms: Array, edges: Array) -> NDArray[np.int64]:
    """The third of each latency, 0 to 2."""
    return np.clip(np.searchsorted(edges, np.log(latency_ms), side="right") - 1, 0, THIRDS - 1)


def speeds(arm: Arm, obvious: Arm, images: NDArray[np.int64]) -> Array:
    """Part (1) on these test images: how many times as fast at each network of the obvious front, by its third."""
    rivals, edges = front_of(obvious), edges_of(obvious)
    mine = arm.timed.sort_values("latency_ms")
    right = np.array([arm.right[str(id)][images] for id in mine.id], float)
    slowest_ms = max(float(obvious.timed.latency_ms.max()), float(mine.latency_ms.max()))
    ratios = rivals.latency_ms.to_numpy() / slowest_ms
    for at, rival in enumerate(rivals.itertuples()):
        apart = right - obvious.right[str(rival.id)][images]
        low = apart.mean(axis=1) - Z * apart.std(axis=1) / np.sqrt(len(images))
        able = np.flatnonzero(low > -MARGIN)
        if len(able):
            ratios[at] = float(rival.latency_ms) / float(mine.latency_ms.iloc[able[0]])
    third = thirds_of(rivals.latency_ms.to_numpy(), edges)
    return np.array([np.log(ratios[third == part]).mean() if (third == part).any() else np.nan
                     for part in range(THIRDS)])


def levels(latency_ms: Array, top1: Array, edges: Array, chance: float) -> Array:
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


def level_of(arm: Arm, edges: Array, images: NDArray[np.int64]) -> Array:
    """Part (2) on these test images."""
    chance = 1 / len(arm.environment["dataset"]["class_names"])
    top1 = np.array([arm.right[str(id)][images].mean() for id in arm.timed.id])
    return levels(arm.timed.latency_ms.to_numpy(), top1, edges, chance)


def summary(seeds: Sequence[Mapping[str, Arm]]) -> dict[str, Any]:
    """What the rule asks for, over runs by arm of each seed."""
    first = seeds[0]["obvious"]
    n, rng = len(next(iter(first.right.values()))), np.random.default_rng(0)
    images = [np.arange(n), *(rng.integers(0, n, n) for _ in range(RESAMPLES))]
    others = [name for name in READ if name != "obvious" and all(name in arms for arms in seeds)]
    edges = [edges_of(arms["obvious"]) for arms in seeds]
    level = {name: np.array([[level_of(arms[name], edge, part) for part in images]
                             for arms, edge in zip(seeds, edges, strict=True)]) for name in ("obvious", *others)}
    speed = {name: np.array([[speeds(arms[name], arms["obvious"], part) for part in images] for arms in seeds])
             for name in others}
    drawn = rng.integers(0, len(seeds), (RESAMPLES, len(seeds)))

    def resampled(values: Array) -> Array:
        """The mean over all seeds, then over those of each resample [1 + RESAMPLES, thirds]."""
        again = [np.nanmean(values[drawn[at], at + 1], axis=0) for at in range(RESAMPLES)]
        return np.concatenate([np.nanmean(values[:, :1], axis=0), again])

    def told(values: Array, of: Any = lambda value: value) -> list[dict[str, float]]:
        means = resampled(values)
        seen = [round(float(of(SEEN * np.nanstd(means[1:, part]))), 4) for part in range(THIRDS)]
        return [{**interval(of(means[:, part])), "could_be_seen": seen[part]} for part in range(THIRDS)]

    return {
        "host": first.environment["host"]["name"], "runtime": first.environment["runtime"], "images": n,
        "seeds": len(seeds),
        "edges_ms": [[round(float(value), 4) for value in np.exp(edge)] for edge in edges],
        "level": {name: np.round(100 * values[:, 0], 2).tolist() for name, values in level.items()},
        "times_as_fast": {name: told(values, np.exp) for name, values in speed.items()},
        "times_as_fast_by_seed": {name: np.round(np.exp(values[:, 0]), 3).tolist() for name, values in speed.items()},
        "points_ahead": {name: told(100 * (level[name] - level["obvious"])) for name in others},
        "points_ahead_of": {name: told(100 * (level["ours"] - level[name])) for name in others if name != "ours"},
        "as_fast_at": {name: [[_at(arms[name], arms["obvious"], rival)
                               for rival in front_of(arms["obvious"]).itertuples()] for arms in seeds]
                       for name in others},
        "as_fast_as_whole": {name: [_at(arms[name], arms["obvious"], whole_of(arms["obvious"])) for arms in seeds]
                             for name in others},
        "most_accurate": {name: [_most_accurate(arms[name]) for arms in seeds] for name in ("obvious", *others)}}


def whole_of(obvious: Arm) -> Any:
    """The whole network on the largest images, as the obvious arm trained it."""
    return next(row for row in obvious.timed.itertuples()
                if row.is_baseline and "-cut" not in row.id and "px-" not in row.id)


def _at(arm: Arm, obvious: Arm, rival: Any) -> dict[str, Any]:
    """Part (1) at one network of the obvious arm, on all test images."""
    said: dict[str, Any] = {"rival": rival.id, "top1": rival.top1_test, "latency_ms": rival.latency_ms}
    for row in arm.timed.sort_values("latency_ms").itertuples():
        apart = arm.right[str(row.id)].astype(float) - obvious.right[str(rival.id)]
        if apart.mean() - Z * apart.std() / np.sqrt(len(apart)) > -MARGIN:
            said |= {"ours": row.id, "our_top1": row.top1_test, "our_latency_ms": row.latency_ms,
                     "times_as_fast": round(float(rival.latency_ms) / float(row.latency_ms), 3)}
            break
    return said


def _most_accurate(arm: Arm) -> dict[str, Any]:
    best = arm.timed.sort_values("latency_ms").iloc[int(arm.timed.sort_values("latency_ms").top1_test.argmax())]
    return {"id": best.id, "top1": float(best.top1_test), "latency_ms": float(best.latency_ms)}


LOOK = {"ours": ("#1f5fbf", "o", "the race"), "carried": ("#0e9384", "^", "the race without children, hours later"),
        "random": ("#667085", "s", "the race, children at random, hours later"),
        "obvious": ("#c2410c", "D", "whole network and obvious cuts, three image sizes")}


def draw(results: Path, title: str, out: Path) -> None:
    """Every network of every arm and seed, and the front of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, facts = pd.read_csv(results / "networks.csv"), json.loads((results / "summary.json").read_text())
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6), layout="constrained")
    for arm in reversed([name for name in LOOK if name in set(rows.arm)]):
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
    seeds = "one seed" if facts["seeds"] == 1 else f"{facts['seeds']} seeds"
    axes.set_title(f"{facts['host']}, {facts['runtime']}, {facts['images']} test images, {seeds}", loc="left",
                   fontsize=8, color="#667085")
    figure.suptitle(f"{title}: what the same minutes give, from the same pretrained network", x=0.01, ha="left",
                    fontsize=11, fontweight="bold")
    axes.grid(color="#eaecf0", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(out, dpi=150)


def draw_longer(folders: Sequence[Path], out: Path) -> None:
    """The level of each third against the minutes that an arm took, of results that differ in their minutes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    told = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    figure, panels = pyplot.subplots(1, THIRDS, figsize=(9.6, 3.6), layout="constrained")
    for third, axes in enumerate(panels):
        for arm in ("obvious", "ours"):
            colour, marker, label = LOOK[arm]
            points = sorted((minutes, level[third]) for facts in told
                            for minutes, level in zip(facts["minutes"][arm], facts["level"][arm], strict=True))
            axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=26, label=label, zorder=3)
            means = [(np.mean(facts["minutes"][arm]), np.mean([level[third] for level in facts["level"][arm]]))
                     for facts in told]
            axes.plot(*zip(*means, strict=True), color=colour, linewidth=1.2, alpha=0.6)
        axes.set_title(("fast third", "middle third", "slow third")[third], loc="left", fontsize=9)
        axes.set_xlabel("minutes of one core")
        axes.grid(color="#eaecf0", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean best test top-1 (%)")
    hosts = [f"{facts['host']}, {facts['seeds']} seed{'s' * (facts['seeds'] > 1)}" for facts in told]
    figure.suptitle("; ".join(dict.fromkeys(hosts)), x=0.01, ha="left", fontsize=8, color="#667085")
    marks = panels[0].get_legend_handles_labels()
    figure.legend(*marks, frameon=False, loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(out, dpi=150)


def tabulate(folders: Sequence[Path], results: Path) -> None:
    """Read a folder of runs for each seed, and write what the rule asks for."""
    seeds = [{name: Arm.read(folder, name) for name in READ if (folder / name / "front.csv").is_file()}
             for folder in folders]
    rows = [arm.rows.assign(seed=folder.name) for folder, arms in zip(folders, seeds, strict=True)
            for arm in arms.values()]
    lines = pd.concat(pd.read_csv(folder / name / "trials.csv").assign(seed=folder.name, arm=name)
                      for folder, arms in zip(folders, seeds, strict=True) for name in arms if name != "obvious")
    children = {name: [_children(part) for _, part in own.groupby("seed")] for name, own in lines.groupby("arm")}
    facts = {**summary(seeds), "children": children, "minutes": {
        name: [round(sum(arms[name].environment["spent_s"].values()) / 60, 1) for arms in seeds] for name in seeds[0]}}
    write_results(results, pd.concat(rows), COLUMNS, _known(facts))
    lines[list(LINES)].to_csv(results / "lines.csv", index=False)


def _known(value: Any) -> Any:
    """The same with None for what is not a number: a third that has no network to be held against."""
    if isinstance(value, Mapping):
        return {key: _known(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_known(each) for each in value]
    return None if isinstance(value, float) and np.isnan(value) else value


def _children(rows: pd.DataFrame) -> dict[str, int]:
    """How many children a race trained, and how many of them it finished."""
    tried = rows[rows.rungs.fillna("").str.contains("child")]
    return {"trained": len(tried), "finished": int((tried.outcome == "evaluated").sum())}


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
    search.add_argument("--cap-ms", type=float)
    search.add_argument("--arms", nargs="+", choices=[*ARMS], default=["ours", "obvious"])
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.add_argument("--results", type=Path, required=True)
    picture = parts.add_parser("picture")
    picture.add_argument("results", type=Path)
    picture.add_argument("--title", required=True)
    longer = parts.add_parser("longer")
    longer.add_argument("results", type=Path, nargs="+")
    for part in (picture, longer):
        part.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.part == "picture":
        draw(given.results, given.title, given.out)
    elif given.part == "longer":
        draw_longer(given.results, given.out)
    elif given.part == "search":
        run(given)
    else:
        tabulate(given.runs, given.results)


if __name__ == "__main__":
    main()
