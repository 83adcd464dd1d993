"""The order of a compression's steps, cheap ones first, and which of their files is the best that keeps the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwnas.cli.progress import Console
from hwnas.compress.step import REFERENCE, Step, Steps
from hwnas.errors import StudyError, TableError
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.system.documents import content_of
from hwnas.system.paths import write_atomic
from hwnas.system.tables import finite

FORMAT = "hwnas-compress-timing/1"


def taken(steps: Steps, console: Console) -> list[Step]:
    """The int8 steps up to the first that keeps the limit; all of them where the options say so."""
    options, found = steps.job.options, list[Step]()
    for step in _all(steps, found, console):
        found.append(step)
        console.note(line(step, steps.reference))
        if step.keeps(steps.reference, options.max_drop) and not options.every_step:
            break
    return found


def _all(steps: Steps, found: Sequence[Step], console: Console) -> Iterator[Step]:
    """Post-training; sensitive nodes in fp32; fine-tuned; fine-tuned with sensitive nodes in fp32."""
    from hwnas.compress.post_training import PostTraining
    from hwnas.compress.sensitivity import KeptNodes

    plain = PostTraining(steps, console)
    yield from plain.steps()
    if all(step.error for step in found):
        return
    base = plain.best()
    yield from KeptNodes(steps, base, base.note, console).steps()
    if not steps.job.source.tunable:
        return
    from hwnas.compress.qat import FineTuning

    tuning = FineTuning(steps, plain.quantisation(plain.best_method), console)
    step = tuning.step()
    yield step
    if not step.error and not any(one.keeps(steps.reference, steps.job.options.max_drop) for one in found):
        yield from KeptNodes(steps, tuning.tuned(), step.name, console).steps()


def line(step: Step, reference: Step) -> str:
    """A finished step in one line."""
    if step.error:
        return f"{step.name}: failed: {step.error}"
    drop, low, high = step.drop(reference)
    return (f"{step.name} ({step.what}): validation {step.top1:.2%}, drop {drop:.2f} points (95 %: {low:.2f} to "
            f"{high:.2f})")


def timed(steps: Steps, found: Sequence[Step], console: Console) -> dict[str, Measurement]:
    """Latency of the fp32 reference and of every step's file, all in the same rounds; kept from run to run."""
    job, path = steps.job, steps.job.steps / "timing.json"
    files = {REFERENCE: (job.source.path, "fp32")} | {
        step.name: (step.path, "int8") for step in found if not step.error}
    contents = {name: content_of(file) for name, (file, _) in files.items()}
    stored = _stored_timing(path, contents)
    if not set(files) <= set(stored):
        stored = steps.scorer.time(files, console)
        first = next(iter(stored.values()))
        write_atomic(path, json.dumps(finite({
            "format": FORMAT, "protocol": first.protocol.to_dict(), "contents": contents,
            "files": {name: one.to_dict() for name, one in stored.items()}}), separators=(",", ":")) + "\n")
    return {name: stored[name] for name in files}


def _stored_timing(path: Path, contents: Mapping[str, str]) -> dict[str, Measurement]:
    """The measurements of an earlier run, of those files that are the same."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        protocol = Protocol(**data["protocol"])
        return {name: Measurement.from_dict(one, protocol, str(path)) for name, one in data["files"].items()
                if data["contents"][name] == contents.get(name)}
    except (OSError, ValueError, KeyError, TypeError, TableError) as error:
        raise StudyError(f"cannot read {path}: {error}. Remove it to time again.") from None


def best(found: Sequence[Step], reference: Step, latency: Mapping[str, Measurement], max_drop: float) -> Step | None:
    """The fastest that keeps the limit; of those whose 90 % intervals of latency meet its own, the most accurate."""
    keeping = [step for step in found if step.keeps(reference, max_drop)]
    if not keeping:
        return None
    fastest = min((latency[step.name] for step in keeping), key=lambda one: one.latency_ms)
    as_fast = [step for step in keeping if latency[step.name].latency_ms_low <= fastest.latency_ms_high]
    return max(as_fast, key=lambda step: step.right.sum())


def nearest(found: Sequence[Step], reference: Step) -> Step | None:
    """The one that loses least; the first of equals. None where every step failed."""
    whole = [step for step in found if not step.error]
    return min(whole, key=lambda step: step.drop(reference)[0]) if whole else None


def rows(found: Sequence[Step], reference: Step, latency: Mapping[str, Measurement], max_drop: float
         ) -> list[dict[str, Any]]:
    """A line of `table.csv` a step, the reference first: top-1 as a fraction, drops in points, latency in ms."""
    fp32_ms = latency[REFERENCE].latency_ms
    table = []
    for step in (reference, *found):
        drop, low, high = step.drop(reference)
        timed = latency.get(step.name)
        ms = {} if timed is None else {
            "latency_ms": timed.latency_ms, "latency_ms_low": timed.latency_ms_low,
            "latency_ms_high": timed.latency_ms_high, "speedup": fp32_ms / timed.latency_ms}
        table.append(finite({
            "name": step.name, "what": step.what, "top1_validation": step.top1, "drop_points": drop,
            "drop_points_low": low, "drop_points_high": high,
            "keeps_limit": step.keeps(reference, max_drop), **dict.fromkeys(
                ("latency_ms", "latency_ms_low", "latency_ms_high", "speedup")), **ms,
            "int8_share": step.about.get("int8_share"), "fp32_nodes": len(step.kept),
            "seconds": step.about.get("seconds"), "file": step.path.name, "reason": step.error}))
    return table
