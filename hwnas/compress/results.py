"""What a compression leaves: a table of its steps, the best file that keeps the limit, a summary that says why."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from hwnas.compress.job import CompressJob
from hwnas.compress.step import REFERENCE, Step, Steps
from hwnas.compress.steps import best, nearest, rows
from hwnas.errors import CandidateError, QuantizeError
from hwnas.latency.measurement import Measurement
from hwnas.runtimes.runtime import load_runtime
from hwnas.stats.intervals import wilson
from hwnas.system.paths import write_atomic
from hwnas.system.tables import finite, table_csv
from hwnas.target.host import Host

FORMAT = "hwnas-compression/1"
_PACKAGES = ("torch", "onnx", "onnxruntime", "openvino")


def write_results(steps: Steps, found: Sequence[Step], latency: Mapping[str, Measurement]) -> dict[str, Any]:
    """Write table, summary and, where the limit is kept, the int8 file; without one, an earlier file goes.

    QuantizeError when every step failed.
    """
    job, limit = steps.job, steps.job.options.max_drop
    table = rows(found, steps.reference, latency, limit)
    write_atomic(job.table, table_csv(table))
    chosen = best(found, steps.reference, latency, limit)
    told = chosen or nearest(found, steps.reference)
    deployed = job.folder.deployed("int8")
    job.summary.unlink(missing_ok=True)  # an earlier one tells of an earlier limit
    if chosen is None:
        deployed.unlink(missing_ok=True)
    else:
        write_atomic(deployed, chosen.path.read_bytes())
    if told is None:
        raise QuantizeError(f"no int8 file of {job.source.label} could be made: {found[0].error}")
    summary = finite({
        "format": FORMAT, "model": job.source.label, "keeps_limit": chosen is not None, "max_drop_points": limit,
        "file": None if chosen is None else deployed.name, "step": told.name, "what": told.what,
        **{key: value for key, value in next(row for row in table if row["name"] == told.name).items()
           if key not in ("name", "what", "file", "reason", "keeps_limit")},
        "latency_ms_fp32": latency[REFERENCE].latency_ms, "top1_validation_fp32": steps.reference.top1,
        "validation_images": len(steps.reference.right), **_on_test_images(steps, told),
        "kept_in_fp32": told.about.get("why", []), "steps": table, "target": job.target.name, "identity": job.identity,
        "host": Host.detect().name, "runtime": load_runtime(job.target.runtime).version(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}})
    write_atomic(job.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    return dict(summary)


def _on_test_images(steps: Steps, told: Step) -> dict[str, Any]:
    """Test top-1 of the file that is told of and of the fp32 network, asked once, with the paired interval of the drop.

    No step was chosen by it.
    """
    test, job = steps.job.dataset.test, steps.job
    fp32, _ = steps.scorer.right(job.source.path, REFERENCE, test)
    try:
        int8, _ = steps.scorer.right(told.path, "int8", test)
    except CandidateError as error:
        raise QuantizeError(f"{told.path} no longer runs: {error}") from error
    low, high = wilson(int(int8.sum()), len(int8))
    drop, drop_low, drop_high = Step(told.name, told.what, told.path, int8, {}).drop(
        Step(REFERENCE, "", job.source.path, fp32, {}))
    return {"top1_test": float(int8.mean()), "top1_test_low": low, "top1_test_high": high,
            "top1_test_fp32": float(fp32.mean()), "test_drop_points": drop, "test_drop_points_low": drop_low,
            "test_drop_points_high": drop_high, "n_test": len(test)}


def sentence(summary: Mapping[str, Any], job: CompressJob) -> str:
    """The result in one line."""
    test = (f"test {summary['top1_test']:.2%}, drop {summary['test_drop_points']:.2f} (95 %: "
            f"{summary['test_drop_points_low']:.2f} to {summary['test_drop_points_high']:.2f}) on {summary['n_test']} "
            "images")
    facts = (f"{summary['step']}, drop {summary['drop_points']:.2f} points on {summary['validation_images']} "
             f"validation images; {test}; {summary['latency_ms']:.4g} ms, {summary['speedup']:.2f} times fp32's speed")
    if not summary["keeps_limit"]:
        return (f"no step keeps the limit of {summary['max_drop_points']:g} points, so that no int8 file is written. "
                f"Nearest: {facts} ({job.steps / summary['step']}.onnx). Raise max_drop, or train a wider network.")
    kept = summary["kept_in_fp32"]
    fp32 = f"; in fp32: {', '.join(one['node'] for one in kept)}" if kept else ""
    return f"{facts}{fp32}: {job.folder.deployed('int8')}"


def printed(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for a terminal, a line a step."""
    head = ("step", "validation", "drop", "95 %", "latency ms", "speed", "int8", "fp32 nodes", "")
    lines = [head, *(_printed(row) for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(text.ljust(width) if index in (0, len(head) - 1) else text.rjust(width)
                      for index, (text, width) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in lines]


def _printed(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["reason"]:
        return (str(row["name"]), *["-"] * 7, f"failed: {row['reason']}")
    share, ms = row["int8_share"], row["latency_ms"]
    times = ("-", "-") if ms is None else (f"{ms:.4g}", f"{row['speedup']:.2f}×")
    return (str(row["name"]), f"{row['top1_validation']:.2%}", f"{row['drop_points']:+.2f}",
            f"{row['drop_points_low']:+.2f} to {row['drop_points_high']:+.2f}", *times,
            "-" if share is None else f"{share:.0%}", str(row["fp32_nodes"]),
            "" if row["name"] == REFERENCE else "keeps the limit" if row["keeps_limit"] else "")
