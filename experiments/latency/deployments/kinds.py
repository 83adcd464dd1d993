"""Do int8 files of one network answer alike in all runtimes? The networks of a run, deployed in each and scored.

    python -m experiments.latency.deployments.kinds --run DIR --out experiments/latency/results/deployments/kinds.csv

The search verifies one deployment of a kind (int8 or floating point) only, since it takes their top-1 to be the same.
kinds.csv has the top-1 of each network in fp32 and in int8 by runtime, on the test images of the run.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd

from hwnas.front.make import TrainedWeights, file_of, make
from hwnas.front.rows import load_front, with_networks
from hwnas.networks.export import stored_fingerprint
from hwnas.networks.network import Shape
from hwnas.runtimes.runtime import load_runtime, predict
from hwnas.system.paths import temporary_folder
from hwnas.system.run_folder import ModelFolder, RunFolder
from hwnas.target import Target
from hwnas.verify import making_of

TARGETS = (Target("openvino_int8", "openvino", "int8"), Target("ort_int8", "onnxruntime", "int8"),
           Target("edge_int8", "litert", "int8"), Target("openvino_bf16", "openvino", "bf16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    run = RunFolder.open(given.run, write=False)
    environment = run.read_environment()
    making = replace(making_of(run, run.read_config(), environment, {}), targets=TARGETS, threads=1)
    data = making.dataset
    rows = with_networks(load_front(run), run, Shape(data.channels, data.image_size, len(data.class_names)))
    first = {row.trained_id: row for row in reversed(rows) if row.network is not None and not row.is_baseline}
    scored = []
    for name, row in first.items():
        assert row.network is not None
        facts = {"id": name, "macs": row.macs, "image_size": row.network.shape.image_size, "n_test": len(data.test),
                 "fp32": row.top1_test_fp32}
        with temporary_folder() as folder:
            copied = Path(folder, row.network.deployed_as(TARGETS[0].name).id)
            shutil.copytree(run.model(row.id).path, copied)  # whose weights are taken, as they are
            raced = TrainedWeights(stored_fingerprint(ModelFolder(copied).weights) or "", copied)
            making = replace(making, raced={name: raced})
            for target in TARGETS:
                network = row.network.deployed_as(target.name)
                place = ModelFolder(Path(folder, network.id))
                make(network, place, making)
                compiled = load_runtime(target.runtime).compile(file_of(target, place), target)
                fed = network.fed(data)
                facts[target.name] = round(float((predict(compiled, fed) == fed.test.labels).mean()), 6)
        scored.append(facts)
        pd.DataFrame(scored).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
