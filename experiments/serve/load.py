"""What `hwnas.choose` says of p99 at a load, beside what LoadGen measures there, twice.

    python -m experiments.serve.load RUN --out experiments/serve/results/load.csv [--networks 6] [--check 8]
    python -m experiments.serve.load A.onnx B.onnx --out experiments/serve/results/large.csv --seconds 10 --check 30

Networks of a verified run, in steps of their latency, or files in fp32, each with two batches and numbers of streams. A
load curve is measured as the command does it. Then LoadGen runs twice at 50, 70 and 90 % of the saturation found, with
other seeds than the curve's. The rule, set before: the prediction is good where it lies within 15 % of the mean of the
two; how far the two are apart is what could be seen at all. Its control is a line, in the logarithm, through what
LoadGen measured for the curve.
"""

from __future__ import annotations

import argparse
import itertools
import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from hwnas.choose.curve import LoadCurve
from hwnas.front.rows import FrontRow, load_front
from hwnas.latency.timing import HERE
from hwnas.runtimes.child import run_child
from hwnas.runtimes.classifier import deployed_file
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target, target_named

SHARES = (0.5, 0.7, 0.9)
BATCHES, STREAMS = (1, 4), (1, 2)
FP32 = Target("openvino_fp32", "openvino", "fp32")


@dataclass(frozen=True)
class ServedNetwork:
    """A file, and what its network is called."""

    file: Path
    id: str
    name: str


def spread_rows(rows: list[FrontRow], n: int) -> list[FrontRow]:
    """`n` verified rows, in equal steps by rank of latency."""
    timed = sorted((row for row in rows if row.verified and row.latency_ms), key=lambda row: row.latency_ms or 0.0)
    return [timed[round(step * (len(timed) - 1) / (n - 1))] for step in range(n)]


def read_served(places: Sequence[Path], n: int) -> Iterator[tuple[ServedNetwork, Target]]:
    """What is put under load, with its target: rows of a run, or ONNX files."""
    for place in places:
        if place.is_file():
            yield ServedNetwork(place.absolute(), place.parent.name, place.parent.name), FP32
            continue
        folder = RunFolder.open(place)
        section = folder.read_environment()["target"]
        for row in spread_rows(load_front(folder), n):
            target = target_named(section, row.target)
            file = deployed_file(folder.model(row.id).path, target.precision, target).absolute()
            yield ServedNetwork(file, row.id, row.name), target


def on_line(curve: LoadCurve, rate: float) -> float:
    """p99 in ms at `rate` by the two runs around it (or next to it), on a line of its logarithm."""
    rates, logs = [run.rate for run in curve.runs], [math.log(run.p99_ms) for run in curve.runs]
    above = min(max(bisect(rates, rate), 1), len(rates) - 1)
    slope = (logs[above] - logs[above - 1]) / (rates[above] - rates[above - 1])
    return math.exp(logs[above] + slope * (rate - rates[above]))


def measure(served: ServedNetwork, target: Target, streams: int, seconds: float, check: float
            ) -> Iterator[dict[str, Any]]:
    """A row for each share: predicted, and measured twice."""
    job = {"path": str(served.file), "label": served.id, "streams": streams, "seconds": seconds, "seed": 0}
    limits: dict[str, Any] = {"timeout_s": 600, "memory_mb": 8192}
    raw = run_child("hwnas.choose.load", job, target, **limits)
    curve = LoadCurve.from_dict({**raw, "streams": streams, "batch": target.batch})
    for share in SHARES:
        rate = share * curve.most
        runs = [run_child("hwnas.choose.load", {**job, "rate": rate, "p99_ms": 6e4, "seconds": check, "seed": seed},
                          target, **limits) for seed in (11, 12)]
        yield {"host": HERE.host.name, "id": served.id, "name": served.name, "target": target.name,
               "batch": target.batch, "streams": streams, "saturation": curve.most, "drift": curve.drift,
               "share": share, "rate": rate, "predicted_p99_ms": curve.p99_ms(rate),
               "line_p99_ms": on_line(curve, rate), "measured_p99_ms": runs[0]["p99_ms"],
               "again_p99_ms": runs[1]["p99_ms"], "measured_p50_ms": runs[0]["p50_ms"],
               "valid": not curve.invalid and all(run["valid"] for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", type=Path, nargs="+", metavar="RUN or FILE.onnx")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--check", type=float, default=8.0)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for served, target in read_served(given.places, given.networks):
        for batch, streams in itertools.product(BATCHES, given.streams):
            rows += measure(served, replace(target, batch=batch), streams, given.seconds, given.check)
            pd.DataFrame(rows).round(5).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
