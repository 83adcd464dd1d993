"""What choosing the deployment together with the network is worth: the same minutes with one target and with a set.

    python -m experiments.latency.deployments.run --out DIR --data eurosat=FOLDER:64 trashnet=FOLDER:96 --weights FILE

For each data set and seed a race around one pretrained network for each arm: `set` for four deployments, and its best
targets alone. Each has a core of its own and a home of its own, so that each pays for its calibrations; two run at a
time, in an order that changes from seed to seed. Rule, written before the runs: what counts is the hypervolume of the
verified networks above the worst top-1 and below the longest latency of all arms, in top-1 and log latency. The best
single target of a data set is the one with the largest mean over the seeds, which is kind to it; the set is called
better where it has 5 % more than that for every seed. `together` is the hypervolume of all networks of the targets
alone, which took as many times the minutes: more than that a choice between them could hardly give. networks.csv has
every verified network, summary.json the hypervolumes and which deployments lie on the front of the set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.common import hypervolume_2d

CORES = 2  # searches at a time
BETTER = 1.05
SET = ("openvino_int8", "openvino_bf16", "ort_int8", "edge_int8")
ARMS = {"set": ["+target=cpu", f"target.deployments=[{','.join(SET)}]"],
        **{name: [f"+target={name}"] for name in ("edge_int8", "openvino_bf16")}}
COLUMNS = ("data", "seed", "arm", "id", "name", "target", "is_baseline", "on_front", "top1_test_fp32", "top1_test",
           "top1_test_low", "top1_test_high", "latency_ms", "latency_ms_low", "latency_ms_high", "latency_ms_predicted",
           "params", "macs", "host")


def start_arm(arm: str, core: int, out: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """The search of one arm, on one core; its output goes to a file beside its run."""
    out.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "HWNAS_HOME": f"{out}-home", "OMP_NUM_THREADS": "1"}
    command = ["taskset", "-c", str(core), sys.executable, "-m", "hwnas.search", *ARMS[arm], f"out={out}", *options]
    with open(f"{out}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def run_queue(jobs: list[tuple[str, Path, list[str]]]) -> None:
    """All searches, each core taking the next; one that is there already is not run again."""
    waiting = [job for job in jobs if not (job[1] / "report.html").exists()]
    running: dict[int, subprocess.Popen[bytes]] = {}
    while waiting or running:
        for core in range(CORES):
            if core in running:
                if (code := running[core].poll()) is None:
                    continue
                if code not in (0, 3):
                    raise SystemExit(f"{running[core].args!r} ended with {code}")
                del running[core]
            if waiting:
                arm, out, options = waiting.pop(0)
                running[core] = start_arm(arm, core, out, options)
        time.sleep(1)


def read_rows(out: Path, data: str, seed: int) -> pd.DataFrame:
    """The verified finalists and baselines of all arms."""
    parts = []
    for arm in ARMS:
        rows = pd.read_csv(out / arm / "front.csv")
        parts.append(rows[rows.verified & ~rows.is_control].assign(data=data, seed=seed, arm=arm))
    return pd.concat(parts, ignore_index=True)[list(COLUMNS)]


def calibration_s(log: Path) -> int:
    """Seconds that the calibrations of a search took, by what it printed."""
    return sum(map(int, re.findall(r"^calibrate: done in (\d+) s", log.read_text(), flags=re.MULTILINE)))


def compare_arms(rows: pd.DataFrame) -> dict[str, object]:
    """The hypervolumes of one data set and seed, and the deployments on the front of the set."""
    log_ms = np.log(rows.latency_ms)
    corner = float(rows.top1_test.min()), float(log_ms.max())
    parts = {**{arm: rows.arm == arm for arm in ARMS}, "together": rows.arm != "set"}
    volumes = {arm: hypervolume_2d(rows.top1_test[part], log_ms[part], corner) for arm, part in parts.items()}
    front = rows[(rows.arm == "set") & rows.on_front]
    return {"hypervolume": {arm: round(value, 5) for arm, value in volumes.items()},
            "front_of_the_set": {name: int(count) for name, count in front.target.value_counts().items()},
            "networks": {arm: int((rows.arm == arm).sum()) for arm in ARMS}}


def judge(compared: list[Mapping[str, Any]]) -> dict[str, object]:
    """By the rule, of one data set: its best single target, and the set's hypervolume over that one's for each seed."""
    volumes = pd.DataFrame([of["hypervolume"] for of in compared])
    best = str(volumes[[arm for arm in ARMS if arm != "set"]].mean().idxmax())
    ratios = volumes["set"] / volumes[best]
    return {"best_single": best, "set_over_best": ratios.round(4).tolist(), "better": bool((ratios > BETTER).all())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=FOLDER:PX")
    parser.add_argument("--around", default="mobilenetv2_100")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results/deployments")
    given = parser.parse_args()
    jobs = []
    for text in given.data:
        data, _, place = text.partition("=")
        root, _, px = place.rpartition(":")
        for seed in range(given.seeds):
            options = ["dataset=imagefolder", f"dataset.root={root}", f"dataset.image_size={px}", f"seed={seed}",
                       f"around={given.around}", f"pretrained.file={given.weights}", "workers=1", "threads=1",
                       "controls=0", f"budget.minutes={given.minutes:g}"]
            arms = list(ARMS)[seed % len(ARMS):] + list(ARMS)[:seed % len(ARMS)]
            jobs += [(arm, given.out / f"{data}-{seed}" / arm, options) for arm in arms]
    run_queue(jobs)
    rows, compared = [], {}
    for out in dict.fromkeys(out.parent for _, out, _ in jobs):
        data, _, seed = out.name.rpartition("-")
        rows.append(read_rows(out, data, int(seed)))
        compared[out.name] = {**compare_arms(rows[-1]), "calibration_s": {
            arm: calibration_s(out / f"{arm}.log") for arm in ARMS}, "race_s": {
            arm: round(json.loads((out / arm / "environment.json").read_text())["spent_s"]["race"]) for arm in ARMS}}
    pd.concat(rows).to_csv(given.results / "networks.csv", index=False)
    facts = {"around": given.around, "minutes": given.minutes, "host": str(rows[0].host.iloc[0]), "set": SET,
             "compared": compared, "judged": {data: judge([of for name, of in compared.items()
                                                           if name.rpartition("-")[0] == data])
                                              for data in dict.fromkeys(name.rpartition("-")[0] for name in compared)}}
    (given.results / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
