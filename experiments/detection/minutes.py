"""What the same minutes of one core give on pictures with boxes: a race of detectors, or the whole network alone.

    python -m experiments.race.minutes search --data bccd --dataset coco --root DIR --weights FILE --px 256 \
        --minutes 30 --out RUN
    python -m experiments.detection.minutes alone RUN
    python -m experiments.detection.minutes table RUN … --results experiments/detection/results
    python -m experiments.detection.minutes compare RESULTS RESULTS

`alone` is the whole network with our head, trained for the minutes less OVERHEAD_S by one cosine, fp32. Rule, written
before the runs:

(1) The most accurate network of the front, as an int8 file, is not worse than the network alone by more than a point of
    AP50.
(2) A network of the front within two points of AP50 of the network alone is at least twice as fast as it in int8.
(3) The 95 % interval of what int8 takes from AP50 reaches -1 point or better, on every network of the front.

Scores are pycocotools'; intervals are of paired draws of the test images. `compare` tells the mean of the best AP50 at
no more latency, over the logarithm of the latencies that both fronts have, and over its slow half.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from experiments.race.minutes import OVERHEAD_S, WARMUP, read_run
from hwnas.cli.progress import Console
from hwnas.latency.measured import MeasuredLatency, answered
from hwnas.runtimes.runtime import FP32, load_runtime, predict
from hwnas.search.plan import line_recipe
from hwnas.space.cuts import WHOLE
from hwnas.system.run_folder import RunFolder
from hwnas.tasks.detection.score import BoxGrades
from hwnas.training.line import Keeping, Leg, Stretch, train_leg
from hwnas.training.loop import grade

PROBED = 8  # steps that are timed


def alone(given: argparse.Namespace) -> None:
    """Train the whole network on one core; alone.json."""
    os.sched_setaffinity(0, {given.core})
    asked, plan, data = read_run(given.run)
    network = plan.network(replace(plan.space.known[WHOLE], image_size=asked.px))
    fed, recipe, ends = network.fed(data), line_recipe(plan, data), list[float]()

    def train(steps: int, folder: Path) -> Any:
        stretch = Stretch(Leg(steps, 1.0, 0.0, min(WARMUP, steps // 3)), 0, "", f"tuned {steps}",
                          lambda: network.start().train())
        return train_leg(stretch, folder / "none", folder / f"{steps}", data=fed, recipe=recipe, seed=asked.seed,
                         keep=Keeping(print), progress=lambda step, of: ends.append(time.monotonic()))[0]

    with TemporaryDirectory() as folder:
        train(PROBED, Path(folder))
        steps = round((60 * asked.minutes - OVERHEAD_S) / float(np.median(np.diff(ends))))
        grades = grade(train(steps, Path(folder)), fed.test, fed)
    assert isinstance(grades, BoxGrades)
    run = RunFolder(given.run / "race")
    latency = MeasuredLatency(plan.deployments[0], plan.space, run.latencies, lambda: run.hold("latencies"))
    timed = answered(lambda: latency.predict_architectures([network.architecture]), Console(quiet=True))
    (given.run / "alone.json").write_text(json.dumps({
        "steps": steps, "mAP": grades.score, "AP50": grades.score_50, "latency_ms": float(timed.mean[0])}))


def judge(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return what the rule asks of a run, and its networks."""
    asked, _, data = read_run(folder)
    run = RunFolder(folder / "race")
    told, ssdlite = (json.loads(path.read_text()) if path.exists() else None
                     for path in (folder / "alone.json", folder / "ssdlite.json"))
    answers, kept = run.read_predictions(), []
    for row in pd.read_csv(run.front_csv).query("verified").itertuples():
        mean, std = (json.loads(entry) for entry in _normalisation(run.model(row.id).onnx))
        fed = replace(data.at_size(_size(run.model(row.id).onnx)), mean=tuple(mean), std=tuple(std))
        fp32 = predict(load_runtime(FP32.runtime).compile(run.model(row.id).onnx, FP32), fed)
        own, other = (BoxGrades(each, data.test.targets, overlap=0.5) for each in (answers[row.id], fp32))
        lost, low, high = own.minus(other)
        kept.append({"data": Path(asked.root).name, "id": row.id, "name": row.name, "px": fed.image_size,
                     "on_front": row.on_front, "latency_ms": row.latency_ms, "mAP": row.mAP_test, "AP50": own.score,
                     "AP50_fp32": other.score, "int8": lost, "int8_low": low, "int8_high": high})
    networks = pd.DataFrame(kept)
    front = networks[networks.on_front]
    beside = {"AP50": front.AP50.max(), "latency_ms": front.latency_ms.max()} if told is None else told
    near = front[beside["AP50"] - 0.02 <= front.AP50]
    return {"data": Path(asked.root).name, "px": asked.px, "minutes": asked.minutes, "seed": asked.seed,
            "around": asked.around, "host": run.read_environment()["host"]["name"], "images": len(data.test),
            "alone": told, "ssdlite": ssdlite, "best_AP50": float(front.AP50.max()), "best_mAP": float(front.mAP.max()),
            "times_as_fast_within_2_points": float(beside["latency_ms"] / near.latency_ms.min()) if len(near) else None,
            "int8_reaches": float(front.int8_high.min())}, networks


def compare_fronts(folders: Sequence[Path]) -> pd.DataFrame:
    """Return the mean of the best AP50 at no more latency, per cent, of each set of results for each data set."""
    fronts = [pd.read_csv(folder / "networks.csv") for folder in folders]
    rows = []
    for data in [each for each in dict.fromkeys(fronts[0].data) if all(each in {*front.data} for front in fronts)]:
        own = [front[front.data == data].sort_values("latency_ms") for front in fronts]
        low, high = (np.log(pick(of(front.latency_ms) for front in own)) for pick, of in ((max, np.min), (max, np.max)))
        at = np.linspace(low, high, 400)
        for folder, front in zip(folders, own, strict=True):
            best = np.maximum.accumulate(front.AP50.to_numpy())[
                np.searchsorted(np.log(front.latency_ms), at + 1e-9, "right") - 1]
            rows.append({"data": data, "results": folder.name, "all": 100 * best.mean(),
                         "slow_half": 100 * best[len(at) // 2:].mean()})
    return pd.DataFrame(rows).round(1)


def _normalisation(path: Path) -> tuple[str, str]:
    import onnx

    told = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    return told["mean"], told["std"]


def _size(path: Path) -> int:
    import onnx

    shape = onnx.load(path, load_external_data=False).graph.input[0].type.tensor_type.shape
    return int(shape.dim[3].dim_value)


def main() -> None:
    """Train the network alone, or judge runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    own, table, compare = (parts.add_parser(part) for part in ("alone", "table", "compare"))
    own.add_argument("run", type=Path)
    own.add_argument("--core", type=int, default=0)
    table.add_argument("runs", type=Path, nargs="+")
    table.add_argument("--results", type=Path, required=True)
    compare.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args()
    if given.part == "alone":
        alone(given)
    elif given.part == "compare":
        print(compare_fronts(given.results).to_string(index=False))
    else:
        judged = [judge(folder) for folder in given.runs]
        given.results.mkdir(parents=True, exist_ok=True)
        pd.concat([networks for _, networks in judged]).to_csv(given.results / "networks.csv", index=False)
        text = json.dumps([facts for facts, _ in judged], indent=1)
        (given.results / "summary.json").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
