"""What `hwnas.choose` says of p99 at a load, beside what LoadGen measures there, twice.

    python -m experiments.choose.load RUN --out experiments/choose/load.csv [--networks 6] [--seconds 6] [--check 8]

Networks of a verified run, in steps of their latency, each with two batches and two numbers of streams. A load curve is
measured as the command does it. Then LoadGen runs twice at 50, 70 and 90 % of the saturation found, with other seeds
than the curve's. The rule, set before: the prediction is good where it lies within 15 % of the mean of the two; how far
the two are apart is what could be seen at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from hwnas.choose.curve import LoadCurve
from hwnas.front.rows import FrontRow, load_front
from hwnas.runtimes.child import run_child
from hwnas.runtimes.classifier import deployed_file
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target, target_named

SHARES = (0.5, 0.7, 0.9)
BATCHES, STREAMS = (1, 4), (1, 2)


def spread_rows(rows: list[FrontRow], n: int) -> list[FrontRow]:
    """`n` verified rows, in equal steps by rank of latency."""
    timed = sorted((row for row in rows if row.verified and row.latency_ms), key=lambda row: row.latency_ms or 0.0)
    return [timed[round(step * (len(timed) - 1) / (n - 1))] for step in range(n)]


def measure(folder: RunFolder, row: FrontRow, target: Target, streams: int, seconds: float, check: float
            ) -> Iterator[dict[str, Any]]:
    """A row for each share: predicted, and measured twice."""
    file = deployed_file(folder.model(row.id).path, target.precision, target).absolute()
    job = {"path": str(file), "label": row.id, "streams": streams, "seconds": seconds, "seed": 0}
    limits: dict[str, Any] = {"timeout_s": 600, "memory_mb": 8192}
    raw = run_child("hwnas.choose.load", job, target, **limits)
    curve = LoadCurve.from_dict({**raw, "streams": streams, "batch": target.batch})
    for share in SHARES:
        rate = share * curve.most
        runs = [run_child("hwnas.choose.load", {**job, "rate": rate, "p99_ms": 6e4, "seconds": check, "seed": seed},
                          target, **limits) for seed in (11, 12)]
        yield {"host": row.host, "id": row.id, "name": row.name, "target": target.name, "latency_ms": row.latency_ms,
               "batch": target.batch, "streams": streams, "saturation": curve.most, "drift": curve.drift,
               "share": share, "rate": rate, "predicted_p99_ms": curve.p99_ms(rate),
               "measured_p99_ms": runs[0]["p99_ms"], "again_p99_ms": runs[1]["p99_ms"],
               "measured_p50_ms": runs[0]["p50_ms"], "valid": not curve.invalid and all(run["valid"] for run in runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--networks", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--check", type=float, default=8.0)
    given = parser.parse_args()
    folder = RunFolder.open(given.run)
    section = folder.read_environment()["target"]
    rows: list[dict[str, Any]] = []
    for row in spread_rows(load_front(folder), given.networks):
        for batch in BATCHES:
            for streams in STREAMS:
                target = replace(target_named(section, row.target), batch=batch)
                rows += measure(folder, row, target, streams, given.seconds, given.check)
                pd.DataFrame(rows).round(5).to_csv(given.out, index=False)


if __name__ == "__main__":
    main()
