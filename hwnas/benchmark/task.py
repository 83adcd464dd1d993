"""The benchmark's task, which runs in a child process: check a model file, compile it, time it by the protocol.

The child does all of it, not only a first test of the file. A model that survives one inference may still crash the
runtime in the thousandth. A process of its own is also the better place to measure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hwnas.benchmark.explain import judge_nodes
from hwnas.errors import ModelError, one_line
from hwnas.latency.copies import TimedFile
from hwnas.latency.curve import time_curve
from hwnas.latency.harness import Progress
from hwnas.lazy import onnx
from hwnas.networks.quantize import name_nodes
from hwnas.runtimes.foreign import ParsedModel, read_checked
from hwnas.runtimes.runtime import Runtime
from hwnas.system.paths import temporary_folder
from hwnas.target import Target


def run(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> dict[str, Any]:
    """Time the network of `job` (see `hwnas.benchmark`) at each batch size and number of threads.

    The result holds plain values: input, executed precisions, raw samples, and with `explain` the executed nodes.
    ModelError says what the file lacks. With `keep`, a folder, nothing is timed: the file to time is written there,
    whole, and its path is in the result. With `there`, nodes that another machine profiled are compared with the file.
    """
    if profile_path := job.get("there"):
        profile = json.loads(Path(profile_path).read_text())
        return judge_nodes(profile["nodes"], Path(job["path"]), Target(**profile["target"]))
    model, shape = read_checked(job["path"], runtime, job["memory_mb"], job["label"], batches=job["batches"],
                                channels=job["channels"], image_size=job["image_size"])
    if job.get("explain") and model.proto is None:
        raise ModelError(f"{job['label']}: explain=true takes ONNX files. Give the one that it was made of.")
    about = {"input": {"name": model.input.name, "image": list(shape)}}
    if folder_to_keep := job.get("keep"):
        return {**about, "file": str(prepare_file(model, shape, job, Path(folder_to_keep)))}
    with temporary_folder() as folder:
        progress(0.0, "compiling")
        file = prepare_file(model, shape, job, Path(folder))
        del model
        timed = time_curve(TimedFile(file, target, shape), reference_of(job["reference"], target), job, runtime,
                           progress)
        if nodes := timed.pop("nodes", None):
            timed["explanation"] = judge_nodes(nodes, file, first_of(job, target))
    return {**about, **timed}


def first_of(job: Mapping[str, Any], target: Target) -> Target:
    """Return the target with the job's first batch size and first number of threads, which is the explained one."""
    return replace(target, batch=job["batches"][0], threads=job["threads"][0])


def reference_of(path: str, target: Target) -> TimedFile:
    """Return the exported reference network as it is timed beside others."""
    shape = tuple(axis.dim_value for axis in onnx.load(path).graph.input[0].type.tensor_type.shape.dim[1:])
    return TimedFile(Path(path), replace(target, batch=1), shape)


def prepare_file(model: ParsedModel, shape: Sequence[int], job: Mapping[str, Any], folder: Path) -> Path:
    """Return the file itself, or the path of a copy with fixed axes and the batch axis named as runtimes expect. An
    ONNX file to `keep` is always copied, so that it needs no data beside it."""
    proto, model_input = model.proto, model.input
    if proto is None:
        return Path(job["path"])
    axes = next(value for value in proto.graph.input if value.name == model_input.name).type.tensor_type.shape.dim
    open_batch = model_input.shape[0] is None and axes[0].dim_param != "batch"
    if not (open_batch or None in model_input.shape[1:] or job.get("keep")):
        return Path(job["path"])
    if model_input.shape[0] is None:
        axes[0].dim_param = "batch"
    for axis, size in zip(axes[1:], shape, strict=True):
        axis.dim_value = size
    del proto.graph.value_info[:]  # it may hold the open axes; runtimes infer it again
    name_nodes(proto)
    copy = folder / "model.onnx"
    try:
        onnx.load_external_data_for_model(proto, str(Path(job["path"]).parent))
        copy.write_bytes(proto.SerializeToString())
    except (ValueError, OSError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{job['label']} cannot be copied with fixed axes: {one_line(error)}. "
                         "Export it with fixed axes.") from None
    return copy


if __name__ == "__main__":
    from hwnas.runtimes.child import serve

    sys.exit(serve(run))
