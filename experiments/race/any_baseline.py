"""What can be cut out of networks that arch-def words cannot say, and whether the cuts run in int8.

    python -m experiments.race.any_baseline --out experiments/race/results/any_baseline.csv

Of each network: seconds of tracing, what may be chosen, and MACs and latency of the whole network and of its shortest
and narrowest cut, with random weights, exported, quantised on synthetic ranges and timed in OpenVINO, side by side.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hwnas.errors import HwnasError
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import HERE, image_shape, prepare_network, reference_network, time_files
from hwnas.networks.around import describe_cuts, space_of_cuts
from hwnas.networks.traced import DEPTH
from hwnas.space.architecture import WIDTH
from hwnas.space.cuts import WHOLE
from hwnas.system.paths import temporary_folder
from hwnas.target import Host, Target

NAMES = ("resnet18", "resnet50", "mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100",
         "mobilenetv4_conv_small", "mobilenetv4_conv_medium", "efficientnet_b0", "tf_efficientnet_lite0",
         "efficientnetv2_rw_t", "repvgg_a0", "repvit_m1", "convnext_atto", "convnextv2_atto", "mobileone_s0",
         "regnety_002", "ghostnetv2_100", "mobilevitv2_050", "lcnet_050", "fbnetv3_b", "semnasnet_100", "starnet_s1",
         "hgnetv2_b0", "densenet121", "vit_tiny_patch16_224")
TARGET = Target("openvino_int8", "openvino", "int8")
PX, CLASSES, SECONDS = 64, 10, 6.0


def judge(name: str) -> dict[str, Any]:
    """A row of a network; `error` says where it ended."""
    row: dict[str, Any] = {"network": name}
    began = time.monotonic()
    try:
        content = describe_cuts(name, 3, CLASSES, PX)
        row["seconds"] = time.monotonic() - began
        space = space_of_cuts([content], 3, CLASSES)
        ties = sum(choice.startswith(WIDTH) for choice in content["choices"])
        row |= {"runs": len(content["choices"]) - ties - (DEPTH in content["choices"]), "ties": ties}
        whole, least = space.known[WHOLE], [*space.known.values()][-1]
        row |= {"macs_whole": whole.macs, "macs_cut": least.macs}
        with temporary_folder() as folder:
            files = {label: TimedFile(prepare_network(network, TARGET, Path(folder)), TARGET, image_shape(network))
                     for label, network in (("whole", whole), ("cut", least))}
            timed = time_files(files, TARGET, reference_network(3, CLASSES, PX),
                               Protocol(max_seconds=SECONDS))
        row |= {f"ms_{label}": timed[label].latency_ms for label in files}
    except HwnasError as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return row


def write_rows(doc: str | None, judge: Callable[[str], Iterable[dict[str, Any]]], argv: Sequence[str] | None, *,
               names: Sequence[str] = NAMES, digits: str = "%.4f") -> None:
    """The command of a script: judge the networks that are named, and write all rows anew after each."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", default=names)
    given = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for name in given.names:
        rows += judge(name)
        pd.DataFrame(rows).to_csv(given.out, index=False, float_format=digits)
        print(rows[-1], flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Judge all networks; a file that is there is written anew."""
    here = {"host": Host.detect().name, "runtime": HERE.runtime(TARGET.runtime).version()}
    write_rows(__doc__, lambda name: [{**judge(name), **here}], argv)


if __name__ == "__main__":
    main()
