"""int8 on a CPU without VNNI: what the sums of a runtime's kernels lose, by the width of the weights.

    python -m experiments.saturation.run RUN --results experiments/saturation/results.csv

RUN is a finished search for an int8 target. Each finalist's fp32 file is quantised with weights of 8 and of 7 bits, on
the same calibration images. Its top-1 on the test images by the target's runtime stands beside that of the same file
computed pair by pair in fp32, which cannot saturate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
from numpy.typing import NDArray

from hwnas.data.loading import load_dataset
from hwnas.front.rows import load_front
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
    parser.add_argument("run", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    run = RunFolder.open(given.run, write=False)
    facts, config = run.read_environment(), run.read_config()
    target = Target.from_config(facts["target"])
    data = load_dataset(config["dataset"], facts["dataset"]["image_size"], config["seed"])
    rows = []
    for row in (row for row in load_front(run) if row.is_finalist):
        fed = row.network.fed(data)
        images, labels = fed.normalise(fed.test.images), fed.test.labels
        calibration = calibration_images(fed, N_CALIBRATION, config["seed"])
        for bits in (8, 7):
            with temporary_folder() as folder:
                path = Path(folder) / "int8.onnx"
                quantize_static(run.model(row.id).onnx, path, calibration, tuned_for=tuning_of(target),
                                narrow=bits == 7)
                exact = exact_logits(path, images).argmax(1) == labels
                deployed = load_runtime(target.runtime).compile(path, target).logits(images).argmax(1) == labels
            rows.append({"host": facts["host"]["name"], "runtime": facts["runtime"], "id": row.id,
                         "px": row.network.shape.image_size, "weight_bits": bits, "top1_fp32": row.top1_test_fp32,
                         "top1_exact": exact.mean(), "top1_deployed": deployed.mean()})
            print(rows[-1], flush=True)
    pd.DataFrame(rows).round(6).to_csv(given.results, index=False)


if __name__ == "__main__":
    main()
