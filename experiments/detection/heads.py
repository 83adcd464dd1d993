"""What a lighter head would win: detectors whose head is narrower, or on stride 16, beside their trunk alone.

    taskset -c 0 python -m experiments.detection.heads --out experiments/detection/results/heads.csv

MobileNetV2 at 256 px, random weights, int8 by OpenVINO, all timed in turns. `trunk` has timm's classifier.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from torch import nn

from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import prepare_untrained, reference_network, time_files
from hwnas.networks.weights import import_timm
from hwnas.target import Host, Target

PX, CLASSES, WIDTHS, STRIDES = 256, 3, (96, 64), (8, 16)
TARGET = Target("openvino_int8", "openvino", "int8")


def detectors() -> Iterator[tuple[str, nn.Module]]:
    """Yield the trunk, and a detector for each width and stride of the head."""
    timm = import_timm()
    from hwnas.tasks.detection import head

    yield "trunk", timm.create_model("mobilenetv2_100", num_classes=CLASSES)
    for width in WIDTHS:
        for stride in STRIDES:
            head.WIDTH, head.STRIDE = width, stride
            head.STRIDES = tuple(each for each in (32, 16, 8) if each >= stride)
            yield f"{width} channels, stride {stride}", head.Detector(timm.create_model("mobilenetv2_100"), CLASSES)


def main() -> None:
    """Time all in the same rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        files = {name: TimedFile(prepare_untrained(model, f"{at:08d}", (3, PX, PX), TARGET, Path(folder)), TARGET,
                                 (3, PX, PX)) for at, (name, model) in enumerate(detectors())}
        measured = time_files(files, TARGET, reference_network(), Protocol(min_rounds=24, max_seconds=90.0))
    table = pd.DataFrame([{"host": Host.detect().name, "head": name, "latency_ms": each.latency_ms,
                           "latency_ms_low": each.latency_ms_low, "latency_ms_high": each.latency_ms_high}
                          for name, each in measured.items()])
    table.to_csv(given.out, index=False)
    print(table.to_string())


if __name__ == "__main__":
    main()
