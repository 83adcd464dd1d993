"""What few minutes of one core give around a pretrained network: a race, its obvious cuts, or the network alone.

    python -m experiments.race.minutes search --data eurosat --root DIR --px 64 --weights FILE --minutes 5 --out RUN
    python -m experiments.race.minutes tune RUN --arm alone
    python -m experiments.race.minutes tune RUN --arm obvious
    python -m experiments.race.minutes table RUN … --results experiments/race/results/minutes

Each part runs on one core. The arms:

    race      around=NETWORK, the whole command within the minutes; its answers are those of the int8 files
    alone     the network fine-tuned alone for the minutes less OVERHEAD_S, at the largest image size, by one cosine;
              fp32, without an export
    obvious   the network and its obvious cuts so, each for an equal part of these seconds, from a fitted classifier
              where it has FITTED_STEPS at most

The seconds become steps by a timing beforehand. Rule:

(1) The most accurate network of the race, by the int8 files, is not worse in fp32 than the network alone by more than
    a point.
(2) Per third of the latencies (equal parts of the logarithm, from the fastest obvious cut to the whole network) the
    mean of the best top-1 at no more latency is not below that of the obvious cuts, beyond the 95 % interval over
    the test images. Latencies are those that the race measured.

It was written before the first table, except for the fast end of (2): it was the fastest network of both arms, where
the cuts had none. TrashNet, EuroSAT and groceries are no fresh test: sixteen states of the race ran on their test
images, and were chosen by them (results/minutes/tried.csv).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from experiments.race.arms import RESAMPLES, interval
from experiments.race.hour import THIRDS, levels
from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.data.loading import read_images
from hwnas.latency.table import LatencyTable
from hwnas.search.plan import Plan, line_recipe, make_plan
from hwnas.search.short_race import FITTED_STEPS
from hwnas.space.architecture import Architecture
from hwnas.space.family import WHOLE
from hwnas.system.run_folder import RunFolder
from hwnas.training.classifier import fit_classifier
from hwnas.training.line import Keeping, Leg, Stretch, answers, train_leg
from hwnas.training.loop import seeded

OVERHEAD_S = 60.0  # of a command that trains networks: reading images, exporting, scoring
WARMUP = 40
PROBED = 25  # steps that are timed


def options_of(given: Any) -> list[str]:
    """Return the options of a race."""
    return [f"target={given.target}", "dataset=imagefolder", f"dataset.root={given.root}",
            f"dataset.image_size={given.px}", f"around={given.around}", f"pretrained.file={given.weights}",
            f"seed={given.seed}", f"budget.minutes={given.minutes:g}", "baselines=[]", "controls=0", "threads=1"]


def search(given: argparse.Namespace) -> None:
    """Run the race on one core."""
    given.out.mkdir(parents=True)
    (given.out / "given.json").write_text(json.dumps({name: value if isinstance(value, int | float) else str(value)
                                                      for name, value in vars(given).items()}))
    command = ["taskset", "-c", str(given.core), sys.executable, "-m", "hwnas.search", *options_of(given),
               f"out={given.out / 'race'}"]
    sys.exit(subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode)


def read_run(folder: Path) -> tuple[argparse.Namespace, Plan, Dataset]:
    """Return what a run was given, its plan and its images."""
    asked = argparse.Namespace(**json.loads((folder / "given.json").read_text()))
    plan = make_plan(compose("search", [*options_of(asked), f"out={folder / 'none'}"]), Console(quiet=True))
    return asked, plan, read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed,
                                    Console(quiet=True))


def tune(given: argparse.Namespace) -> None:
    """Fine-tune the network, or it and its obvious cuts, on one core; ARM.csv and the answers on the test images."""
    os.sched_setaffinity(0, {given.core})
    asked, plan, data = read_run(given.run)
    names = [WHOLE] if given.arm == "alone" else [*plan.space.known]
    each_s = (60 * float(asked.minutes) - OVERHEAD_S) / len(names)
    rows, right = [], {}
    for name in names:
        network = replace(plan.space.known[name], image_size=max(plan.space.image_sizes))
        steps = round(each_s / fine_tune(plan, data, network, PROBED, is_fitted=False)[1])
        answered, step_s = fine_tune(plan, data, network, steps, is_fitted=steps <= FITTED_STEPS)
        right[network.id] = answered
        rows.append({"id": network.id, "name": name, "steps": steps, "step_s": step_s, "top1_test_fp32":
                     float(answered.mean())})
        print(rows[-1], flush=True)
    pd.DataFrame(rows).to_csv(given.run / f"{given.arm}.csv", index=False)
    np.savez(given.run / f"{given.arm}.npz", **right)


def fine_tune(plan: Plan, data: Dataset, network: Architecture, steps: int, *, is_fitted: bool
              ) -> tuple[np.ndarray, float]:
    """Train for so many steps along one cosine; the test images answered rightly, and the median seconds of a step."""
    own, ends = plan.network(network), list[float]()
    fed, recipe = own.fed(data), line_recipe(plan, data)

    def begin() -> nn.Module:
        model = own.start()
        if is_fitted:
            fit_classifier(model, fed)
        return model.train()

    with TemporaryDirectory() as folder:
        stretch = Stretch(Leg(steps, 1.0, 0.0, min(WARMUP, steps // 3)), 0, "", "tuned", begin)
        model = train_leg(stretch, Path(folder) / "none", Path(folder) / "state", data=fed, recipe=recipe,
                          seed=plan.options.seed, keep=Keeping(print),
                          progress=lambda step, of: ends.append(time.monotonic()))
        with seeded(0, recipe.threads):
            return answers(model, fed.test, fed), float(np.median(np.diff(ends))) if steps > 1 else math.nan


def judge(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return what the rule asks of one set of runs, and their networks."""
    given, run = json.loads((folder / "given.json").read_text()), RunFolder(folder / "race")
    race, alone, obvious = (pd.read_csv(path) for path in (run.front_csv, folder / "alone.csv", folder / "obvious.csv"))
    race = race[race.verified]
    timed = {each.architecture.id: each.measurement.latency_ms
             for each in LatencyTable.load(run.path / "latencies.json").networks}
    obvious["latency_ms"], alone["latency_ms"] = obvious.id.map(timed), alone.id.map(timed)
    given_answers = run.read_predictions()
    labels = given_answers.pop("labels")
    right = {"race": {key: labels == each for key, each in given_answers.items()},
             "obvious": dict(np.load(folder / "obvious.npz"))}
    rows = {"race": race, "obvious": obvious}
    ends = np.log([obvious.latency_ms.min(), obvious.latency_ms.max()])
    edges, chance, rng = np.linspace(*ends, THIRDS + 1), 1 / len(np.unique(labels)), np.random.default_rng(0)
    images = [np.arange(len(labels)), *(rng.integers(0, len(labels), len(labels)) for _ in range(RESAMPLES))]
    level = {arm: np.array([levels(part.latency_ms.to_numpy(), np.array([right[arm][id][some].mean()
                                                                         for id in part.id]), edges, chance)
                            for some in images]) for arm, part in rows.items()}
    ahead = 100 * (level["race"] - level["obvious"])
    best = race.sort_values("top1_test").iloc[-1]
    facts = {**{key: given[key] for key in ("data", "minutes", "px", "seed", "around")},
             "host": run.read_environment()["host"]["name"], "images": len(labels), "networks": len(race),
             "alone": float(alone.top1_test_fp32[0]), "alone_ms": float(alone.latency_ms[0]),
             "alone_steps": int(alone.steps[0]), "steps": int(best.steps),
             "best": float(best.top1_test_fp32), "best_int8": float(best.top1_test),
             "best_ms": float(best.latency_ms), "best_name": str(best["name"]),
             "points_ahead": [interval(ahead[:, third]) for third in range(THIRDS)]}
    kept = [part.assign(arm=arm) for arm, part in (("race", race), ("obvious", obvious), ("alone", alone))]
    return facts, pd.concat(kept).assign(
        data=given["data"], minutes=given["minutes"], seed=given["seed"])


def main() -> None:
    """Run an arm, or compare what was run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("search")
    for name in ("root", "weights", "out"):
        run.add_argument(f"--{name}", type=Path, required=True)
    run.add_argument("--data", required=True)
    run.add_argument("--target", default="xeon_int8")
    run.add_argument("--around", default="mobilenetv2_100")
    run.add_argument("--minutes", type=float, required=True)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--px", type=int, required=True)
    tuned = parts.add_parser("tune")
    tuned.add_argument("run", type=Path)
    tuned.add_argument("--arm", choices=["alone", "obvious"], required=True)
    for part in (run, tuned):
        part.add_argument("--core", type=int, default=0)
    table = parts.add_parser("table")
    table.add_argument("runs", type=Path, nargs="+")
    table.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    if given.part != "table":
        {"search": search, "tune": tune}[given.part](given)
        return
    judged = [judge(folder) for folder in given.runs]
    given.results.mkdir(parents=True, exist_ok=True)
    columns = ["data", "seed", "minutes", "arm", "id", "name", "steps", "top1_test_fp32", "top1_test", "latency_ms"]
    pd.concat([rows for _, rows in judged])[columns].to_csv(given.results / "networks.csv", index=False)
    text = json.dumps([facts for facts, _ in judged], indent=1)
    (given.results / "summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
