"""LiteRT as a target: its searches' fronts, its answers beside ONNX Runtime's, its latency model on unseen networks.

    python -m hwnas.validate +target=edge_int8 n=100 seed=7 image_size=32 channels=1 classes=10 out=V.json
    python -m hwnas.search +target=edge_int8 dataset=imagefolder dataset.root=EUROSAT dataset.image_size=64 \\
        workers=1 budget.minutes=10 out=RUNS/eurosat
    python -m hwnas.search +target=edge_int8 dataset=fashion_mnist dataset.root=DATA workers=1 budget.minutes=10 \\
        out=RUNS/fashion_mnist
    python experiments/int8/edge.py validation=V.json out=experiments/int8/results/edge
    python experiments/int8/edge.py run=RUNS/eurosat out=experiments/int8/results/edge          # and for the other

`validation` keeps a report without its raw samples, and its picture. `run` keeps the front, what it is compared with
and the machine, and asks the two runtimes about every test image: parity.csv has, for each network and precision, the
share of images to which both give the same class, each one's top-1, and how far the answers are apart at most, in
levels of the int8 answer (fp32: relative to the largest answer).
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from experiments.common import arguments_of, command, load_validation, save_csv, text_table
from hwnas.errors import ConfigError
from hwnas.runtimes.runtime import deployed_of, load_runtime
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.target import Host, Target

KNOWN = ("run", "validation", "out")
KEPT = ("id", "group", "architecture", "predicted_ms", "low_ms", "high_ms", "latency_ms", "half_width", "valid",
        "reason")


def main(arguments: Sequence[str] | None = None) -> None:
    """Keep what is named."""
    given = arguments_of(arguments, KNOWN, __doc__)
    if not given.get("out") or not (given.get("run") or given.get("validation")):
        raise ConfigError("out=DIR and run=FOLDER or validation=FILE.json must be given.")
    out = Path(given["out"])
    out.mkdir(parents=True, exist_ok=True)
    if path := given.get("validation"):
        keep_validation(Path(path), out)
    if path := given.get("run"):
        keep_run(RunFolder.open(path, write=False), out / Path(path).name)


def keep_validation(path: Path, out: Path) -> None:
    """The report without raw samples, and its picture."""
    load_validation(path)  # it is one
    report = json.loads(path.read_text(encoding="utf-8"))
    report["networks"] = [{key: entry[key] for key in KEPT} for entry in report["networks"]]
    report.pop("anchor_networks", None)
    write_atomic(out / f"{path.stem}.summary.json", json.dumps(report, separators=(",", ":")) + "\n")
    shutil.copyfile(path.with_suffix(".png"), out / f"{path.stem}.png")


def keep_run(run: RunFolder, out: Path) -> None:
    """The run's front, and its networks' answers in both runtimes."""
    rows = parity(run)
    out.mkdir(parents=True, exist_ok=True)
    for path in (run.front_csv, run.front_png, run.comparisons, run.environment):
        shutil.copyfile(path, out / path.name)
    save_csv(out / "parity.csv", rows)
    head = ["network", "precision", "images", "same class", "top-1 ONNX Runtime", "top-1 LiteRT", "apart"]
    print(text_table([head, *([row["id"], row["precision"], str(row["images"]), f"{row['same']:.2%}",
                               f"{row['top1_onnxruntime']:.2%}", f"{row['top1_litert']:.2%}", f"{row['apart']:.2g}"]
                              for row in rows)]))


def parity(run: RunFolder) -> list[dict[str, Any]]:
    """A row for each network of the front and precision; see the module."""
    from hwnas.front.rows import load_front, with_networks
    from hwnas.networks.network import Shape
    from hwnas.verify import making_of

    environment = run.read_environment()
    data = making_of(run, run.read_config(), environment, {}).dataset
    images = Shape(data.channels, data.image_size, len(data.class_names))
    rows = []
    for row in with_networks([row for row in load_front(run) if row.verified], run, images):
        assert row.network is not None
        fed = row.network.fed(data)
        test = fed.normalise(np.asarray(fed.test.images))
        for precision in ("int8", "fp32"):
            rows.append({"id": row.id, "name": row.name, "host": Host.detect().name, "precision": precision,
                         **_beside(run.model(row.id), precision, test, fed.test.labels)})
    return rows


def _beside(folder: ModelFolder, precision: str, images: NDArray[np.float32], labels: NDArray[Any]) -> dict[str, Any]:
    """One network's answers in ONNX Runtime and, from its deployed file, in LiteRT."""
    onnx = folder.deployed(precision)
    own = deployed_of(onnx, "litert")
    answers = [load_runtime(runtime).compile(path, Target("parity", runtime, precision)).logits(images)
               for runtime, path in (("onnxruntime", onnx), ("litert", own if own.is_file() else onnx))]
    first, second = (logits.argmax(1) for logits in answers)
    values = np.unique(answers[0])
    step = float(np.diff(values).min()) if precision == "int8" else float(np.abs(values).max())
    return {"images": len(images), "same": float((first == second).mean()),
            "top1_onnxruntime": float((first == labels).mean()), "top1_litert": float((second == labels).mean()),
            "apart": float(np.abs(answers[0] - answers[1]).max() / step),
            "apart_mean": float(np.abs(answers[0] - answers[1]).mean() / step)}


if __name__ == "__main__":
    command(main)
