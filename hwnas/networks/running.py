"""Run an ONNX graph in ONNX Runtime, also for tensors inside of it."""

from __future__ import annotations

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


def session_of(proto: ModelProto, tensors: list[str], threads: int) -> tuple[Any, str]:
    """Return an ONNX Runtime session of a copy of the network whose outputs are `tensors`, and the input's name."""
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
    return session, str(session.get_inputs()[0].name)


def logits_of(proto: ModelProto, images: NDArray[np.float32], threads: int) -> NDArray[np.float64]:
    """Return the network's first output on `images`, [n, ...], as ONNX Runtime computes it."""
    output = str(proto.graph.output[0].name)
    session, input_name = session_of(proto, [output], threads)
    parts = [session.run([output], {input_name: np.ascontiguousarray(images[start : start + BATCH], np.float32)})[0]
             for start in range(0, len(images), BATCH)]
    return np.concatenate(parts).astype(np.float64)
