"""What int8 loses with the last weights of a short training, and with their moving average.

    python -m experiments.full_training.int8 --data DATA --out experiments/full_training/results/int8.csv

Trains networks of `int8_ranges` for 400 steps on EuroSAT at 32 px, with a moving average and without, quantises each by
our default for OpenVINO, and scores both files on all test images. A row is added after each network; what is there is
not made again. DATA holds eurosat/.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.common import command, save_csv
from experiments.full_training.run import SETS
from experiments.int8_ranges.networks import FAMILIES
from experiments.int8_ranges.run import STEPS
from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.networks.baselines import Baseline
from hwnas.networks.export import export_onnx
from hwnas.networks.quantize import calibration_images, quantize_static, tuning_of
from hwnas.runtimes.runtime import load_runtime, predict
from hwnas.target import Host, Target
from hwnas.training.recipe import FULL_TRAINING

DECAY = {"average": 0.99, "last": 0.0}
BATCH, CALIBRATION = 50, 768


def of_network(name: str, kind: str, data: Dataset, folder: Path) -> dict[str, Any]:
    """Test top-1 of the fp32 and the int8 file, and how its ranges were chosen."""
    from hwnas.training.loop import seeded, train

    recipe = replace(FULL_TRAINING, epochs=1, min_steps=STEPS, max_steps=STEPS, threads=1, ema_decay=DECAY[kind])
    image, target = (data.channels, data.image_size, data.image_size), Target("openvino_int8", "openvino", "int8")
    fp32, int8 = folder / "fp32.onnx", folder / "int8.onnx"
    with seeded(0, 1):
        model = Baseline(name).build(data.channels, len(data.class_names), data.image_size)
        model = train(model, data.train, recipe=recipe, dataset=data, seed=0)
        export_onnx(model.eval(), fp32, image)
    quantised = quantize_static(fp32, int8, calibration_images(data, CALIBRATION, 0), tuned_for=tuning_of(target))
    runtime = load_runtime(target.runtime)
    right = {path: (predict(runtime.compile(path, replace(target, precision=precision, batch=BATCH)), data)
                    == data.test.labels).mean() for path, precision in ((fp32, "fp32"), (int8, "int8"))}
    return {"network": name, "weights": kind, "top1_fp32": float(right[fp32]), "top1_int8": float(right[int8]),
            "n_test": len(data.test), "note": quantised.text, "host": Host.detect().name,
            "version": runtime.version()}


def main() -> None:
    """Every network and kind of weights that is not in the results yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=[name for name in FAMILIES if name != "ghostnet_100"])
    given = parser.parse_args()
    rows: list[dict[str, Any]] = pd.read_csv(given.out).to_dict("records") if given.out.exists() else []
    done = {(row["network"], row["weights"]) for row in rows}
    options, size = SETS["eurosat"]
    data = load_dataset({**options, "root": str(given.data / options["root"])}, size, 0)
    for name, kind in product(given.networks, DECAY):
        if (name, kind) not in done:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(of_network(name, kind, data, Path(folder)))
            save_csv(given.out, rows)
            print(*rows[-1].values(), flush=True)


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.ERROR)
    command(main)
