"""Does hwnas benchmark agree with OpenVINO's benchmark_app? The same files by both, by turns.

    python -m experiments.deployments.benchmark_app --models A.onnx B_int8.onnx --out FILE.csv

One request, one stream, one thread, batch 1. p50 is of all calls in both. Each of `--turns` turns times every file by
both tools, in an order that changes; the csv has every turn.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd

from hwnas.system.paths import temporary_folder


def ours_ms(model: Path, target: str, seconds: float, folder: Path) -> float:
    """p50 of all calls by `hwnas benchmark`, in ms."""
    out = folder / "ours.json"
    subprocess.run([sys.executable, "-m", "hwnas.benchmark", "-q", f"+target={target}", f"model={model}",
                    f"seconds={seconds:g}", f"out={out}"], check=False, capture_output=True)
    p50_ms = json.loads(out.read_text())["latency"][0]["p50_ms"]
    return float("nan") if p50_ms is None else float(p50_ms)


def theirs_ms(model: Path, precision: str, seconds: float) -> float:
    """The median latency that benchmark_app prints, in ms."""
    command = [str(Path(sys.executable).with_name("benchmark_app")), "-m", str(model), "-d", "CPU", "-api", "sync",
               "-hint", "none", "-nstreams", "1", "-nthreads", "1", "-infer_precision", precision, "-t", f"{seconds:g}",
               "-shape", _shape_of(model)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    value, unit = re.findall(r"Median:\s+([\d.]+) (ms|us)", told)[0]
    return float(value) / (1000 if unit == "us" else 1)


def _shape_of(model: Path) -> str:
    import onnx

    given = onnx.load(str(model)).graph.input[0]
    return f"{given.name}[1,{','.join(str(axis.dim_value) for axis in given.type.tensor_type.shape.dim[1:])}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    with temporary_folder() as folder:
        for turn in range(given.turns):
            for model in given.models:
                int8 = "int8" in model.name
                target, precision = ("openvino_int8", "f32") if int8 else ("openvino_fp32", "f32")
                times = {}
                for tool in ("ours", "theirs")[:: 1 if turn % 2 else -1]:
                    times[tool] = (ours_ms(model, target, given.seconds, Path(folder)) if tool == "ours"
                                   else theirs_ms(model, precision, given.seconds))
                rows.append({"model": f"{model.parent.name}/{model.name}", "turn": turn, "target": target,
                             "ours_p50_ms": times["ours"], "benchmark_app_p50_ms": times["theirs"]})
                pd.DataFrame(rows).to_csv(given.out, index=False)
    table = pd.DataFrame(rows).groupby("model")[["ours_p50_ms", "benchmark_app_p50_ms"]].median()
    print(table.assign(ours_over_theirs=table.ours_p50_ms / table.benchmark_app_p50_ms))


if __name__ == "__main__":
    main()
