"""The task of a child with limited memory: prepare networks (build, export, quantise, compile, run), or time them.

Each prepared pair of network and target adds a line to a journal. An ended process loses only the pair at work.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwnas.errors import CandidateError, FileError, HwnasError, one_line
from hwnas.latency.copies import TimedFile, bind_copies
from hwnas.latency.harness import time_calls
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import image_shape, prepare_network, prepare_untrained, reference_network
from hwnas.latency.wave import Wave
from hwnas.networks.baselines import Baseline
from hwnas.networks.quantize import quantize_static, tuning_of
from hwnas.networks.weights import import_timm
from hwnas.runtimes.child import Progress
from hwnas.runtimes.runtime import FP32, Runtime, load_runtime
from hwnas.target import Target

JOURNAL = "journal.jsonl"
CLASSES = 1000  # of ImageNet


def run(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> Any:
    """Prepare the `pairs` of a job, or time its `files`. Both name a deployment by its place in `targets`. `path` is
    the file of the reference, in the folder of all files."""
    targets = [Target(**each) for each in job["targets"]]
    return time_files(job, targets, progress) if "files" in job else prepare(job, targets, progress)


def prepare(job: Mapping[str, Any], targets: Sequence[Target], progress: Progress) -> None:
    """Prepare pairs, each of name, image size and place in `targets`, until the `seconds` of the job are over."""
    end, folder = time.monotonic() + job["seconds"], Path(job["path"]).parent
    if not Path(job["path"]).exists():
        prepare_network(reference_network(), FP32, folder)
    broken: dict[tuple[str, int], str] = {}  # networks that cannot be exported, for any deployment
    with open(job["journal"], "a", encoding="utf-8") as journal:
        for at, (name, size, place) in enumerate(job["pairs"]):
            if time.monotonic() > end:
                return
            progress(0.0, f"prepare {name} at {size} px for {targets[place].name}")
            # The file's name is the seed of its weights.
            fp32 = folder / f"{hashlib.sha256(f'{name}@{size}'.encode()).hexdigest()[:8]}.onnx"
            try:
                if (name, size) in broken:
                    raise CandidateError(broken[name, size])
                if not fp32.exists():
                    prepare_untrained(Baseline(name).build(3, CLASSES, size), fp32.stem, (3, size, size), FP32, folder)
                line = _compile(fp32, targets[place], size)
            except FileError as error:
                line = {"reason": error.fact}
            except (HwnasError, MemoryError, RuntimeError) as error:  # the last is torch's own, if memory runs out
                line = {"reason": one_line(error)}
                if not fp32.exists():
                    broken[name, size] = line["reason"]
            print(json.dumps({"at": at, "place": place, **line}, default=str), file=journal, flush=True)


def _compile(fp32: Path, target: Target, size: int) -> dict[str, Any]:
    """Return the file that is timed: its path, its compiled form, the shape of an image, and about how long a call
    takes (`ms`)."""
    path = fp32
    if target.precision == "int8":
        path = fp32.with_name(f"{fp32.stem}_{tuning_of(target)}.onnx")
        if not path.exists():
            quantize_static(fp32, path, None, tuned_for=tuning_of(target))
    file = TimedFile(path, target, (3, size, size))
    if (save := getattr(load_runtime(target.runtime), "save_compiled", None)) is not None:
        file = replace(file, compiled=save(path, target, path.with_name(f"{path.stem}_{target.name}.blob")))
    call, = bind_copies(file, 1)
    return {"path": file.path, "compiled": file.compiled, "shape": file.shape, "ms": time_calls(call, 2)[1]}


def time_files(job: Mapping[str, Any], targets: Sequence[Target], progress: Progress) -> dict[str, Any]:
    """Time the files of a job, all in the same rounds beside the reference. Return raw samples by id."""
    files, network = {}, reference_network()
    for file in job["files"]:
        compiled = file["compiled"] and Path(file["compiled"])
        files[file["id"]] = TimedFile(Path(file["path"]), targets[file["place"]], tuple(file["shape"]), compiled)
    beside = replace(FP32, threads=targets[job["files"][0]["place"]].threads, batch=1)
    reference = TimedFile(Path(job["path"]), beside, image_shape(network))
    wave = Wave(files, reference, network.id, Protocol.from_dict(job["protocol"]), job["seed"])
    measurements, failed = wave.time(progress)
    if failed:
        raise CandidateError(next(iter(failed.values())))
    return {id: measurement.to_dict() for id, measurement in measurements.items()}


if __name__ == "__main__":
    from hwnas.runtimes.child import serve

    if "pairs" in json.loads(sys.argv[1]):
        import_timm()  # before the memory limit, which is for the networks alone
    sys.exit(serve(run))
