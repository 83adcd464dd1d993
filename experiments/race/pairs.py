"""Pairs of a race's front, and pairs of the obvious cuts' own front, from runs of `minutes.py`; and pairs of the front
of a search from scratch, from runs of `sampler/from_scratch.py`.

    python -m experiments.race.pairs RUN … --out experiments/race/results/pairs.csv

Rule, written before the runs. Of each arm count the networks of the upper half of its front by test top-1, each with
the pair whose mean latency is lowest on validation images; one without a pair counts as 1. Pairs pay if they are 1.3
times as fast at the median. `single_top1` is what the arm's best single network has at no more than the pair's mean
latency. Answers are those of int8 files, but for runs whose cuts answered in fp32 alone.
The rule by which a run chooses thresholds was chosen on races before these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.common import save_csv
from experiments.race.arms import Arm
from hwnas.front.pairs import Scored, choose_threshold, goes_on
from hwnas.stats import paired_difference
from hwnas.system.run_folder import RunFolder

Answers = Mapping[str, tuple[Scored, Scored]]  # to test and validation images, by id


def read_front(folder: Path) -> tuple[dict[str, float], Answers]:
    """Latencies and answers of a search's verified networks."""
    run = RunFolder(folder)
    rows, test = pd.read_csv(run.front_csv).query("verified"), run.read_predictions()
    held = dict(np.load(run.confidences))
    return dict(zip(rows.id, rows.latency_ms, strict=True)), {id: (
        Scored(test[id] == test["labels"], held[f"{id}.test_confidence"]),
        Scored(held[id] == held["labels"], held[f"{id}.confidence"])) for id in rows.id}


def read_cuts(folder: Path) -> tuple[dict[str, float], Answers]:
    """Latencies and answers of the obvious cuts at three image sizes."""
    rows, held = pd.read_csv(folder / "sizes.csv"), dict(np.load(folder / "sizes.npz"))
    return dict(zip(rows.id, rows.latency_ms, strict=True)), {id: (
        Scored(held[f"{id}.right"], held[f"{id}.confidence"]),
        Scored(held[f"{id}.validation_right"], held[f"{id}.validation_confidence"])) for id in rows.id}


def pairs_of(latency_ms: Mapping[str, float], answers: Answers) -> Iterator[dict[str, Any]]:
    """The upper half of a front, each network with its pair."""
    ids = [*latency_ms]
    arm = Arm.of(latency_ms, {id: test.right for id, (test, _) in answers.items()})
    front = [ids[at] for at in arm.front]
    for at, id in list(enumerate(front))[len(front) // 2:]:
        (test, validation), ms = answers[id], latency_ms[id]
        best: dict[str, Any] = {"fast": "", "share": 1.0, "mean_ms": ms}
        for fast in front[:at]:
            if not (threshold := choose_threshold(answers[fast][1], validation)):
                continue  # the fast one alone is as good
            mean_ms = latency_ms[fast] + ms * goes_on(answers[fast][1], threshold).mean()
            if mean_ms < best["mean_ms"]:
                unsure = goes_on(answers[fast][0], threshold)
                right = np.where(unsure, test.right, answers[fast][0].right)
                apart = [round(each, 5) for each in paired_difference(right, test.right)]
                best = {"fast": fast, "share": unsure.mean(), "mean_ms": mean_ms, **dict(zip(
                    ("difference", "low", "high"), apart, strict=True))}
        mean_ms = latency_ms[best["fast"]] + ms * best["share"] if best["fast"] else ms
        singles = [answers[each][0].right.mean() for each in front if latency_ms[each] <= mean_ms]
        yield {"id": id, "top1": round(test.right.mean(), 5), "latency_ms": ms, **dict.fromkeys(
            ("difference", "low", "high"), 0.0), **best, "mean_ms": mean_ms, "times_as_fast": ms / mean_ms,
            "single_top1": round(max(singles), 5)}


def main() -> None:
    """Read the runs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for folder in given.runs:
        asked = json.loads((folder / "given.json").read_text())
        named = {key: asked.get(key, "") for key in ("data", "px", "minutes", "around", "seed")}
        arms = {"race": folder / "race", "scratch": folder / "run", "cuts": folder / "sizes.csv"}
        for arm, path in ((arm, path) for arm, path in arms.items() if path.exists()):
            found = read_cuts(folder) if arm == "cuts" else read_front(path)
            rows += [{**named, "arm": arm, **row} for row in pairs_of(*found)]
    save_csv(given.out, rows)


if __name__ == "__main__":
    main()
