"""int8 on a CPU without VNNI: what the sums of a runtime's kernels lose, by the width of the weights.

    python -m experiments.int8.saturation RUN [RUN …] --results experiments/int8/results/saturation.csv [--into FOLDER]

RUN is a finished search for an int8 target. The fp32 file of each of its networks is quantised with weights of 8 and of
7 bits, on the same calibration images. Its top-1 on the test images by the target's runtime stands beside that of the
same file computed pair by pair in fp32, which cannot saturate. FOLDER gets a copy of each run's tables in which the
files of 7 bits answer, with latencies as they were measured: both kinds of file run the same kernels.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
from numpy.typing import NDArray

from hwnas.data.loading import load_dataset
from hwnas.front.rows import FrontRow, load_front
from hwnas.networks.network import Shape, read_network
from hwnas.networks.quantize import calibration_images, quantize_static, tuning_of
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target

N_CALIBRATION = 768  # as a search takes


def exact_logits(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the file says, node by node: pairs of quantising and dequantising around sums in fp32."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    return np.concatenate([session.run(None, {"images": images[at:at + 64]})[0] for at in range(0, len(images), 64)])


def main() -> None:
    """Quantise, answer, write a row for each network and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    rows = []
    for folder in given.runs:
        run = RunFolder.open(folder, write=False)
        answers = {row.id: answered(run, row, rows) for row in load_front(run) if row.verified}
        if given.into is not None:
            copy_with(run, answers, given.into / run.path.name)
    pd.DataFrame(rows).round(6).to_csv(given.results, index=False)


def answered(run: RunFolder, row: FrontRow, rows: list[dict[str, Any]]) -> NDArray[np.int64]:
    """The classes that the file of 7 bits gives to the test images; what both widths answer is added to `rows`."""
    facts, config = run.read_environment(), run.read_config()
    target, shape = Target.from_config(facts["target"]), facts["dataset"]
    network = read_network(run.model(row.id), Shape(shape["channels"], shape["image_size"], len(shape["class_names"])))
    assert network is not None, f"{row.id}: no architecture.yaml or baseline.yaml"
    fed = network.fed(load_dataset(config["dataset"], facts["dataset"]["image_size"], config["seed"]))
    images, labels = fed.normalise(fed.test.images), fed.test.labels
    calibration = calibration_images(fed, N_CALIBRATION, config["seed"])
    for bits in (8, 7):
        with temporary_folder() as made:
            path = Path(made) / "int8.onnx"
            quantize_static(run.model(row.id).onnx, path, calibration, tuned_for=tuning_of(target), narrow=bits == 7)
            exact = exact_logits(path, images).argmax(1) == labels
            deployed = load_runtime(target.runtime).compile(path, target).logits(images).argmax(1)
        rows.append({"host": facts["host"]["name"], "runtime": facts["runtime"], "arm": run.path.name, "id": row.id,
                     "px": network.shape.image_size, "weight_bits": bits, "top1_fp32": row.top1_test_fp32,
                     "top1_exact": exact.mean(), "top1_deployed": (deployed == labels).mean()})
        print(rows[-1], flush=True)
    return deployed


def copy_with(run: RunFolder, answers: dict[str, NDArray[np.int64]], folder: Path) -> None:
    """The tables of a run in `folder`, with these answers to the test images."""
    folder.mkdir(parents=True)
    for name in ("environment.json", "trials.csv", "config.yaml"):
        shutil.copy(run.path / name, folder)
    labels, front = run.read_predictions()["labels"], pd.read_csv(run.front_csv)
    front["top1_test"] = [(answers[id] == labels).mean() if id in answers else None for id in front.id]
    fastest = front.sort_values(["latency_ms", "top1_test"], ascending=[True, False]).top1_test
    front["on_front"] = fastest > fastest.cummax().shift(fill_value=0)
    front.to_csv(folder / "front.csv", index=False)
    run = RunFolder(folder)
    run.write_arrays(run.predictions, {**answers, "labels": labels})


if __name__ == "__main__":
    main()
