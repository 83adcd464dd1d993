"""What few minutes of one core give around a pretrained network: a race, its obvious cuts, or the network alone.

    python -m experiments.race.minutes search --data eurosat --root DIR --px 64 --weights FILE --minutes 5 --out RUNS
    python -m experiments.race.minutes alone RUNS/…
    python -m experiments.race.minutes table RUNS/* --results experiments/race/results/minutes

`search` runs the first two arms at the same time, a core each, and `alone` the third in up to two folders:

    ours      around=NETWORK: the race
    obvious   no search: the network and its obvious cuts on images of three sizes, all fine-tuned for as many steps; a
              minute more (hour.py)
    alone     the network fine-tuned alone (hwnas train), for as many steps as fit into the minutes less OVERHEAD_S, by
              the seconds of a step in the race of the same minutes

Written before the runs, on test images that chose nothing:

(1) The most accurate network of the race is not worse than the network alone by more than one point, fp32 against fp32
    (the race's is the one that is the best in int8 on the test images).
(2) In each third of the latencies (hour.py) the mean of the best top-1 at no more latency, int8, is not below that of
    the obvious cuts beyond the 95 % interval over the test images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from experiments.race.arms import RESAMPLES, Arm, interval
from experiments.race.hour import command_of, edges_of, level_of

OVERHEAD_S = 60.0  # of the command that trains one network: reading images, exporting, scoring
COLUMNS = ("data", "minutes", "arm", "id", "name", "is_baseline", "top1_test_fp32", "top1_test", "latency_ms", "steps",
           "verified")


def _start(command: Sequence[str], core: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["taskset", "-c", str(core), *command], env={**os.environ, "OMP_NUM_THREADS": "1"})


def search(given: argparse.Namespace) -> None:
    """Run the race beside the obvious cuts."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    wanted = SimpleNamespace(**vars(given), cap_ms=None)
    arms = [_start(command_of(arm, wanted), core) for arm, core in zip(("ours", "obvious"), cores, strict=True)]
    if codes := [arm.returncode for arm in arms if arm.wait()]:
        sys.exit(f"of {len(arms)} commands {len(codes)} ended with {codes}.")
    (given.out / "given.json").write_text(json.dumps({name: getattr(given, name) if name in ("data", "minutes", "px",
                                                      "seed", "around") else str(getattr(given, name))
                                                      for name in ("data", "minutes", "px", "seed", "around", "root",
                                                                   "weights")}))


def alone(given: argparse.Namespace) -> None:
    """Train the networks of several folders alone, each on a core of its own."""
    running = []
    for core, out in zip(sorted(os.sched_getaffinity(0)), given.runs, strict=False):
        asked = SimpleNamespace(**json.loads((out / "given.json").read_text()))
        steps = round((60 * asked.minutes - OVERHEAD_S) / step_s(out / "ours"))
        running.append(_start([
            sys.executable, "-m", "hwnas.train", f"model=timm:{asked.around}", "pretrained=true",
            f"pretrained.file={asked.weights}", "dataset=imagefolder", f"dataset.root={asked.root}",
            f"dataset.image_size={asked.px}", f"seed={asked.seed}", "epochs=1", f"min_steps={steps}",
            f"max_steps={steps}", f"out={out / 'alone'}"], core))
    if codes := [each.returncode for each in running if each.wait()]:
        sys.exit(f"of {len(running)} trainings {len(codes)} ended with {codes}.")


def step_s(run: Path) -> float:
    """Return the seconds of a step of the race's first network."""
    first = pd.read_csv(run / "trials.csv").iloc[0]
    return float(first.seconds) / float(first.steps)


def judge(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return what the rule asks of one set of runs, and their networks."""
    given = json.loads((folder / "given.json").read_text())
    ours, obvious = Arm.read(folder, "ours"), Arm.read(folder, "obvious")
    alone = json.loads((folder / "alone" / "summary.json").read_text())
    best = ours.timed.sort_values("top1_test").iloc[-1]
    n, rng, edges = len(next(iter(ours.right.values()))), np.random.default_rng(0), edges_of(obvious)
    images = [np.arange(n), *(rng.integers(0, n, n) for _ in range(RESAMPLES))]
    ahead = np.array([100 * (level_of(ours, edges, part) - level_of(obvious, edges, part)) for part in images])
    facts = {**given, "host": ours.environment["host"]["name"], "images": n, "networks": len(ours.timed),
             "alone_fp32": alone["top1_test"], "ours_fp32": float(best.top1_test_fp32), "ours": float(best.top1_test),
             "obvious": float(obvious.timed.top1_test.max()),
             "levels": [level_of(arm, edges, images[0]).round(4).tolist() for arm in (ours, obvious)],
             "points_ahead": [interval(ahead[:, third]) for third in range(ahead.shape[1])]}
    rows = pd.concat([ours.rows, obvious.rows]).assign(data=given["data"], minutes=given["minutes"])
    return facts, rows[[name for name in COLUMNS if name in rows]]


def main() -> None:
    """Run the arms of one data set and length, or compare what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("search")
    for name in ("root", "weights", "out"):
        run.add_argument(f"--{name}", type=Path, required=True)
    run.add_argument("--data", required=True)
    run.add_argument("--target", default="epyc_int8")
    run.add_argument("--around", default="mobilenetv2_100")
    run.add_argument("--minutes", type=float, required=True)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--px", type=int, required=True)
    only = parts.add_parser("alone")
    only.add_argument("runs", type=Path, nargs="+")
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    if given.part != "table":
        (search if given.part == "search" else alone)(given)
        return
    judged = [judge(folder) for folder in given.runs]
    given.results.mkdir(parents=True, exist_ok=True)
    pd.concat([rows for _, rows in judged]).to_csv(given.results / "networks.csv", index=False)
    text = json.dumps([facts for facts, _ in judged], indent=1)
    (given.results / "summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
