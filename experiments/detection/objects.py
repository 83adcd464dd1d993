"""What boxes inside of the file cost: a detector's calls with and without them, in turns, on one core.

    taskset -c 0 python -m experiments.detection.objects --out experiments/detection/results/objects.csv

MobileNetV2 with our head at 256 px, random weights, fp32, three classes; the confidence that is asked for is such that
CELLS cells pass it. The median of CALLS calls, ROUNDS times.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pandas as pd

from hwnas.latency.timing import prepare_untrained
from hwnas.networks.baselines import Baseline
from hwnas.networks.weights import import_timm
from hwnas.runtimes.runtime import FP32
from hwnas.target import Host
from hwnas.tasks.detection.boxes import N_SIDES
from hwnas.tasks.detection.graph import add_objects

PX, CLASSES, CELLS, CALLS, ROUNDS = 256, 3, 40, 100, 3


def main() -> None:
    """Time both files in both runtimes."""
    import onnxruntime
    import openvino

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    import_timm()
    images = np.random.default_rng(0).normal(size=(1, 3, PX, PX)).astype(np.float32)
    options, rows = onnxruntime.SessionOptions(), []
    options.intra_op_num_threads = 1
    with TemporaryDirectory() as folder:
        raw = prepare_untrained(Baseline("detection_on_mobilenetv2_100").build(3, CLASSES, PX), "00000001",
                                (3, PX, PX), FP32, Path(folder))
        session = onnxruntime.InferenceSession(str(raw), options)
        logits = session.run(None, {"images": images})[0][:, N_SIDES:]
        confidence = 1 / (1 + np.exp(-np.sort(logits.ravel())[-CELLS]))
        proto, whole = onnx.load(str(raw)), Path(folder, "objects.onnx")
        add_objects(proto, PX, float(confidence))
        onnx.save(proto, str(whole))
        core, calls = openvino.Core(), {}
        for name, path in (("outputs", raw), ("objects", whole)):
            session = onnxruntime.InferenceSession(str(path), options)
            calls["onnxruntime", name] = session.run, (None, {"images": images})
            compiled = core.compile_model(str(path), "CPU", {"INFERENCE_NUM_THREADS": 1,
                                                             "INFERENCE_PRECISION_HINT": "f32"})
            calls["openvino", name] = compiled.create_infer_request().infer, ({"images": images},)
        for number in range(ROUNDS):
            for (runtime, name), (call, arguments) in calls.items():
                took_ms = []
                for _ in range(CALLS):
                    began = time.perf_counter()
                    call(*arguments)
                    took_ms.append(1e3 * (time.perf_counter() - began))
                rows.append({"host": Host.detect().name, "runtime": runtime, "gives": name, "round": number,
                             "ms": round(float(np.median(took_ms)), 4)})
    table = pd.DataFrame(rows)
    table.to_csv(given.out, index=False)
    print(table.pivot_table(index="runtime", columns="gives", values="ms"), table.to_string())


if __name__ == "__main__":
    main()
