"""What int8's rounding in the last steps of a race is worth, at equal minutes.

    hwnas search target=epyc_int8 dataset=imagefolder dataset.root=EUROSAT dataset.image_size=64 \\
        around=mobilenetv2_100 pretrained.file=FILE controls=0 baselines=[] budget.minutes=10 seed=S out=RUNS/S/with
    python -m experiments.race.rounding table RUNS/0 RUNS/1 RUNS/2 --out experiments/race/results/rounding

`without` is the same with ROUNDED = 0 in hwnas/search/race.py. Chosen before the runs, committed after them: of
networks that both arms finished, the difference in int8 top-1; and the mean over each third of the range of latency of
the best int8 top-1 at no more latency. trunk.json has what each trained line of the trunk lost, as the studies told.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ARMS = ("with", "without")
COLUMNS = ["seed", "arm", "id", "latency_ms", "top1_test_fp32", "top1_test"]


def summarise(rows: pd.DataFrame) -> dict[str, Any]:
    """Points of top-1, by seed: lost by int8, won on networks of both arms, and won in thirds of the latencies."""
    rows = rows.assign(lost=100 * (rows.top1_test_fp32 - rows.top1_test))
    told: dict[str, Any] = {"lost": {arm: part.groupby("seed").lost.mean().round(2).tolist()
                                     for arm, part in rows.groupby("arm")},
                            "most_lost": rows.groupby("arm").lost.max().round(2).to_dict(), "same": [], "thirds": []}
    for _, seed in rows.groupby("seed"):
        arms = {arm: part.sort_values("latency_ms") for arm, part in seed.groupby("arm")}
        both = arms["with"].merge(arms["without"], on="id")
        told["same"].append(round(100 * float((both.top1_test_x - both.top1_test_y).mean()), 2))
        first = max(part.latency_ms.min() for part in arms.values())
        grid = np.exp(np.linspace(np.log(1.02 * first), np.log(seed.latency_ms.max()), 60))
        best = {arm: np.array([part.top1_test[part.latency_ms <= 1.02 * ms].max() for ms in grid])
                for arm, part in arms.items()}
        told["thirds"].append([round(100 * float(part.mean()), 2)
                               for part in np.split(best["with"] - best["without"], 3)])
    return told


def main() -> None:
    """Read the runs, keep their networks, and say what the rule asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["table"])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("experiments/race/results/rounding"))
    given = parser.parse_args()
    parts = []
    for folder in given.runs:
        parts += [pd.read_csv(folder / arm / "front.csv").assign(seed=folder.name, arm=arm) for arm in ARMS]
    rows = pd.concat(parts).dropna(subset=["latency_ms", "top1_test"])
    rows[COLUMNS].to_csv(given.out / "networks.csv", index=False)
    told = summarise(rows)
    (given.out / "summary.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
