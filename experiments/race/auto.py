"""What around=auto chose, beside a race around each single network, in the same minutes of one core.

    hwnas search target=xeon_int8 dataset=imagefolder dataset.root=DIR dataset.image_size=64 around=auto seed=0 \\
        budget.minutes=10 baselines=[] controls=0 threads=1 pretrained.folder=WEIGHTS out=RUNS/auto   # and around=NAME
    python -m experiments.race.auto RUNS --results experiments/race/results/auto

The same command holds any run folder against the others: `--arm now` (results/promise) and `--arm with` (legs/control).

Rule, written before the runs: auto is in no third of the latencies behind the best single network by
more than .3 points. The value of a third is the mean of the best top-1 at no more latency, with a 95 % interval over
the test images. The thirds begin where both have a network (written behind the runs: the same fastest network took .042
and .044 ms in two of them), and end at the slower of both slowest ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.race.arms import RESAMPLES, THIRDS, Arm, interval, levels
from hwnas.system.run_folder import RunFolder


def main() -> None:
    """Compare the runs in a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--arm", default="auto", help="the folder that is held against the others")
    given = parser.parse_args()
    arms, kept = dict[str, Arm](), []
    for folder in sorted(path for path in given.runs.iterdir() if (path / "front.csv").is_file()):
        rows, answers = pd.read_csv(folder / "front.csv").query("verified"), RunFolder(folder).read_predictions()
        labels = answers.pop("labels")
        arms[folder.name] = Arm.of(dict(zip(rows.id, rows.latency_ms, strict=True)),
                                   {id: answers[id] == labels for id in rows.id})
        kept.append(rows[["id", "name", "steps", "top1_test", "latency_ms"]].assign(around=folder.name))
    rng, own = np.random.default_rng(0), arms.pop(given.arm)
    images = [np.arange(len(labels)), *(rng.integers(0, len(labels), len(labels)) for _ in range(RESAMPLES))]
    summary = {}
    for name, arm in arms.items():
        both_ms = [own.latency_ms, arm.latency_ms]
        edges = np.linspace(np.log(max(each.min() for each in both_ms)), np.log(max(each.max() for each in both_ms)),
                            THIRDS + 1)
        values = np.array([100 * np.subtract(*(levels(each.latency_ms, each.right[:, some].mean(axis=1), edges, 0.0)
                                               for each in (own, arm))) for some in images])
        summary[name] = {"points_ahead": [interval(third) for third in values.T],
                         "best": float(arm.right.mean(axis=1).max()), "best_of_arm": float(
                             own.right.mean(axis=1).max())}
    given.results.mkdir(parents=True, exist_ok=True)
    pd.concat(kept).to_csv(given.results / "networks.csv", index=False)
    (given.results / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
