"""Correct the biases of an int8 graph: rounding and clipping shift the mean output of a layer, and its bias undoes it.

The correction is the empirical one of Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction (ICCV 2019, arXiv 1906.04721). But each layer reads the fp32 network's values, so one pass serves all layers.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from hwnas.lazy import onnx
from hwnas.networks.qdq import Graph
from hwnas.networks.running import BATCH, session_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

_LAYERS = ("Conv", "Gemm")


def correct_biases(int8: ModelProto, fp32: ModelProto, images: NDArray[np.float32], threads: int) -> None:
    """Shift the biases of an int8 graph in place, so that the mean output of each of its layers is that of fp32.

    Args:
        int8: The graph that `qdq.insert_pairs` made of `fp32`. Only biases that it quantised are shifted.
        fp32: The graph that it was made of.
        images: Normalised training images [n, c, h, w], by which the means of each output channel are taken.
        threads: The number of threads of ONNX Runtime.
    """
    graph, names_before = Graph(int8), {weight.name for weight in fp32.graph.initializer}
    layers = [node for node in int8.graph.node if node.op_type in _LAYERS and len(node.input) > 2
              and graph.kind(node.input[2]) == "DequantizeLinear"]
    if not layers:
        return
    # 1. A graph of fp32's nodes, with the int8 layer beside each: it reads the same values, through its own pair.
    both = deepcopy(fp32)
    both.graph.initializer.extend(weight for weight in int8.graph.initializer if weight.name not in names_before)
    by_name = {node.name: node for node in fp32.graph.node}
    errors = []
    for layer in layers:
        beside, error = _nodes_beside(graph, layer, by_name[layer.name])
        both.graph.node.extend(beside)
        errors.append(error)
    # 2. The mean error of each output channel over all images, and pixels of a map.
    session, input_name = session_of(both, errors, threads)
    sums = [0.0] * len(errors)
    for start in range(0, len(images), BATCH):
        batch = np.ascontiguousarray(images[start:start + BATCH], np.float32)
        parts = session.run(errors, {input_name: batch})
        sums = [total + part.reshape(*part.shape[:2]).sum(0, dtype=float)
                for total, part in zip(sums, parts, strict=True)]
    # 3. The bias takes it up, in whole steps of its own scale.
    for layer, total in zip(layers, sums, strict=True):
        name, scale = graph.producer[layer.input[2]].input[:2]
        shift = total / len(images) / onnx.numpy_helper.to_array(graph.weights[scale])
        bias = onnx.numpy_helper.to_array(graph.weights[name]) + np.rint(shift)
        limit = np.iinfo(np.int32)
        graph.weights[name].CopyFrom(onnx.numpy_helper.from_array(
            np.clip(bias, limit.min, limit.max).astype(np.int32), name))


def _nodes_beside(graph: Graph, layer: NodeProto, original: NodeProto) -> tuple[list[NodeProto], str]:
    """Return the nodes that compute an int8 layer on the inputs of the fp32 one, and the name of what is missing: the
    fp32 output less the int8 one, as means over the pixels of a map."""
    make, stem = onnx.helper.make_node, f"{layer.name}/beside"
    dequantise = graph.producer[layer.input[0]]
    quantise = graph.producer[dequantise.input[0]]
    nodes = [make("QuantizeLinear", [original.input[0], *quantise.input[1:]], [f"{stem}/quantised"]),
             make("DequantizeLinear", [f"{stem}/quantised", *dequantise.input[1:]], [f"{stem}/input"]),
             *(deepcopy(graph.producer[name]) for name in layer.input[1:])]
    own = deepcopy(layer)
    own.name, own.input[0], own.output[0] = stem, f"{stem}/input", f"{stem}/output"
    nodes += [own, make("Sub", [original.output[0], own.output[0]], [f"{stem}/error"])]
    if layer.op_type == "Conv":
        nodes.append(make("GlobalAveragePool", [f"{stem}/error"], [f"{stem}/mean_error"]))
    return nodes, str(nodes[-1].output[0])
