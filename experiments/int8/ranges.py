"""int8 files of timm networks by hwnas and by libraries: top-1 lost and latency, side by side.

    python experiments/int8/ranges.py --root EUROSAT --out DIR [--nncf PYTHON] [--networks NAME ...] [--ways ...]

Trains each network briefly (once: `DIR/NAME.onnx` stays), quantises it in each way with training images, scores every
file on all test images in OpenVINO and in ONNX Runtime, and times the files of a network in one interleaved session for
each runtime. Writes `DIR/results.csv`, a row for each network, runtime and way, after each network; networks that are
there are not taken again. Prints the tables of int8/README.md. `--nncf` is the Python of an environment with
nncf, onnx and onnxruntime.
"""

from __future__ import annotations

import argparse
import csv
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import command, save_csv, text_table
from experiments.int8.networks import FAMILIES, trained
from hwnas.data.dataset import Dataset
from hwnas.data.loading import load_dataset
from hwnas.errors import CandidateError
from hwnas.latency.copies import TimedFile, bind_copies
from hwnas.networks.quantize import calibration_images, quantize_static, tuning_of
from hwnas.runtimes.runtime import load_runtime, predict
from hwnas.target import Host, Target

SIZE, STEPS = 32, 400
ROUNDS, CALLS = 25, 20
BATCH = 50  # of the scoring
LIBRARY_IMAGES = 512  # and hwnas's default of an earlier version
FEWER_IMAGES = 128  # for what is slow or keeps every activation in memory
RUNTIMES = ("openvino", "onnxruntime")
WAYS = ("hwnas, mse", "hwnas", "ORT, min-max", "ORT, entropy", "NNCF")
CRASHES = ("ghostnet_100", "openvino")  # 2026.4.1 ends with a segmentation fault on ONNX Runtime's files of it
Way = Callable[[Path, Path], str]


def main() -> None:
    """Every network that is not in the results yet; then the tables."""
    options = _parser().parse_args()
    data = load_dataset({"name": "imagefolder", "root": options.root, "validation_fraction": 0.15,
                         "test_fraction": 0.2, "flip": True}, SIZE, 0)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.csv"
    rows: list[dict[str, Any]] = []
    if results.exists():
        with results.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    done = {(row["network"], row["runtime"]) for row in rows}
    for runtime, name in product(options.runtimes, options.networks):
        if (name, runtime) not in done:
            fp32 = trained(name, options.out, data, STEPS)
            rows += [{"network": name, **row} for row in of_network(fp32, data, runtime, options)]
            save_csv(results, rows)
    for runtime in dict.fromkeys(row["runtime"] for row in rows):
        print(text_table(lost_table(rows, runtime)), text_table(latency_table(rows, runtime)), sep="\n\n")


def lost_table(rows: Sequence[Mapping[str, Any]], runtime: str) -> list[list[str]]:
    """Head and a row a network: fp32 top-1, then the points lost by each way; a dash where the runtime refused it."""
    cells = {(row["network"], row["way"]): row for row in rows if row["runtime"] == runtime}
    table = [[f"top-1 lost, {runtime}", "fp32", *WAYS]]
    for name in dict.fromkeys(network for network, _ in cells):
        top1 = 100 * float(cells[name, "fp32"]["top1"])
        lost = [cells.get((name, way), {}).get("top1") for way in WAYS]
        table.append([name, f"{top1:.1f}", *(f"{top1 - 100 * float(one):.1f}" if one else "–" for one in lost)])
    return table


def latency_table(rows: Sequence[Mapping[str, Any]], runtime: str) -> list[list[str]]:
    """Head and a row a network: milliseconds of fp32 and of each way."""
    cells = {(row["network"], row["way"]): row for row in rows if row["runtime"] == runtime}
    table = [[f"ms, {runtime}", "fp32", *WAYS]]
    for name in dict.fromkeys(network for network, _ in cells):
        taken = [cells.get((name, way), {}).get("latency_ms") for way in ("fp32", *WAYS)]
        table.append([name, *(f"{float(one):.3f}" if one else "–" for one in taken)])
    return table


def of_network(path: Path, data: Dataset, runtime: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each way; `seconds` of making a file are empty where it lay there."""
    np.save(path.with_suffix(".npy"), calibration_images(data, LIBRARY_IMAGES, 0))
    target, rows = Target(f"{runtime}_int8", runtime, "int8"), []
    made: dict[str, tuple[float | str, str]] = {}
    files = {way: made for way, made in ways(path, data, target, options.nncf).items() if way in options.ways}
    for way, (file, make) in files.items():
        start, there = time.monotonic(), file.exists()
        note = "" if there else make(path, file)
        made[way] = "" if there else time.monotonic() - start, note
    for row in scored(path, {way: file for way, (file, _) in files.items()}, data, target):
        seconds, note = made.get(row["way"], ("", ""))
        rows.append({**row, "seconds": seconds, "note": note})
        print(path.stem, rows[-1], flush=True)
    return rows


def ways(path: Path, data: Dataset, target: Target, nncf: str | None) -> dict[str, tuple[Path, Way]]:
    """File and maker of each way; a maker returns a note on what it chose."""
    def before(fp32: Path, int8: Path) -> str:
        return quantize_static(fp32, int8, np.load(images), tuned_for=tuning_of(target), method="mse").text

    def now(fp32: Path, int8: Path) -> str:
        return quantize_static(fp32, int8, calibration_images(data, 768, 0), tuned_for=tuning_of(target)).text

    images, stem = path.with_suffix(".npy"), str(path.with_suffix(""))
    found: dict[str, tuple[Path, Way]] = {
        "hwnas, mse": (Path(f"{stem}_mse_{target.runtime}.onnx"), before),
        "hwnas": (Path(f"{stem}_hwnas_{target.runtime}.onnx"), now),
        "ORT, min-max": (Path(f"{stem}_ort_minmax.onnx"), lambda fp32, int8: by_onnxruntime(fp32, int8, "MinMax")),
        "ORT, entropy": (Path(f"{stem}_ort_entropy.onnx"), lambda fp32, int8: by_onnxruntime(fp32, int8, "Entropy"))}
    if nncf:
        def by_nncf(fp32: Path, int8: Path) -> str:
            subprocess.run([nncf, str(Path(__file__).with_name("nncf_file.py")), str(fp32), str(int8), str(images)],
                           check=True, capture_output=True)
            return ""

        found["NNCF"] = Path(f"{stem}_nncf.onnx"), by_nncf
    crashes = (path.stem, target.runtime) == CRASHES
    return {way: made for way, made in found.items() if not (crashes and way.startswith("ORT"))}


def by_onnxruntime(fp32: Path, int8: Path, method: str) -> str:
    """ONNX Runtime's own: QDQ, weights per channel, activations uint8."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    images = np.load(fp32.with_suffix(".npy"))
    images = images[:: len(images) // FEWER_IMAGES] if method == "Entropy" else images
    prepared = int8.with_name(f"{int8.stem}_prepared.onnx")
    quant_pre_process(str(fp32), str(prepared), skip_symbolic_shape=True)

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self._batches = iter(images[start : start + 32] for start in range(0, len(images), 32))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self._batches, None)
            return None if batch is None else {"images": np.ascontiguousarray(batch)}

    quantization.quantize_static(str(prepared), str(int8), Reader(), quant_format=quantization.QuantFormat.QDQ,
                                 per_channel=True, activation_type=quantization.QuantType.QUInt8,
                                 weight_type=quantization.QuantType.QInt8,
                                 calibrate_method=quantization.CalibrationMethod[method])
    prepared.unlink()
    return ""


def scored(fp32: Path, files: Mapping[str, Path], data: Dataset, target: Target) -> list[dict[str, Any]]:
    """Test top-1, agreement with fp32 in the same runtime, and latency of every file; a refused one has the reason."""
    runtime = load_runtime(target.runtime)
    targets = {"fp32": replace(target, precision="fp32"), **dict.fromkeys(files, target)}
    answers, refused, paths = {}, {}, {"fp32": fp32, **files}
    for way, path in paths.items():
        try:
            runtime.compile(path, targets[way])
            answers[way] = predict(runtime.compile(path, replace(targets[way], batch=BATCH)), data)
        except CandidateError as error:
            refused[way] = str(error).rpartition("onnx: ")[2]
    times = timed({way: TimedFile(paths[way], targets[way], (data.channels, data.image_size, data.image_size))
                   for way in answers})
    common = {"runtime": target.runtime, "n_test": len(data.test), "host": Host.detect().name,
              "version": runtime.version()}
    return [{**common, "way": way, "refused": refused.get(way, ""),
             "top1": float((answers[way] == data.test.labels).mean()) if way in answers else "",
             "agreement": float((answers[way] == answers["fp32"]).mean()) if way in answers else "",
             "latency_ms": times[way][0] if way in times else "", "spread_ms": times[way][1] if way in times else ""}
            for way in paths]


def timed(files: Mapping[str, TimedFile]) -> dict[str, tuple[float, float]]:
    """Median over interleaved rounds of a round's 20th percentile, and half the distance of its quartiles: ms."""
    found: dict[str, list[float]] = {way: [] for way in files}
    calls = {way: bind_copies(file, 1)[0] for way, file in files.items()}
    for turn in range(ROUNDS + 1):
        for way, call in calls.items():
            took = []
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                took.append(1e3 * (time.perf_counter() - start))
            if turn:
                found[way].append(float(np.quantile(took, 0.2)))
    return {way: (float(np.median(ms)), float(np.subtract(*np.quantile(ms, (0.75, 0.25)))) / 2)
            for way, ms in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder of EuroSAT")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nncf", help="Python of an environment with nncf")
    parser.add_argument("--networks", nargs="+", default=FAMILIES)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--runtimes", nargs="+", default=RUNTIMES, choices=RUNTIMES)
    return parser


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.ERROR)
    command(main)
