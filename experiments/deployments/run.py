"""What choosing the deployment together with the network is worth: the same minutes with one target and with a set.

    python -m experiments.deployments.run --out DIR --data eurosat=FOLDER:64 --weights FILE

For each data set and seed two races around one pretrained network, side by side, each on a core of its own and with a
home of its own, so that each pays for its calibrations: `single` for openvino_int8, `set` for four deployments. Rule,
written before the runs: what counts is the hypervolume of the verified networks above the worst top-1 and below the
longest latency of both, in top-1 and log latency; more than 5 % is called better where all seeds agree. networks.csv
has every verified network, summary.json the hypervolumes and which deployments lie on the front of the set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from hwnas.stats import hypervolume_2d

SET = ("openvino_int8", "openvino_bf16", "ort_int8", "edge_int8")
ARMS = {"single": ["+target=openvino_int8"], "set": ["+target=cpu", f"target.deployments=[{','.join(SET)}]"]}
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


def run_pair(out: Path, options: list[str]) -> None:
    """Both arms side by side; one that is there already is not run again."""
    started = [start_arm(arm, core, out / arm, options) for core, arm in enumerate(ARMS)
               if not (out / arm / "report.html").exists()]
    for process in started:
        if process.wait() not in (0, 3):
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")


def read_rows(out: Path, data: str, seed: int) -> pd.DataFrame:
    """The verified finalists and baselines of both arms."""
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
    volumes = {arm: hypervolume_2d(rows.top1_test[rows.arm == arm], log_ms[rows.arm == arm], corner) for arm in ARMS}
    front = rows[(rows.arm == "set") & rows.on_front]
    return {"hypervolume": {arm: round(value, 5) for arm, value in volumes.items()},
            "set_over_single": round(volumes["set"] / volumes["single"], 4),
            "front_of_the_set": {name: int(count) for name, count in front.target.value_counts().items()},
            "networks": {arm: int((rows.arm == arm).sum()) for arm in ARMS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", action="append", required=True, metavar="NAME=FOLDER:PX")
    parser.add_argument("--around", default="mobilenetv2_100")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    rows, compared = [], {}
    for text in given.data:
        data, _, place = text.partition("=")
        root, _, px = place.rpartition(":")
        for seed in range(given.seeds):
            out = given.out / f"{data}-{seed}"
            run_pair(out, ["dataset=imagefolder", f"dataset.root={root}", f"dataset.image_size={px}", f"seed={seed}",
                           f"around={given.around}", f"pretrained.file={given.weights}", "workers=1", "threads=1",
                           "controls=0", f"budget.minutes={given.minutes:g}"])
            rows.append(read_rows(out, data, seed))
            compared[f"{data}-{seed}"] = {**compare_arms(rows[-1]), "calibration_s": {
                arm: calibration_s(out / f"{arm}.log") for arm in ARMS}}
            pd.concat(rows).to_csv(given.results / "networks.csv", index=False)
            facts = {"around": given.around, "minutes": given.minutes, "host": str(rows[0].host.iloc[0]), "set": SET,
                     "compared": compared}
            (given.results / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
