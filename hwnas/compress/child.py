"""Checks the ONNX file of a network before it is compressed, in a limited child process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.compress.job import metadata_of
from hwnas.errors import CandidateError, ModelError
from hwnas.networks.quantize import load_fp32, name_nodes
from hwnas.runtimes.child import Progress, serve
from hwnas.runtimes.foreign import check_path, input_of, load_checked, sized
from hwnas.runtimes.runtime import one_line
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    from hwnas.runtimes.runtime import Runtime
    from hwnas.target import Target

_IMAGES = 2


def check(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> dict[str, Any]:
    """Write a copy with fixed image axes, a free batch axis and named nodes to `job["copy"]`, and run it once in fp32.

    Without a `copy`, the file itself must have all that, and is run as it is.
    ModelError for a file that is torn, hostile, quantised, or no classifier of images.
    """
    import onnx

    label, path = job["label"], Path(job["path"])
    check_path(path, job["memory_mb"])
    proto = load_checked(path)
    model_input = input_of(proto, label)
    shape = sized(model_input, label, None, job["image_size"], size_option="dataset.image_size")
    if len(shape) != 3:
        raise ModelError(f"{label} takes inputs of {len(shape)} axes; images [channels, height, width] are expected.")
    if model_input.shape[0] is not None:
        raise ModelError(f"{label}: the batch axis of input {model_input.name!r} is fixed to {model_input.shape[0]}. "
                         "Export it with a dynamic batch axis.")
    if job["copy"] is None:
        return _answers(path, label, shape, target, runtime) | {"metadata": metadata_of(proto)}
    axes = next(value for value in proto.graph.input if value.name == model_input.name).type.tensor_type.shape.dim
    axes[0].dim_param = "batch"
    for axis, size in zip(axes[1:], shape, strict=True):
        axis.dim_value = size
    del proto.graph.value_info[:]  # it may contain the open axes; runtimes infer it again
    name_nodes(proto)
    try:
        onnx.load_external_data_for_model(proto, str(path.parent))
        write_atomic(job["copy"], proto.SerializeToString())
    except (ValueError, OSError, onnx.checker.ValidationError) as error:
        raise ModelError(f"{label} cannot be copied: {one_line(error)}. Export it again.") from None
    return _answers(job["copy"], label, shape, target, runtime) | {"metadata": metadata_of(proto)}


def _answers(path: str | Path, label: str, shape: Sequence[int], target: Target, runtime: Runtime) -> dict[str, Any]:
    """Run a file once in fp32: the shape of its images and its number of classes."""
    try:
        load_fp32(path, label)
        compiled = runtime.compile(path, replace(target, precision="fp32"))
        logits = compiled.logits(np.zeros((_IMAGES, *shape), np.float32))
    except CandidateError as error:
        raise ModelError(str(error)) from None
    if logits.ndim != 2 or len(logits) != _IMAGES:
        raise ModelError(f"{label} answers {list(logits.shape)} to a batch of {_IMAGES}; [batch, classes] is expected. "
                         "Give a classifier.")
    return {"shape": list(shape), "classes": logits.shape[1]}


if __name__ == "__main__":
    sys.exit(serve(check))
