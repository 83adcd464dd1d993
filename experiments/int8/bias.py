"""What corrected biases give back: int8 files of a race's networks, made with and without them.

    python -m experiments.int8.bias RUN … --out experiments/int8/results/bias.csv

RUN is a folder that `experiments.race.minutes search` made. Each of its networks is quantised from its fp32 file as a
search does, and once more with ranges by the same method and biases as they are. Both are scored on all test images in
ONNX Runtime.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pandas as pd

from experiments.race.minutes import read_run
from hwnas.networks.quantize import calibration_images, quantize_static
from hwnas.networks.running import logits_of
from hwnas.system.run_folder import RunFolder

CALIBRATION, AT_ONCE = 768, 256


def files_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each network of a run: its accuracy in fp32 and of both int8 files, and their agreement."""
    asked, _, data = read_run(folder)
    run = RunFolder(folder / "race")
    for row in pd.read_csv(run.front_csv).query("verified").itertuples():
        path = run.model(row.id).onnx
        told = {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props
                if entry.key in ("mean", "std")}
        px = onnx.load(path).graph.input[0].type.tensor_type.shape.dim[2].dim_value
        fed = replace(data.at_size(px), mean=tuple(told["mean"]), std=tuple(told["std"]))
        answers = {"fp32": answers_of(path, fed)}
        with TemporaryDirectory() as temporary:
            images, method = calibration_images(fed, CALIBRATION, asked.seed), None
            for name in ("corrected", "as_they_are"):
                file = Path(temporary, f"{name}.onnx")
                method = quantize_static(path, file, images, method=method).method
                answers[name] = answers_of(file, fed)
        yield {"data": asked.data, "around": asked.around, "minutes": asked.minutes, "name": row.name, "px": px,
               **{f"top1_{name}": float((each == fed.test.labels).mean()) for name, each in answers.items()},
               **{f"agreement_{name}": float((answers[name] == answers["fp32"]).mean())
                  for name in ("as_they_are", "corrected")}}


def answers_of(path: Path, data: Any) -> np.ndarray:
    """Return the answers of a file to the test images."""
    proto, images = onnx.load(path), data.test.images
    return np.concatenate([logits_of(proto, data.normalise(np.asarray(images[start:start + AT_ONCE])), 1).argmax(1)
                           for start in range(0, len(images), AT_ONCE)])


def main() -> None:
    """Write a row for each network of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = pd.DataFrame([row for folder in given.runs for row in files_of(folder)])
    rows.to_csv(given.out, index=False)
    lost = rows[["top1_as_they_are", "top1_corrected"]].rsub(rows.top1_fp32, axis=0)
    print(rows.to_string(), (100 * lost).describe().round(2), sep="\n")


if __name__ == "__main__":
    main()
