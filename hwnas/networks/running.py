"""Run an ONNX graph in ONNX Runtime, also for tensors inside of it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import QuantizeError, one_line
from hwnas.lazy import onnx
from hwnas.system.libraries import import_onnxruntime

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto

BATCH = 32  # images at once


def session_of(proto: ModelProto, tensors: list[str], threads: int
               ) -> tuple[Callable[[NDArray[np.float32]], list[NDArray[Any]]], str]:
    """Return a call that gives the values of `tensors` on images [n, ...], as ONNX Runtime computes them, and the name
    of the network's input. QuantizeError if it cannot be run, also of the call."""
    ort = import_onnxruntime()
    copy = deepcopy(proto)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in tensors)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    options.add_session_config_entry("session.x64quantprecision", "1")  # exact sums on CPUs without VNNI, too
    try:
        session = ort.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise QuantizeError(f"ONNX Runtime cannot run the fp32 network: {one_line(error)}") from error
    input_name = str(session.get_inputs()[0].name)

    def run(images: NDArray[np.float32]) -> list[NDArray[Any]]:
        try:
            return list(session.run(tensors, {input_name: np.ascontiguousarray(images, np.float32)}))
        except Exception as error:  # as above: a file may fix the number of images inside of it
            raise QuantizeError(f"ONNX Runtime cannot run the network on {len(images)} images at a time: "
                                f"{one_line(error)}") from error

    return run, input_name


def logits_of(proto: ModelProto, images: NDArray[np.float32], threads: int) -> NDArray[np.float64]:
    """Return the network's first output on `images`, [n, ...], as ONNX Runtime computes it."""
    run, _ = session_of(proto, [str(proto.graph.output[0].name)], threads)
    parts = [run(images[start : start + BATCH])[0] for start in range(0, len(images), BATCH)]
    return np.concatenate(parts).astype(np.float64)
