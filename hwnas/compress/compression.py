"""A compression: its steps in order, cheap ones first, their latencies, the best file, and the results."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwnas.cli.progress import UNKNOWN, number, text_table
from hwnas.compress.job import CompressJob, name_of
from hwnas.compress.steps import REFERENCE, KeptNodes, PostTraining, Step, Steps, points_lost
from hwnas.errors import CandidateError, QuantizeError
from hwnas.front.card import Input, card_text, day_of
from hwnas.front.rows import FrontRow
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.networks.network import Shape, read_network
from hwnas.networks.origin import COMPRESSION
from hwnas.runtimes.runtime import deployed_of, write_deployed
from hwnas.stats import wilson
from hwnas.system.documents import Document, content_of
from hwnas.system.libraries import version_of
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import Manifest, ModelFolder
from hwnas.system.tables import finite, table_csv

TIMING = Document("hwnas-compress-timing", 1, "the timing of a compression", "Remove it to time again.")
_PACKAGES = ("torch", "onnx", "onnxruntime", "openvino")


def taken(steps: Steps) -> list[Step]:
    """Take the int8 steps up to the first that keeps the limit, or all of them if the options say so."""
    options, finished = steps.job.options, list[Step]()
    for step in _all(steps, finished):
        finished.append(step)
        steps.console.note(line(step, steps.reference))
        if step.keeps(steps.reference, options.max_drop) and not options.all:
            break
    return finished


def _all(steps: Steps, finished: Sequence[Step]) -> Iterator[Step]:
    """The steps in order: post-training, sensitive nodes in fp32, fine-tuning, fine-tuning with such nodes in fp32."""
    plain = PostTraining(steps)
    yield from plain.steps()
    if all(step.error for step in finished):
        return
    base = plain.best()
    yield from KeptNodes(steps, base, base.note).steps()
    if not steps.job.source.tunable:
        return
    from hwnas.compress.qat import FineTuning

    tuning = FineTuning(steps, plain.quantisation(plain.best_method))
    step = tuning.step()
    yield step
    if not step.error and not any(earlier.keeps(steps.reference, steps.job.options.max_drop) for earlier in finished):
        yield from KeptNodes(steps, tuning.tuned(), step.name).steps()


def line(step: Step, reference: Step) -> str:
    """One line about a finished step."""
    if step.error:
        return f"{step.name}: failed: {step.error}"
    drop, low, high = step.drop(reference)
    return (f"{step.name} ({step.what}): validation {step.top1:.2%}, drop {drop:.2f} points (95 %: {low:.2f} to "
            f"{high:.2f})")


def timed(steps: Steps, finished: Sequence[Step]) -> dict[str, Measurement]:
    """Time the fp32 reference and every step's file, all in the same rounds; later runs reuse the times."""
    job, path = steps.job, steps.job.steps / "timing.json"
    files = {REFERENCE: (job.source.path, "fp32")} | {
        step.name: (step.path, "int8") for step in finished if not step.error}
    contents = {name: content_of(file) for name, (file, _) in files.items()}
    stored = _stored_timing(path, contents)
    if not set(files) <= set(stored):
        stored = steps.time(files)
        first = next(iter(stored.values()))
        write_atomic(path, json.dumps(finite({
            **TIMING.header, "protocol": first.protocol.to_dict(), "contents": contents,
            "files": {name: measurement.to_dict() for name, measurement in stored.items()}}),
            separators=(",", ":")) + "\n")
    return {name: stored[name] for name in files}


def _stored_timing(path: Path, contents: Mapping[str, str]) -> dict[str, Measurement]:
    """The measurements of an earlier run, for files that have not changed."""
    data = TIMING.find(path)
    if data is None:
        return {}
    with TIMING.reading(path):
        protocol = Protocol(**data["protocol"])
        return {name: Measurement.from_dict(entry, protocol, str(path)) for name, entry in data["files"].items()
                if data["contents"][name] == contents.get(name)}


def best(finished: Sequence[Step], reference: Step, latency: Mapping[str, Measurement], max_drop: float) -> Step | None:
    """The best step that keeps the limit; None if there is none.

    It is the most accurate of those whose 90 % interval of latency overlaps that of the fastest.
    """
    keeping = [step for step in finished if step.keeps(reference, max_drop)]
    if not keeping:
        return None
    fastest = min((latency[step.name] for step in keeping), key=lambda measurement: measurement.latency_ms)
    as_fast = [step for step in keeping if latency[step.name].latency_ms_low <= fastest.latency_ms_high]
    return max(as_fast, key=lambda step: step.right.sum())


def nearest(finished: Sequence[Step], reference: Step) -> Step | None:
    """The step that loses least accuracy; the first of equals. None when every step failed."""
    whole = [step for step in finished if not step.error]
    return min(whole, key=lambda step: step.drop(reference)[0]) if whole else None


def rows(finished: Sequence[Step], reference: Step, latency: Mapping[str, Measurement], max_drop: float
         ) -> list[dict[str, Any]]:
    """Rows of `table.csv`, the reference first: top-1 as a fraction, drops in points, latency in ms."""
    fp32_ms = latency[REFERENCE].latency_ms
    table = []
    for step in (reference, *finished):
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


def write_results(steps: Steps, finished: Sequence[Step], latency: Mapping[str, Measurement]) -> dict[str, Any]:
    """Write table, summary and, if a step keeps the limit, the int8 file with its card, and beside it the fp32 network
    that it was made of; otherwise earlier ones are removed.

    QuantizeError when every step failed.
    """
    job, limit = steps.job, steps.job.options.max_drop
    table = rows(finished, steps.reference, latency, limit)
    write_atomic(job.table, table_csv(table))
    chosen = best(finished, steps.reference, latency, limit)
    told = chosen or nearest(finished, steps.reference)
    deployed, beside = job.folder.int8, _source_files(job)
    own = deployed_of(deployed, job.target.runtime)
    job.summary.unlink(missing_ok=True)  # an earlier summary may describe another limit
    if chosen is None:
        for path in (deployed, own, job.folder.card, *beside):
            path.unlink(missing_ok=True)
    else:
        write_atomic(deployed, chosen.path.read_bytes())
        write_deployed(deployed, job.target)
        for path, source in beside.items():
            write_atomic(path, source.read_bytes())
    if told is None:
        raise QuantizeError(f"no int8 file of {job.source.label} could be made: {finished[0].error}")
    summary = finite({
        **COMPRESSION.header, "model": job.source.label, "keeps_limit": chosen is not None, "max_drop_points": limit,
        "file": None if chosen is None else deployed.name, "step": told.name, "what": told.what,
        **{key: value for key, value in next(row for row in table if row["name"] == told.name).items()
           if key not in ("name", "what", "file", "reason", "keeps_limit")},
        "latency_ms_fp32": latency[REFERENCE].latency_ms, "top1_validation_fp32": steps.reference.top1,
        "validation_images": len(steps.reference.right), **_on_test_images(steps, told),
        "trained": job.source.trained, "trained_on": job.source.metadata.get("dataset_fingerprint"),
        "kept_in_fp32": told.about.get("why", []), "steps": table, "target": job.target.name, "identity": job.identity,
        "host": job.device.host.name, "runtime": job.runtime.version(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}})
    write_atomic(job.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    files = () if chosen is None else (deployed, own, *beside)
    if chosen is not None:
        write_atomic(job.folder.card, card(job, summary))
    Manifest.write(job.folder.path, files, hashlib.sha256(json.dumps(dict(job.identity)).encode()).hexdigest()[:16])
    return dict(summary)


def _source_files(job: CompressJob) -> dict[Path, Path]:
    """The files that describe the fp32 network, by what they are called in the result's folder; none of a bare file."""
    source = ModelFolder(job.source.path.parent)
    files = (source.architecture, source.baseline, source.weights, source.onnx)
    return {job.folder.path / path.name: path for path in files if path.is_file()} if job.source.tunable else {}


def card(job: CompressJob, summary: Mapping[str, Any]) -> str:
    """Text of `card.md`."""
    source, data = job.source, job.dataset
    network = read_network(ModelFolder(source.path.parent), Shape(source.shape[0], source.shape[1], source.classes)) \
        if source.tunable else None
    known = {key: summary[key] for key in ("top1_test", "top1_test_low", "top1_test_high", "top1_test_fp32", "n_test",
                                           "latency_ms", "latency_ms_low", "latency_ms_high", "int8_share", "host")}
    known |= {"verified": True, "target": job.target.name, "precision": "int8"}
    name = name_of(source.label)
    row = FrontRow(id=name, name=name, architecture="", is_baseline=False, **known) if network is None else \
        FrontRow.of(network, **known)
    given = Input(data.name, data.channels, data.image_size, data.mean, data.std, data.task, data.preparation)
    before = f"{source.trained}, then " if source.trained else ""
    tuned = "; `weights.safetensors` and `model.onnx` are those before the fine-tuning" * ("qat" in summary["step"])
    return card_text(row, given, job.target, date=day_of(job.summary), runtime=str(summary["runtime"]),
                     recipe=f"From `{source.label}`: {before}int8 ({summary['what']}){tuned}.")


def _on_test_images(steps: Steps, told: Step) -> dict[str, Any]:
    """Test top-1 of the reported file and of the fp32 network, with the paired interval of the drop.

    The test images are used only here: they chose no step.
    """
    test, job = steps.job.dataset.test, steps.job
    fp32, _ = steps.right(job.source.path, REFERENCE, test)
    try:
        int8, _ = steps.right(told.path, "int8", test)
    except CandidateError as error:
        raise QuantizeError(f"{told.path} no longer runs: {error}") from error
    low, high = wilson(int(int8.sum()), len(int8))
    drop, drop_low, drop_high = points_lost(fp32, int8)
    return {"top1_test": float(int8.mean()), "top1_test_low": low, "top1_test_high": high,
            "top1_test_fp32": float(fp32.mean()), "test_drop_points": drop, "test_drop_points_low": drop_low,
            "test_drop_points_high": drop_high, "n_test": len(test)}


def sentence(summary: Mapping[str, Any], job: CompressJob) -> str:
    """The result as one line."""
    test = (f"test {summary['top1_test']:.2%}, drop {summary['test_drop_points']:.2f} (95 %: "
            f"{summary['test_drop_points_low']:.2f} to {summary['test_drop_points_high']:.2f}) on {summary['n_test']} "
            "images")
    facts = (f"{summary['step']}, drop {summary['drop_points']:.2f} points on {summary['validation_images']} "
             f"validation images; {test}; {summary['latency_ms']:.4g} ms, {summary['speedup']:.2f} times fp32's speed")
    if not summary["keeps_limit"]:
        return (f"no step keeps the limit of {summary['max_drop_points']:g} points, so that no int8 file is written. "
                f"Nearest: {facts} ({job.steps / summary['step']}.onnx). Raise max_drop, or train a wider network.")
    kept = summary["kept_in_fp32"]
    fp32 = f"; in fp32: {', '.join(entry['node'] for entry in kept)}" if kept else ""
    return f"{facts}{fp32}: {deployed_of(job.folder.int8, job.target.runtime)}"


def printed(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table for a terminal, one line for each step."""
    head = ("step", "validation", "drop", "95 %", "latency ms", "speed", "int8", "fp32 nodes", "")
    return text_table([head, *(_format_row(row) for row in table)], words=(0, len(head) - 1))


def _format_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    if row["reason"]:
        return (str(row["name"]), *[UNKNOWN] * 7, f"failed: {row['reason']}")
    share, ms = row["int8_share"], row["latency_ms"]
    times = (UNKNOWN, UNKNOWN) if ms is None else (f"{ms:.4g}", f"{row['speedup']:.2f}×")
    return (str(row["name"]), f"{row['top1_validation']:.2%}", f"{row['drop_points']:+.2f}",
            f"{row['drop_points_low']:+.2f} to {row['drop_points_high']:+.2f}", *times,
            number(share, ".0%"), str(row["fp32_nodes"]),
            "" if row["name"] == REFERENCE else "keeps the limit" if row["keeps_limit"] else "")
