"""Choose the places of QuantizeLinear/DequantizeLinear pairs in an fp32 ONNX graph, and put the pairs there.

The recipe and the timings behind it: docs/decisions/qdq-recipe.md. Activations are uint8 (asymmetric; zero point 0 if
nothing is negative), weights int8 per output channel (symmetric), biases int32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import QuantizeError
from hwnas.lazy import onnx

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto, TensorProto

Range = tuple[float, float]

_CLAMPS = ("Relu", "Clip")
# Operators that pass values unchanged: input and output share one range.
_MOVES = ("MaxPool", "Flatten", "Reshape", "Resize", "Identity")
_GATES = ("Sigmoid", "HardSigmoid")
_POOLS = ("GlobalAveragePool", "AveragePool", "MaxPool")
_LEVELS = 255
_NEARLY = 1e-5  # the most by which a constant in a file may differ from the number that is meant


@dataclass(slots=True)
class Graph:
    """An ONNX graph with its edges indexed by tensor name."""

    proto: ModelProto
    weights: dict[str, TensorProto] = field(init=False)
    producer: dict[str, NodeProto] = field(init=False)
    consumers: dict[str, list[NodeProto]] = field(init=False)
    maps: set[str] = field(init=False)  # tensors that depend on images, and not only on the images' shape

    def __post_init__(self) -> None:
        graph = self.proto.graph
        self.weights = {weight.name: weight for weight in graph.initializer}
        self.producer = {name: node for node in graph.node for name in node.output}
        self.consumers = {}
        for node in graph.node:
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        self.maps = {value.name for value in graph.input} - self.weights.keys()
        for node in graph.node:
            if node.op_type != "Shape" and self.maps.intersection(node.input):
                self.maps.update(node.output)

    def kind(self, tensor: str) -> str:
        """Return the operator that writes `tensor`; empty for inputs and weights."""
        node = self.producer.get(tensor)
        return node.op_type if node is not None else ""

    def after_activation(self, tensor: str, *, with_swish: bool) -> str:
        """Return the output of the activation that runtimes fuse into a convolution with output `tensor`, or `tensor`
        if there is none. `with_swish`: swish, hard-swish and GELU count, too."""
        readers = self.consumers.get(tensor, [])
        kinds = sorted(reader.op_type for reader in readers)
        if kinds in (["Relu"], ["Clip"]) or (with_swish and kinds == ["HardSwish"]):
            return str(readers[0].output[0])
        if with_swish and kinds == ["Mul", "Sigmoid"]:
            gated = next(reader for reader in readers if reader.op_type == "Mul")
            return str(gated.output[0])
        if with_swish and kinds == ["Div", "Mul"] and self.gelu_of(tensor):
            return self.gelu_of(tensor)
        return tensor

    def gelu_of(self, tensor: str) -> str:
        """Return the output of a GELU of `tensor` as torch exports it, x · (erf(x / √2) + 1) · 0.5; empty for none."""
        following = [tensor]  # what each node of the chain writes
        for kind, number in (("Div", 2**0.5), ("Erf", None), ("Add", 1.0), ("Mul", None), ("Mul", 0.5)):
            readers = [reader for reader in self.consumers.get(following[-1], []) if reader.op_type == kind]
            if not readers or (number is not None and not self._takes(readers[0], number)):
                return ""
            following.append(str(readers[0].output[0]))
        gated, erf = self.producer[following[4]], self.producer[following[2]].op_type
        return following[5] if tensor in gated.input and erf == "Erf" else ""

    def _takes(self, node: NodeProto, number: float) -> bool:
        """Return whether one input of a node is this number; of a Div, the divisor."""
        names = node.input[1:] if node.op_type == "Div" else node.input
        values = [self.constant(name) for name in names
                  if name in self.weights or self.kind(name) == "Constant"]
        return any(value is not None and value.size == 1 and abs(float(value.reshape(())) - number) < _NEARLY
                   for value in values)

    def adds_maps(self, node: NodeProto) -> bool:
        """Return whether `node` adds two maps, as residuals do, and not a map and a constant. Sums in a transformer's
        stream, of which a layer norm reads an input or the result, do not count: a few values there are so large that
        the others vanish in 255 steps."""
        return node.op_type == "Add" and self.maps.issuperset(node.input) and not any(
            reader.op_type == "LayerNormalization" or (  # before opset 17 it begins with a map less its mean
                reader.op_type == "Sub" and self.kind(reader.input[1]) == "ReduceMean")
            for name in (*node.input, node.output[0]) for reader in self.consumers.get(name, []))

    def multiplies_maps(self, node: NodeProto) -> bool:
        """Return whether `node` multiplies two maps or a map and its gate; not by a constant, nor in a GELU or gate."""
        if node.op_type != "Mul" or any(
                name in self.weights or self.kind(name) in ("Constant", "Add") for name in node.input):
            return False
        writer = self.producer.get(self.before_activation(node.output[0]))
        return writer is None or writer.op_type != "Conv" or not self.is_gate(writer)

    def before_activation(self, tensor: str) -> str:
        """Return the input of the activation that wrote `tensor`; `tensor` itself if no activation wrote it."""
        node = self.producer.get(tensor)
        if node is not None and node.op_type in (*_CLAMPS, "HardSwish"):
            return str(node.input[0])
        if node is not None and node.op_type == "Mul" and self.kind(node.input[1]) == "Sigmoid":
            gate_input = str(self.producer[node.input[1]].input[0])
            return gate_input if gate_input == node.input[0] else tensor
        return tensor

    def is_gate(self, node: NodeProto) -> bool:
        """Return whether `node` is one of a squeeze-and-excite's two convolutions, which read a map's mean."""
        for _ in range(2):
            tensor = self.before_activation(node.input[0])
            if self.kind(tensor) != "Conv":
                return self.kind(tensor) == "ReduceMean"
            node = self.producer[tensor]
        return False

    def read_only_by(self, tensor: str, nodes: Collection[str]) -> bool:
        """Return whether `tensor` has readers and all of them are named in `nodes`."""
        readers = self.consumers.get(tensor, [])
        return bool(readers) and all(reader.name in nodes for reader in readers)

    def non_negative(self, tensor: str) -> bool:
        """Return whether the graph alone shows that no value of `tensor` can be below 0."""
        node = self.producer.get(tensor)
        if node is None:
            return False
        if node.op_type in ("Relu", *_GATES):
            return True
        if node.op_type == "Clip" and len(node.input) > 1:
            made_by = self.producer.get(node.input[1])  # a foreign file may compute it: not followed
            low = self.constant(node.input[1]) if made_by is None or made_by.op_type == "Constant" else None
            return low is not None and float(low) >= 0
        if node.op_type in (*_MOVES, "GlobalAveragePool", "AveragePool", "ReduceMean"):
            return self.non_negative(node.input[0])
        return node.op_type in ("Mul", "Add") and all(self.non_negative(name) for name in node.input)

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return the value of a tensor that depends only on constants; None if images or their shapes decide it."""
        if name in self.weights:
            return onnx.numpy_helper.to_array(self.weights[name])
        node = self.producer.get(name)
        if node is None:
            return None
        feeds = {}
        for each in filter(None, node.input):
            feeds[each] = self.constant(each)
            if feeds[each] is None:
                return None
        results: Any = onnx.reference.ReferenceEvaluator(node).run(None, feeds)
        return np.asarray(results[list(node.output).index(name)])


def quantised_nodes(graph: Graph, kept: Collection[str] = ()) -> list[NodeProto]:
    """Return all convolutions and linear layers that are quantised. Nodes named in `kept` stay in fp32, and so do the
    convolutions of squeeze-and-excite (tiny, and slower in int8). So do layers that read no image, as encodings of
    positions do: runtimes then compute them once, and OpenVINO cannot compile such a convolution in int8. Raises
    QuantizeError if none is left."""
    nodes = [node for node in graph.proto.graph.node
             if (_is_linear(node, graph) or (node.op_type == "Conv" and not graph.is_gate(node)))
             and node.input[0] in graph.maps and node.input[1] in graph.weights and node.name not in kept]
    if not nodes:
        raise QuantizeError("the network has no convolution or linear layer to quantise.")
    return nodes


def _is_linear(node: NodeProto, graph: Graph) -> bool:
    """Return whether it is a linear layer as torch writes it: weights [out, in] for vectors, [in, out] for tokens."""
    if node.op_type == "MatMul":
        return node.input[1] in graph.weights and len(graph.weights[node.input[1]].dims) == 2
    return node.op_type == "Gemm" and any(entry.name == "transB" and entry.i for entry in node.attribute)


def quantised_tensors(graph: Graph, tuned_for: str, kept: Collection[str] = ()) -> list[str]:
    """Return the activations that get a pair: inputs and outputs of quantised nodes, both inputs of residual sums, and
    inputs of poolings. A tensor that only nodes of `kept` read gets no pair for them.

    Runtimes differ around swish, hard-swish and GELU. OpenVINO fuses convolution and activation only without a pair
    between them; ONNX Runtime and LiteRT run the convolution in int8 only with one. LiteRT's operators read and write
    one precision: it also needs pairs on gates, products of maps, outputs of poolings, and the logits.
    """
    names, inputs = dict[str, None](), {node.input[0] for node in quantised_nodes(graph, kept)}
    with_swish = tuned_for == "openvino"
    # Inputs of quantised nodes, and outputs of convolutions behind their activation.
    for node in quantised_nodes(graph, kept):
        names[node.input[0]] = None
        if node.op_type == "Conv":
            conv_outputs = [graph.after_activation(node.output[0], with_swish=with_swish)]
            conv_outputs += [] if with_swish else [graph.after_activation(node.output[0], with_swish=True)]
            names.update(dict.fromkeys(name for name in conv_outputs if not graph.read_only_by(name, kept)))
    for node in graph.proto.graph.node:
        if graph.adds_maps(node):
            names.update(dict.fromkeys(node.input))
        elif node.op_type in _POOLS and node.name not in kept:
            names[node.input[0]] = None
    if tuned_for == "litert":
        names.update(dict.fromkeys(_in_one_precision(graph, kept)))
        return [name for name in names if name not in graph.weights]
    # The network's outputs stay in fp32, unless a quantised node reads one of them.
    outputs = {value.name for value in graph.proto.graph.output if value.name not in inputs}
    return [name for name in names if name not in outputs and name not in graph.weights]


def _in_one_precision(graph: Graph, kept: Collection[str]) -> Iterator[str]:
    """Yield the other tensors that need a pair for LiteRT, whose operators read and write one precision."""
    for node in quantised_nodes(graph, kept):
        yield graph.after_activation(node.output[0], with_swish=False)
    for node in graph.proto.graph.node:
        if node.name in kept or graph.read_only_by(node.output[0], kept):
            continue
        if graph.multiplies_maps(node) or (node.op_type == "Concat" and graph.maps.issuperset(node.input)):
            yield from (*node.input, node.output[0])
        elif graph.adds_maps(node) or node.op_type == "ReduceMean":
            yield from (node.input[0], graph.after_activation(node.output[0], with_swish=False))
        elif node.op_type in _POOLS:
            yield node.output[0]


def head_nodes(graph: Graph) -> tuple[str, ...]:
    """Return the names of the last global pooling and of the quantised nodes behind it: little work, on values that
    decide the answer. A transformer has no such pooling, and its last layer norm takes its place."""
    nodes = list(graph.proto.graph.node)
    places = {node.op_type: index for index, node in enumerate(nodes)}  # of the last node of each kind
    first = places.get("GlobalAveragePool", places.get("LayerNormalization", -1))
    if first < 0 or ("GlobalAveragePool" not in places and places.get("Conv", -1) > first):  # no transformer
        return ()
    names_behind = {node.name for node in nodes[first:]}
    return (nodes[first].name, *(node.name for node in quantised_nodes(graph) if node.name in names_behind))


def range_source(graph: Graph, tensor: str) -> str:
    """Return the tensor whose range `tensor` shares: itself, or the tensor of which it is only a rearrangement."""
    while graph.kind(tensor) in _MOVES:
        tensor = graph.producer[tensor].input[0]
    return tensor


def largest_weight(narrow: bool) -> int:
    """Return the largest integer that an int8 weight may be: 127, or 64 for `narrow` weights, so that the sum of two
    products with uint8 fits in 16 bits."""
    return 64 if narrow else 127


def insert_pairs(graph: Graph, ranges: Mapping[str, Range], *, kept: Collection[str] = (), narrow: bool = False
                 ) -> None:
    """Rewrite the graph in place: a pair on every tensor of `ranges`, and quantised weights and biases.

    Nodes named in `kept` read and compute in fp32. Weights have a scale for each output channel; `narrow`: see
    `largest_weight`. The structure depends on the names in `ranges`, never on the values.
    """
    inserter = _Inserter(graph, {name: scale_of(low, high) for name, (low, high) in ranges.items()},
                         largest_weight(narrow))
    inputs = {value.name for value in graph.proto.graph.input}
    results = {value.name for value in graph.proto.graph.output}
    nodes = [pair for name in ranges if name in inputs for pair in inserter.pair(name)]
    quantised = {node.name for node in quantised_nodes(graph, kept)}
    for node in graph.proto.graph.node:
        if node.name in quantised:
            nodes += inserter.weights(node)
        for index, name in enumerate(node.input):
            if name in ranges and node.name not in kept:
                node.input[index] = name if name in results else f"{name}_dequantised"
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in ranges and name in results:  # the network's output keeps its name: the pair writes it
                node.output[index] = f"{name}_computed"
            if name in ranges:
                nodes += inserter.pair(name, node.output[index], name if name in results else "")
    # Only the weights that are still read stay.
    names_read = {name for node in nodes for name in node.input}
    kept = [weight for weight in graph.proto.graph.initializer if weight.name in names_read]
    kept += [onnx.numpy_helper.from_array(array, name) for name, array in inserter.constants.items()]
    del graph.proto.graph.node[:], graph.proto.graph.initializer[:]
    graph.proto.graph.node.extend(nodes)
    graph.proto.graph.initializer.extend(kept)
    del graph.proto.graph.value_info[:]


@dataclass(slots=True)
class _Inserter:
    graph: Graph
    scales: dict[str, tuple[float, int]]
    largest: int
    constants: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def pair(self, name: str, read: str = "", written: str = "") -> Iterator[NodeProto]:
        """Yield the pair of the activation `name`. It reads `read` instead and writes `written`, if these are given."""
        scale, zero_point = self.scales[name]
        parameters = [self._add(f"{name}_scale", np.float32(scale)),
                      self._add(f"{name}_zero", np.uint8(zero_point))]
        yield onnx.helper.make_node("QuantizeLinear", [read or name, *parameters], [f"{name}_quantised"],
                                    name=f"{name}_QuantizeLinear")
        yield onnx.helper.make_node("DequantizeLinear", [f"{name}_quantised", *parameters],
                                    [written or f"{name}_dequantised"], name=f"{name}_DequantizeLinear")

    def weights(self, node: NodeProto) -> Iterator[NodeProto]:
        """Yield the nodes of quantised weights and bias; the bias has the scale of the int32 sums, input × weight."""
        weight = onnx.numpy_helper.to_array(self.graph.weights[node.input[1]])
        outputs_last = node.op_type == "MatMul"
        weight = weight.T if outputs_last else weight
        input_scale = self.scales[node.input[0]][0]
        bias = None
        if len(node.input) > 2 and node.input[2] in self.graph.weights:
            bias = onnx.numpy_helper.to_array(self.graph.weights[node.input[2]]).reshape(-1)  # [1, n] in some files
        # One scale per output channel, so that its largest weight becomes the largest integer.
        scale = np.abs(weight).reshape(len(weight), -1).max(1) / self.largest
        if bias is not None:  # with tiny weights in a channel, the integers of its bias could exceed int32
            scale = np.maximum(scale, np.abs(bias) / (input_scale * 2**30))
        scale = np.maximum(scale, 1e-12).astype(np.float32)
        steps = np.rint(weight / scale.reshape(-1, *[1] * (weight.ndim - 1)))
        rounded = np.clip(steps, -self.largest, self.largest).astype(np.int8)
        yield self._constant_pair(node, 1, "weight", rounded.T if outputs_last else rounded, scale, int(outputs_last))
        if bias is not None:
            bias_scale = (scale * input_scale).astype(np.float32)
            yield self._constant_pair(node, 2, "bias", np.rint(bias / bias_scale).astype(np.int32), bias_scale)

    def _constant_pair(self, node: NodeProto, index: int, role: str, values: NDArray[np.generic],
                       scale: NDArray[np.float32], axis: int = 0) -> NodeProto:
        stem = f"{node.name}/{role}"
        inputs = [self._add(f"{stem}_quantised", values), self._add(f"{stem}_scale", scale),
                  self._add(f"{stem}_zero", np.zeros(scale.shape, values.dtype))]
        node.input[index] = f"{stem}_dequantised"
        return onnx.helper.make_node("DequantizeLinear", inputs, [f"{stem}_dequantised"],
                                     name=f"{stem}_DequantizeLinear", axis=axis)

    def _add(self, name: str, value: NDArray[np.generic] | np.generic) -> str:
        self.constants[name] = np.asarray(value)
        return name


def scale_of(low: float, high: float) -> tuple[float, int]:
    """Return scale and zero point of a uint8 tensor that spans `low`..`high`, with 0 included and exact."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max(high - low, 1e-6) / _LEVELS
    return scale, int(np.clip(round(-low / scale), 0, _LEVELS))
