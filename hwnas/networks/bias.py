"""Correct the biases of an int8 graph: rounding and clipping shift the mean output of a layer, and its bias undoes it.

The correction is the empirical one of Nagel et al., Data-Free Quantization Through Weight Equalization and Bias
Correction (ICCV 2019, arXiv 1906.04721). But each layer reads the fp32 network's values, so one pass serves all layers,
whichever of them stay in fp32. Layers are convolutions and Gemm nodes; the linear layers of tokens have no such bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from hwnas.lazy import onnx
from hwnas.networks.qdq import Graph
from hwnas.networks.running import session_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

_LAYERS = ("Conv", "Gemm")
_AT_ONCE = 8  # images: ONNX Runtime holds the outputs of all layers of a batch


def find_mean_errors(int8: ModelProto, fp32: ModelProto, images: NDArray[np.float32], threads: int
                     ) -> dict[str, NDArray[np.float64]]:
    """Return by how much the mean output of each layer falls short of fp32's, for each output channel, by layer name.

    Args:
        int8: The graph that `qdq.insert_pairs` made of `fp32`. Only layers whose bias it quantised count.
        fp32: The graph that it was made of.
        images: Normalised training images [n, c, h, w] over which the means are taken.
        threads: The number of threads of ONNX Runtime.
    """
    graph, names_before = Graph(int8), {weight.name for weight in fp32.graph.initializer}
    layers = [node for node in int8.graph.node if _is_corrected(node, graph)]
    if not layers:
        return {}
    # 1. A graph of fp32's nodes, with the int8 layer beside each: it reads the same values, through its own pair.
    both = deepcopy(fp32)
    both.graph.initializer.extend(weight for weight in int8.graph.initializer if weight.name not in names_before)
    by_name, names = {node.name: node for node in fp32.graph.node}, []
    for layer in layers:
        nodes, name = _nodes_beside(graph, layer, by_name[layer.name])
        both.graph.node.extend(nodes)
        names.append(name)
    # 2. The mean error of each output channel, over all images and the pixels of a map. A layer may have more rows than
    # there are images.
    run, _ = session_of(both, names, threads)
    sums, counts = [0.0] * len(names), [0] * len(names)
    for start in range(0, len(images), _AT_ONCE):
        for at, part in enumerate(run(images[start:start + _AT_ONCE])):
            sums[at] += part.reshape(*part.shape[:2]).sum(0, dtype=float)
            counts[at] += len(part)
    return {layer.name: np.asarray(total / n) for layer, total, n in zip(layers, sums, counts, strict=True)}


def shift_biases(int8: ModelProto, errors: Mapping[str, NDArray[np.float64]]) -> None:
    """Add mean errors to the biases of an int8 graph, in place and in whole steps of their scales. A layer that is in
    fp32 there is left out."""
    graph, limit = Graph(int8), np.iinfo(np.int32)
    for node in int8.graph.node:
        if node.name in errors and _is_corrected(node, graph):
            name, scale = graph.producer[node.input[2]].input[:2]
            shift = np.rint(errors[node.name] / onnx.numpy_helper.to_array(graph.weights[scale]))
            bias = np.clip(onnx.numpy_helper.to_array(graph.weights[name]) + shift, limit.min, limit.max)
            graph.weights[name].CopyFrom(onnx.numpy_helper.from_array(bias.astype(np.int32), name))


def _is_corrected(node: NodeProto, graph: Graph) -> bool:
    return node.op_type in _LAYERS and len(node.input) > 2 and graph.kind(node.input[2]) == "DequantizeLinear"


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
