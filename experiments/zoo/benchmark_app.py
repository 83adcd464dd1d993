"""Our median latency beside that of OpenVINO's benchmark_app, in turns, on one core.

    taskset -c 0 python -m experiments.zoo.benchmark_app --out experiments/zoo/results/benchmark_app.csv

Ten of timm's networks with random weights, fp32, one thread, one stream, batch 1. In each of ROUNDS rounds all are
timed by our harness (a wave, interleaved), and then by benchmark_app, SECONDS each. The medians of calls as they were
(`latency_ms_p50`), not corrected for what disturbed the machine. Without -infer_precision f32 benchmark_app computes in
bf16 on a CPU that has it, and is 1.4 to 1.9 times as fast. Rule, written before: within 10 %, by the mean of the
logarithms over the rounds.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import image_shape, prepare_network, prepare_untrained, reference_network
from hwnas.latency.wave import Wave, time_apart
from hwnas.networks.baselines import Baseline
from hwnas.networks.weights import import_timm
from hwnas.runtimes.runtime import FP32
from hwnas.target import Host, Target

NAMES = ("mobilenetv3_small_050", "mobilenetv3_small_100", "mobilenetv3_large_100", "mobilenetv2_100",
         "efficientnet_b0", "resnet18", "resnet34", "regnety_008", "mobileone_s1", "ghostnet_100")
PX, ROUNDS, SECONDS = 224, 2, 5
TARGET = Target("epyc_fp32", "openvino", "fp32")


def main() -> None:
    """Time the networks both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    import_timm()
    rows = []
    with TemporaryDirectory() as folder:
        files = {name: prepare_untrained(Baseline(name).build(3, 1000, PX), f"{at:08x}", (3, PX, PX), FP32,
                                         Path(folder)) for at, name in enumerate(NAMES)}
        beside = reference_network()
        reference = TimedFile(prepare_network(beside, FP32, Path(folder)), TARGET, image_shape(beside))
        for number in range(ROUNDS):
            wave = Wave({name: TimedFile(path, TARGET, (3, PX, PX)) for name, path in files.items()}, reference,
                        beside.id, Protocol(max_seconds=60.0), number)
            measured, failed = time_apart(wave)
            assert not failed
            for name, path in files.items():
                command = ["benchmark_app", "-m", str(path), "-d", "CPU", "-hint", "none", "-api", "sync", "-nstreams",
                           "1", "-nthreads", "1", "-infer_precision", "f32", "-t", str(SECONDS), "-shape",
                           f"[1,3,{PX},{PX}]"]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                theirs = re.search(r"Median:\s+([\d.]+) (ms|us)", said)
                assert theirs is not None, said
                rows.append({"host": Host.detect().name, "name": name, "round": number,
                             "ours_ms": measured[name].percentile_ms(0.5),
                             "benchmark_app_ms": float(theirs[1]) * (1e-3 if theirs[2] == "us" else 1.0)})
                print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    table.to_csv(given.out, index=False)
    apart = np.log(table.ours_ms / table.benchmark_app_ms).groupby(table.name).mean()
    print((100 * (np.exp(apart) - 1)).round(1).to_string(), f"median {100 * (math.exp(apart.median()) - 1):.1f} %")


if __name__ == "__main__":
    main()
