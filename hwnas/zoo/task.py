"""A limited child's task: prepare networks (build, export, quantise, compile, run once), or time prepared ones.

Each prepared pair of network and target leaves a line in a journal: what ends this process costs the pair at work only.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hwnas.errors import FileError, HwnasError, one_line
from hwnas.latency.apart import Exported
from hwnas.latency.harness import measure, time_calls
from hwnas.latency.measurement import Protocol
from hwnas.latency.probes import identify_reference
from hwnas.latency.timing import image_shape, prepare_network, prepare_untrained, reference_network
from hwnas.networks.baselines import Baseline, build_timm
from hwnas.networks.quantize import quantize_static, tuning_of
from hwnas.networks.weights import import_timm
from hwnas.runtimes.child import Progress
from hwnas.runtimes.runtime import FP32, Runtime, load_runtime
from hwnas.target import Target

JOURNAL = "journal.jsonl"
CLASSES = 1000  # of ImageNet
ERRORS = (HwnasError, MemoryError, RuntimeError)  # the last is torch's own, where memory ends


def run(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> Any:
    """Prepare the `networks` of a job, or time its `files`. `targets`: the deployments that these name by their place.
    `path`: the file of the reference, in the folder for all files."""
    targets = [Target(**each) for each in job["targets"]]
    if "files" in job:
        return time_files_of(job, targets, progress)
    return prepare(job, targets, Path(job["path"]).parent, progress)


def prepare(job: Mapping[str, Any], targets: list[Target], folder: Path, progress: Progress) -> None:
    """Prepare networks, each for the places of its targets, until the `seconds` of the job are over."""
    end = time.monotonic() + job["seconds"]
    if not Path(job["path"]).exists():
        prepare_network(reference_network(), FP32, folder)
    with open(folder / JOURNAL, "a", encoding="utf-8") as journal:
        for name, size, places in job["networks"]:
            for place, line in _lines(name, size, {place: targets[place] for place in places}, folder, progress):
                print(json.dumps({"key": f"{name}@{size}", "place": place, **line}, default=str), file=journal,
                      flush=True)
                if time.monotonic() > end:
                    return


def _lines(name: str, size: int, targets: Mapping[int, Target], folder: Path, progress: Progress
           ) -> Iterator[tuple[int, dict[str, Any]]]:
    """The place of each target, with the file that is timed there or the reason why there is none."""
    progress(0.0, f"export {name} at {size} px")
    try:
        fp32 = _export(name, size, folder)
    except ERRORS as error:
        yield from ((place, {"reason": one_line(error)}) for place in targets)
        return
    for place, target in targets.items():
        progress(0.0, f"compile {name} at {size} px for {target.name}")
        try:
            yield place, _compile(fp32, target, size)
        except ERRORS as error:
            yield place, {"reason": error.fact if isinstance(error, FileError) else one_line(error)}


def _export(name: str, size: int, folder: Path) -> Path:
    network = build_timm(Baseline(name), 3, CLASSES, size)
    id = hashlib.sha256(f"{name}@{size}".encode()).hexdigest()[:8]
    return prepare_untrained(network, id, (3, size, size), FP32, folder)


def _compile(fp32: Path, target: Target, size: int) -> dict[str, Any]:
    """The file that is timed, as an `Exported`, and how long a call takes, about (`ms`)."""
    path = fp32
    if target.precision == "int8":
        path = fp32.with_name(f"{fp32.stem}_{tuning_of(target)}.onnx")
        if not path.exists():
            quantize_static(fp32, path, None, tuned_for=tuning_of(target))
    runtime, exported = load_runtime(target.runtime), Exported("", path, None, (3, size, size))
    if (save := getattr(runtime, "save_compiled", None)) is not None:
        own = path.with_name(f"{path.stem}_{target.name}.onnx")  # what is compiled lands beside its file
        own.hardlink_to(path)
        exported = replace(exported, path=own, compiled=save(own, target))
    call, = exported.bind(runtime, target, 1)
    return {**asdict(exported), "ms": time_calls(call, 2)[1]}


def time_files_of(job: Mapping[str, Any], targets: list[Target], progress: Progress) -> dict[str, Any]:
    """Time the files of a job, all in the same rounds beside the reference; raw samples by id."""
    network, protocol = reference_network(), Protocol.from_dict(job["protocol"])
    calls = {}
    for file in job["files"]:
        own, compiled = targets[file["place"]], file["compiled"] and Path(file["compiled"])
        exported = Exported(file["id"], Path(file["path"]), compiled, tuple(file["shape"]))
        calls[exported.id] = exported.bind(load_runtime(own.runtime), own, protocol.copies)
        progress(0.0, f"compiled {len(calls)} of {len(job['files'])} files")
    beside, runs = replace(FP32, threads=own.threads, batch=1), load_runtime(FP32.runtime)
    reference = Exported(network.id, Path(job["path"]), None, image_shape(network)).bind(runs, beside, protocol.copies)
    timed = measure(calls, reference, protocol, seed=job["seed"], progress=progress, threads=beside.threads,
                    reference_id=identify_reference(beside, runs.version(), network.id))
    return {id: measurement.to_dict() for id, measurement in timed.items()}


if __name__ == "__main__":
    from hwnas.runtimes.child import serve

    if "networks" in json.loads(sys.argv[1]):
        import_timm()  # before the limit, which is for what the networks take
    sys.exit(serve(run))
