"""Bias correction: what quantisation shifts a layer's output by on average is taken off its bias, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hwnas.networks.qdq import Graph, Range, quantised_nodes
from hwnas.networks.quantize import TunedFor, quantise_graph, session_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

_BATCH = 32
Progress = Callable[[float], None]


def corrected(proto: ModelProto, ranges: Mapping[str, Range], images: NDArray[np.float32], *, tuned_for: TunedFor,
              threads: int, progress: Progress) -> ModelProto:
    """A copy of an fp32 network whose biases make up for its quantisation with `ranges`.

    Each layer's mean output per channel over `images` becomes the fp32 network's; those before it are corrected first,
    so that what they still pass on is made up for too (the empirical correction of Nagel et al., Data-Free
    Quantization Through Weight Equalization and Bias Correction, ICCV 2019, section 4.2 and appendix D).
    """
    found = copied(proto)
    names = [node.name for node in quantised_nodes(Graph(found))]
    nodes = {node.name: node for node in found.graph.node}
    outputs = [nodes[name].output[0] for name in names]
    wanted = dict(zip(outputs, _means(proto, outputs, images, threads), strict=True))
    for index, name in enumerate(names):
        int8 = copied(found)
        quantise_graph(int8, ranges, note="", tuned_for=tuned_for)
        output = nodes[name].output[0]
        got, = _means(_up_to(int8, output), [output], images, threads)
        _add_to_bias(found, nodes[name], wanted[output] - got)
        progress((index + 1) / len(names))
    return found


def copied(proto: ModelProto) -> ModelProto:
    """A network of its own, equal to this one."""
    found = type(proto)()
    found.CopyFrom(proto)
    return found


def _up_to(proto: ModelProto, output: str) -> ModelProto:
    """The network without the nodes that `output` does not depend on, in place."""
    producer = {name: node for node in proto.graph.node for name in node.output}
    needed, waiting = set(), [output]
    while waiting:
        node = producer.get(waiting.pop())
        if node is not None and node.name not in needed:
            needed.add(node.name)
            waiting.extend(node.input)
    kept = [node for node in proto.graph.node if node.name in needed]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    return proto


def _means(proto: ModelProto, outputs: list[str], images: NDArray[np.float32], threads: int
           ) -> list[NDArray[np.float64]]:
    """Mean of each tensor [n, c, ...] per channel."""
    session, input_name = session_of(proto, outputs, threads)
    totals: list[NDArray[np.float64]] = [np.zeros(1) for _ in outputs]
    for start in range(0, len(images), _BATCH):
        batch = np.ascontiguousarray(images[start : start + _BATCH])
        for index, values in enumerate(session.run(outputs, {input_name: batch})):
            means = values.reshape(*values.shape[:2], -1).mean(2, dtype=np.float64)
            totals[index] = totals[index] + means.sum(0)
    return [total / len(images) for total in totals]


def _add_to_bias(proto: ModelProto, node: NodeProto, shift: NDArray[np.float64]) -> None:
    """Give a node a corrected bias of its own: equal biases share one tensor. One that is computed stays."""
    from onnx import numpy_helper

    weights = {weight.name: weight for weight in proto.graph.initializer}
    if len(node.input) > 2:
        if node.input[2] not in weights:
            return
        shift = shift + numpy_helper.to_array(weights[node.input[2]])
    name = f"{node.name}/bias_corrected"
    proto.graph.initializer.append(numpy_helper.from_array(shift.astype(np.float32), name))
    del node.input[2:]
    node.input.append(name)
