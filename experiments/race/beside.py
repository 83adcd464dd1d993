"""Two races of the same minutes, network, data and seed held against each other, as int8 files on the test images.

    python -m experiments.race.beside --race RUN --rival RUN --out FOLDER

Thirds are those of the rival's latencies (`arms.py`). Rule, written before the runs and committed after them: the race
that judges networks untrained takes the place of the one that trains all of them for a moment, if in thirty minutes it
is in no third surely behind by more than half a point.

`results/beside`: `sparse` failed the rule. The guess of latencies was mended on its files, and on those of the rival
and of two more states of the race; `guessed` ran then, on the same seed and test images. So it is no fresh test.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.race.arms import RESAMPLES, Arm, ahead_of, interval
from hwnas.system.run_folder import RunFolder


def main() -> None:
    """Compare, and write networks.csv and summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("race", "rival", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    arms, kept, labels = [], [], np.empty(0)
    for arm in ("race", "rival"):
        run = RunFolder(getattr(given, arm))
        rows, answers = pd.read_csv(run.front_csv).query("verified"), run.read_predictions()
        labels = answers.pop("labels")
        arms.append(Arm.of(dict(zip(rows.id, rows.latency_ms, strict=True)),
                           {id: each == labels for id, each in answers.items()}))
        kept.append(rows.assign(arm=arm))
    rng = np.random.default_rng(0)
    images = [np.arange(len(labels)), *(rng.integers(0, len(labels), len(labels)) for _ in range(RESAMPLES))]
    ahead = np.array([ahead_of(*arms, some, 1 / len(np.unique(labels))) for some in images])
    facts: dict[str, Any] = {"images": len(labels), "host": run.read_environment()["host"]["name"],
                             "points_ahead": [interval(ahead[:, third]) for third in range(ahead.shape[1])]}
    given.out.mkdir(parents=True, exist_ok=True)
    columns = ["arm", "id", "name", "steps", "top1_test_fp32", "top1_test", "latency_ms"]
    pd.concat(kept)[columns].to_csv(given.out / "networks.csv", index=False)
    text = json.dumps(facts, indent=1)
    (given.out / "summary.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
