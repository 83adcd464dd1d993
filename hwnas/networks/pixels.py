"""A network's ONNX graph with the normalisation in front: uint8 pixels of its own size in, logits out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.data.dataset import normalise
from hwnas.errors import ModelError
from hwnas.lazy import onnx
from hwnas.networks.export import BATCH_AXIS, INPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from onnx import ModelProto

_HERE = "prepare"  # begins the names of nodes and values


def take_pixels(proto: ModelProto, channels: int, image_size: int, mean: Sequence[float], std: Sequence[float]
                ) -> list[int | str]:
    """Let a network take pixels, in place: `images` becomes uint8 [n, height, width, channels].

    Each level of each channel is looked up in a table of what training made of it, so answers are the same to the last
    bit.

    Returns:
        The shape of its input, with a name for the open axis.

    Raises:
        ModelError: The graph takes pixels already, or its input has another name.
    """
    graph = proto.graph
    if len(graph.input) != 1 or graph.input[0].name != INPUT or any(
            node.name.startswith(_HERE) for node in graph.node):
        raise ModelError(f"the network takes its preparation only once, and its input must be {INPUT!r}. Give the "
                         "model.onnx or model_int8.onnx of a model folder.")
    levels = np.repeat(np.arange(256, dtype=np.uint8)[:, None], channels, 1)
    table = normalise(levels[:, :, None, None], mean, std)[:, :, 0, 0].T.reshape(-1).astype(np.float32)
    begins = (256 * np.arange(channels, dtype=np.int32))[:, None, None]
    for name, array in (("table", table), ("begins", begins)):
        graph.initializer.append(onnx.numpy_helper.from_array(array.copy(), f"{_HERE}/{name}"))
    ours = [_node("Transpose", [INPUT], "planes", perm=[0, 3, 1, 2]),
            _node("Cast", [f"{_HERE}/planes"], "levels", to=onnx.TensorProto.INT32),
            _node("Add", [f"{_HERE}/levels", f"{_HERE}/begins"], "places"),
            _node("Gather", [f"{_HERE}/table", f"{_HERE}/places"], "images")]
    for node in graph.node:
        node.input[:] = [f"{_HERE}/images" if name == INPUT else name for name in node.input]
    nodes = [*ours, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    shape: list[int | str] = [BATCH_AXIS, image_size, image_size, channels]
    graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info(INPUT, onnx.TensorProto.UINT8, shape))
    return shape


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
    return onnx.helper.make_node(kind, inputs, [f"{_HERE}/{output}"], name=f"{_HERE}/{output}", **attributes)
