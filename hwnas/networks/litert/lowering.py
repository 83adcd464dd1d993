"""Write an exported ONNX network as a TFLite file: in fp32, or in int8 from its QDQ version.

Maps are [n, h, w, c] in TFLite and [n, c, h, w] in ONNX. Every value carries the order of its axes, so that a
transposition costs nothing: the next operator that needs another order asks for it. An operator runs in int8 if all its
inputs are dequantised and its output is quantised; uint8 levels become int8 levels, 128 less. All other operators run
in fp32 between DEQUANTIZE and QUANTIZE, as in ONNX.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import FileError, one_line
from hwnas.lazy import onnx
from hwnas.networks.litert.tflite import Levels, TfliteFile, schema
from hwnas.networks.qdq import Graph

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from onnx import ModelProto, NodeProto

Attributes = Mapping[str, Any]
Order = tuple[int, ...]
_MAPS: Order = (0, 2, 3, 1)  # ONNX's axes in the order of a map in TFLite
_GATE = Levels(np.asarray(1 / 256, np.float32), -128)  # the levels that LOGISTIC always writes in int8
_CLAMPS = {(0.0, math.inf): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1"}  # can be part of an operator
# ONNX's rules for the nearest pixel that are the same if a map becomes larger by a whole factor.
_NEAREST = {(b"asymmetric", b"floor"), (b"half_pixel", b"round_prefer_floor"), (b"half_pixel", b"round_prefer_ceil")}
_NAMED = 4  # the most operators that an error names
_LEAST, _MOST = {"ADD": 2.0**-10, "MUL": 2.0**-16}, 2.0**8  # input scales / output scale in XNNPACK's int8 kernels


@dataclass(frozen=True, slots=True)
class Value:
    """An activation: its shape in ONNX's axes, their order in the file, and its tensors, in fp32, in int8 or both."""

    shape: tuple[int, ...]
    order: Order
    fp32: int | None = None
    int8: int | None = None
    levels: Levels | None = None

    @property
    def laid(self) -> tuple[int, ...]:
        """The shape in the order of the file."""
        return tuple(self.shape[axis] for axis in self.order)

    @property
    def tensor(self) -> tuple[int, Levels | None]:
        """Its tensor and that tensor's levels: in int8 if there is one, otherwise in fp32 with levels None."""
        if self.int8 is not None:
            return self.int8, self.levels
        assert self.fp32 is not None
        return self.fp32, None


@dataclass(frozen=True, slots=True)
class Weight:
    """A stored tensor in ONNX's axes, and the levels that give its integers a value, or None for plain numbers."""

    array: NDArray[Any]
    levels: Levels | None = None

    @property
    def numbers(self) -> NDArray[np.float32]:
        """Its values in fp32."""
        if self.levels is None:
            return self.array.astype(np.float32)
        shape = [1] * self.array.ndim
        if self.levels.scale.size > 1:
            shape[self.levels.axis] = -1
        return np.asarray((self.array.astype(np.float32) - self.levels.zero) * self.levels.scale.reshape(shape))


class _Refused(Exception):
    """The network has a part that a TFLite file cannot express; the message names it."""


def write_tflite(onnx_path: str | os.PathLike[str], batch: int = 1) -> bytes:
    """Return the bytes of a TFLite file for an ONNX network of one image input, for batches of `batch`.

    It takes float32 [batch, h, w, c] and gives float32 logits. It has the metadata of the ONNX file, and the SHA-256 of
    that file as `onnx_sha256`. Raises FileError, which names the operators, with nodes, that cannot be written.
    """
    # 1. Read the network, and compute every shape for this batch and everything that does not depend on the images.
    try:
        content = Path(onnx_path).read_bytes()
        proto = onnx.load_model_from_string(content)
        onnx.load_external_data_for_model(proto, str(Path(onnx_path).parent))
        stored = {weight.name for weight in proto.graph.initializer}
        for value in proto.graph.input:
            if value.name not in stored:
                value.type.tensor_type.shape.dim[0].dim_value = batch
        proto = _inferred(_without_constants(_inferred(proto)))
    except Exception as error:  # a foreign file may fail in protobuf, onnx or the file system
        raise FileError(onnx_path, f"cannot be read: {one_line(error)}") from error
    # 2. Write it operator by operator. Unknown operators are found first, other unsupported parts on the way.
    if unknown := _unknown(proto):
        raise FileError(onnx_path, f"LiteRT has no operator {unknown} here.",
                        "Choose another network, or a target of another runtime.")
    about = {entry.key: entry.value for entry in proto.metadata_props}
    try:
        return _Lowering(proto).file({**about, "onnx_sha256": hashlib.sha256(content).hexdigest()})
    except _Refused as error:
        raise FileError(onnx_path, f"LiteRT cannot run {error}.",
                        "Choose another network, or a target of another runtime.") from None
    except (LookupError, TypeError, ValueError, AssertionError, StopIteration) as error:  # of a foreign file
        raise FileError(onnx_path, f"it cannot be written for LiteRT ({type(error).__name__}: "
                                   f"{one_line(error)}).",
                        "Choose another network, or a target of another runtime.") from error


def _inferred(proto: ModelProto) -> ModelProto:
    """Return the network with the shape of every value, computed anew."""
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    del proto.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)


def _without_constants(proto: ModelProto) -> ModelProto:
    """Replace every node that does not depend on the images, such as shapes of maps, by its result, in place."""
    constants = {weight.name: weight for weight in proto.graph.initializer}
    shapes = _shapes(proto)
    nodes = []
    for node in proto.graph.node:
        if node.op_type == "Shape" and not node.attribute and 0 not in shapes.get(node.input[0], (0,)):
            results: list[Any] = [np.asarray(shapes[node.input[0]], np.int64)]
        elif node.op_type.endswith("Linear") or not all(name in constants for name in node.input if name):
            nodes.append(node)
            continue
        else:
            feeds = {name: onnx.numpy_helper.to_array(constants[name]) for name in node.input if name}
            results = list(onnx.reference.ReferenceEvaluator(node).run(None, feeds))
        for name, result in zip(node.output, results, strict=True):
            constants[name] = onnx.numpy_helper.from_array(np.asarray(result), name)
            proto.graph.initializer.append(constants[name])
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def _shapes(proto: ModelProto) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's values by name; the size of an unknown axis is 0."""
    infos = [*proto.graph.input, *proto.graph.value_info, *proto.graph.output]
    return {info.name: tuple(axis.dim_value for axis in info.type.tensor_type.shape.dim) for info in infos}


def _unknown(proto: ModelProto) -> str:
    """Return text that names the first four kinds of operators that cannot be written, each with its first node; empty
    if all can."""
    first_nodes: dict[str, str] = {}
    graph = Graph(proto)
    for node in proto.graph.node:
        divided = graph.producer.get(node.input[0]) if node.op_type == "Erf" else None  # of a GELU
        if node.op_type not in _LOWERED and not (divided is not None and graph.gelu_of(divided.input[0])):
            first_nodes.setdefault(node.op_type, node.name)
    names = [f"{kind} ({name})" if name else kind for kind, name in sorted(first_nodes.items())]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if names[_NAMED:] else "")


class _Lowering:
    """One pass over the nodes in their order: ONNX guarantees that each comes after the nodes that it reads from."""

    def __init__(self, proto: ModelProto) -> None:
        self.graph = Graph(proto)
        self.made = TfliteFile()
        self.weights = {name: Weight(onnx.numpy_helper.to_array(tensor)) for name, tensor in self.graph.weights.items()}
        self.values: dict[str, Value] = {}
        self.done: set[str] = set()  # results of nodes that were written with an earlier one
        self.shapes = _shapes(proto)
        self.inputs = [info.name for info in proto.graph.input if info.name not in self.graph.weights]
        self.outputs = [info.name for info in proto.graph.output]

    def file(self, metadata: Mapping[str, str]) -> bytes:
        """Write every node, and return the bytes of the file."""
        ends = {}  # tensors of the inputs
        for name in self.inputs:
            shape = self.shapes[name]
            value = Value(shape, _MAPS if len(shape) == 4 else tuple(range(len(shape))))
            ends[name] = self.made.tensor(name, value.laid)
            self.values[name] = replace(value, fp32=ends[name])
        for node in self.graph.proto.graph.node:
            if node.output[0] not in self.done:
                # `a` is short for the node's attributes, here and in all functions below.
                a = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
                _LOWERED[node.op_type](self, node, a)
        results = {name: self.fp32(self.laid(self.values[name], tuple(range(len(self.shapes[name])))), name)
                   for name in self.outputs}
        return self.made.pack(ends, results, metadata)

    # What operators read

    def read(self, name: str) -> Value:
        """Return the activation called `name`."""
        if name not in self.values:
            raise _Refused(f"{name}, which does not depend on the images")
        return self.values[name]

    def stored(self, node: NodeProto, index: int) -> Weight:
        """Return the weight that `node` reads at `index`."""
        name = node.input[index]
        if name not in self.weights:
            raise _Refused(f"{node.op_type} {node.name}, whose input {index} is computed")
        return self.weights[name]

    def optional(self, node: NodeProto, index: int) -> Weight | None:
        """Return the weight as `stored` does, or None if the node has no such input."""
        return self.stored(node, index) if len(node.input) > index and node.input[index] else None

    def fp32(self, value: Value, name: str) -> int:
        """Return the tensor of an activation in fp32, dequantised if need be."""
        if value.fp32 is not None:
            return value.fp32
        assert value.int8 is not None
        return self.step("DEQUANTIZE", [value.int8], value.laid, f"{name}/fp32", version=2)

    def laid(self, value: Value, order: Order) -> Value:
        """Return the activation with its axes in `order`, transposed if need be."""
        if value.order == order:
            return value
        permutation = [value.order.index(axis) for axis in order]
        result = replace(value, order=order, fp32=None, int8=None)
        # The axes longer than 1, in the old order and in the new one.
        long = [[axis for axis in each if value.shape[axis] > 1] for each in (value.order, order)]
        source, levels = value.tensor
        label = f"transposed_{source}_{order}"
        if long[0] == long[1]:  # only axes of length 1 change their places, so no value moves
            whole = _open(result.laid)
            index = self.step("RESHAPE", [source, self._numbers(whole)], result.laid, label, "ReshapeOptions", levels,
                              version=1, newShape=whole)
        else:
            index = self.step("TRANSPOSE", [source, self._numbers(permutation)], result.laid, label, "TransposeOptions",
                              levels)
        return replace(result, int8=index) if levels else replace(result, fp32=index)

    def _numbers(self, values: Sequence[int]) -> int:
        return self.made.constant(f"numbers_{'_'.join(map(str, values))}", np.asarray(values, np.int32))

    # What operators write

    def step(self, kind: str, operands: list[int], shape: Sequence[int], label: str, options: str = "",
             levels: Levels | None = None, **values: Any) -> int:
        """Append an operator, which may be a part of a node, and return its output tensor, int8 if it has `levels`."""
        index = self.made.tensor(label, shape, levels)
        self.made.operator(kind, operands, [index], options, **{"version": 2 if levels else 1, **values})
        return index

    def levels_of(self, name: str) -> Levels | None:
        """Return the levels to which `name` is quantised; None if nothing quantises it."""
        for reader in self.graph.consumers.get(name, []):
            if reader.op_type == "QuantizeLinear" and reader.input[0] == name:
                return _levels(self.stored(reader, 1).array, self.stored(reader, 2).array)
        return None

    def write(self, kind: str, operands: list[int], name: str, order: Order, levels: Levels | None, label: str,
              options: str = "", **values: Any) -> None:
        """Append an operator that writes the activation `name`, int8 if it has `levels`; `label` names the tensor."""
        value = Value(self.shapes[name], order)
        index = self.step(kind, operands, value.laid, label, options, levels, **values)
        self.values[name] = replace(value, int8=index, levels=levels) if levels else replace(value, fp32=index)

    def in_fp32(self, kind: str, node: NodeProto, output: str, options: str = "", **values: Any) -> None:
        """Append an operator of one input that runs in fp32; its result is the activation `output`."""
        value = self.read(node.input[0])
        self.write(kind, [self.fp32(value, node.name)], output, value.order, None, node.name, options, **values)

    def after_clamp(self, node: NodeProto, output: str, levels_of: Callable[[str], Levels | None]
                    ) -> tuple[str, int, Levels | None]:
        """Return the activation that `node` writes, with the clamp behind it if possible: name, clamp, levels."""
        readers = self.graph.consumers.get(output, [])
        activations = schema().ActivationFunctionType
        fused = activations.NONE
        # A clamp becomes part of the node if TFLite has it, or if the int8 levels end at its bounds anyway.
        if len(readers) == 1 and readers[0].op_type in ("Relu", "Clip") and output not in self.outputs:
            clamped = readers[0].output[0]
            low, high = self._bounds(readers[0])
            levels = levels_of(clamped)
            if (low, high) in _CLAMPS:
                fused = getattr(activations, _CLAMPS[low, high])
            if (low, high) in _CLAMPS or (levels is not None and _within(levels, low, high)):
                self.done.add(clamped)
                return clamped, fused, levels
        return output, fused, levels_of(output)

    def _bounds(self, node: NodeProto) -> tuple[float, float]:
        if node.op_type == "Relu":
            return 0.0, math.inf
        attributes = {each.name: each.f for each in node.attribute}  # before opset 11
        bounds = [self.optional(node, index) for index in (1, 2)]
        low, high = (attributes.get(name) if each is None else float(each.numbers)
                     for name, each in zip(("min", "max"), bounds, strict=True))
        return -math.inf if low is None else low, math.inf if high is None else high

    def whole_int8(self, inputs: Sequence[Value], output: str) -> Levels | None:
        """Return the levels of a node's result in int8; None if the node must run in fp32."""
        return self.levels_of(output) if all(value.int8 is not None for value in inputs) else None

    def source(self, value: Value, levels: Levels | None, name: str) -> int:
        """Return the tensor that an operator reads: in int8 if the operator writes `levels`, otherwise in fp32."""
        if levels is None:
            return self.fp32(value, name)
        assert value.int8 is not None
        return value.int8

    def padded(self, value: Value, pads: Sequence[int], levels: Levels | None, label: str, filler: float = 0.0
               ) -> int:
        """Return the tensor of a map with [top, left, bottom, right] more pixels."""
        source = self.source(value, levels, label)
        if not any(pads):
            return source
        top, left, bottom, right = pads
        shape = value.shape[0], value.shape[2] + top + bottom, value.shape[3] + left + right, value.shape[1]
        levels = value.levels if levels else None
        kind, operands = "PAD", [source, self.made.constant(f"{label}/pads", np.array(
            [[0, 0], [top, bottom], [left, right], [0, 0]], np.int32))]
        if filler != 0:  # in int8 only a max pooling has one: the least level
            least = np.asarray(-128, np.int8) if levels else np.asarray(filler, np.float32)
            kind, operands = "PADV2", [*operands, self.made.constant(f"{label}/filler", least, levels)]
        return self.step(kind, operands, shape, f"{label}/pad", "PadOptions" if filler == 0 else "PadV2Options", levels)


def _levels(scale: NDArray[Any], zero: NDArray[Any]) -> Levels:
    """Return ONNX's levels of uint8 or int8 as levels of int8."""
    if zero.dtype not in (np.uint8, np.int8) or zero.size != 1:
        raise _Refused(f"levels of {zero.dtype} with {zero.size} zero points; uint8 and int8 with one are what it has")
    shift = 128 if zero.dtype == np.uint8 else 0
    return Levels(np.asarray(scale, np.float32), int(zero) - shift)


def _within(levels: Levels, low: float, high: float) -> bool:
    """Return whether the levels end inside of `low`..`high`, to half a level, so that a clamp changes nothing."""
    scale = float(levels.scale)
    first, last = (-128 - levels.zero) * scale, (127 - levels.zero) * scale
    return first >= low - scale / 2 and last <= high + scale / 2


def _same_padding(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Return how many pixels TensorFlow's "same" padding adds before and behind a side."""
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def _open(shape: Sequence[int]) -> list[int]:
    """Return a shape whose batch stays open, for interpreters that resize the input."""
    return [-1, *shape[1:]]


def _check_window(node: NodeProto, a: Attributes) -> None:
    if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b""):
        raise _Refused(f"{node.op_type} {node.name}, whose padding has no numbers (auto_pad)")


def _quantize(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    value = self.read(node.input[0])
    # Its own levels: the same tensor may be quantised to others for another reader.
    levels = _levels(self.stored(node, 1).array, self.stored(node, 2).array)
    if value.int8 is None or value.levels is None or not value.levels.same(levels):
        source, is_int8 = value.tensor
        index = self.step("QUANTIZE", [source], value.laid, node.name, levels=levels, version=2 if is_int8 else 1)
        value = replace(value, int8=index, levels=levels)
    self.values[node.output[0]] = replace(value, fp32=None)


def _dequantize(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    if node.input[0] in self.values:  # an activation; what follows is for weights
        self.values[node.output[0]] = self.values[node.input[0]]
        return
    array, scale = self.stored(node, 0).array, self.stored(node, 1).array
    zero = self.optional(node, 2)
    if zero is not None and np.any(zero.array != zero.array.flat[0]):
        raise _Refused(f"{node.name}, whose zero points differ")
    offset = 0 if zero is None else int(zero.array.flat[0])
    self.weights[node.output[0]] = Weight(array, Levels(np.asarray(scale, np.float32), offset, a.get("axis", 1)))


def _conv(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    _check_window(node, a)
    value, weight, bias = self.read(node.input[0]), self.stored(node, 1), self.optional(node, 2)
    if weight.array.ndim != 4:
        raise _Refused(f"Conv {node.name} over {weight.array.ndim - 2} axes")
    value = self.laid(value, _MAPS)
    output, fused, levels = self.after_clamp(
        node, node.output[0],
        lambda name: self.whole_int8([value], name) if _int8_weights(weight, bias) else None)
    group, strides, dilations = a.get("group", 1), a.get("strides", [1, 1]), a.get("dilations", [1, 1])
    depthwise = group > 1 and group == value.shape[1] and weight.array.shape[1] == 1
    options: dict[str, Any] = {"strideH": strides[0], "strideW": strides[1], "dilationHFactor": dilations[0],
                               "dilationWFactor": dilations[1], "fusedActivationFunction": fused}
    # TFLite's "same" padding costs no operator of its own; any other padding does.
    pads = a.get("pads", [0, 0, 0, 0])
    same = [_same_padding(value.shape[2 + axis], weight.array.shape[2 + axis], strides[axis], dilations[axis])
            for axis in (0, 1)]
    if any(pads) and [tuple(pads[0::2]), tuple(pads[1::2])] == same:
        source, options["padding"] = self.source(value, levels, node.name), schema().Padding.SAME
    else:
        source = self.padded(value, pads, levels, node.name)
        options["padding"] = schema().Padding.VALID
    # Weights: ONNX has [out, in, h, w], TFLite [out, h, w, in], or [1, h, w, out] if depthwise.
    array, axis = (weight.array.transpose(1, 2, 3, 0), 3) if depthwise else (weight.array.transpose(0, 2, 3, 1), 0)
    if depthwise:
        array = array.reshape(1, *array.shape[1:])
        options["depthMultiplier"] = weight.array.shape[0] // value.shape[1]
    operands = [source, *_weights(self, node, replace(weight, array=array), axis, bias, levels)]
    self.write("DEPTHWISE_CONV_2D" if depthwise else "CONV_2D", operands, output, _MAPS, levels, node.name,
               "DepthwiseConv2DOptions" if depthwise else "Conv2DOptions",
               version=6 if group > 1 and not depthwise else 3 if levels else 1, **options)


def _int8_weights(weight: Weight, bias: Weight | None) -> bool:
    return weight.array.dtype == np.int8 and weight.levels is not None and weight.levels.zero == 0 and (
        bias is None or bias.array.dtype == np.int32)


def _weights(self: _Lowering, node: NodeProto, weight: Weight, axis: int, bias: Weight | None, levels: Levels | None
             ) -> list[int]:
    """Return the tensors of weights, with channels along `axis`, and of a bias, zeros if there is none."""
    channels = weight.array.shape[axis]
    label = f"{node.name}/weight", f"{node.name}/bias"
    if weight.levels is not None:
        weight = replace(weight, levels=replace(weight.levels, axis=axis))
    if levels is None:
        numbers = np.zeros(1, np.float32) if bias is None else bias.numbers.reshape(-1)
        return [self.made.constant(label[0], np.ascontiguousarray(weight.numbers)),
                self.made.constant(label[1], np.ascontiguousarray(np.broadcast_to(numbers, channels)))]
    assert weight.levels is not None
    input_levels = self.read(node.input[0]).levels
    assert input_levels is not None
    # The bias is added to the int32 sums, so its scale is the input's times the weights'.
    bias_levels = Levels(np.asarray(input_levels.scale * weight.levels.scale, np.float32))
    array = np.zeros(channels, np.int32) if bias is None else bias.array
    return [self.made.constant(label[0], np.ascontiguousarray(weight.array), weight.levels),
            self.made.constant(label[1], array, bias_levels)]


def _gemm(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    if a.get("transA", 0) or a.get("alpha", 1.0) != 1 or a.get("beta", 1.0) != 1:
        raise _Refused(f"Gemm {node.name}, which scales or transposes what it reads")
    value, weight, bias = self.read(node.input[0]), self.stored(node, 1), self.optional(node, 2)
    value = self.laid(value, (0, 1))
    if not a.get("transB", 0):
        weight = Weight(weight.numbers.T)
    output, fused, levels = self.after_clamp(
        node, node.output[0],
        lambda name: self.whole_int8([value], name) if _int8_weights(weight, bias) else None)
    operands = [self.source(value, levels, node.name), *_weights(self, node, weight, 0, bias, levels)]
    self.write("FULLY_CONNECTED", operands, output, (0, 1), levels, node.name, "FullyConnectedOptions",
               version=4 if levels else 1, fusedActivationFunction=fused)


def _binary(kind: str) -> Callable[[_Lowering, NodeProto, Attributes], None]:
    options = f"{kind.capitalize()}Options"

    def lower(self: _Lowering, node: NodeProto, a: Attributes) -> None:
        first = next((name for name in node.input if name in self.values), None)
        if first is None:
            raise _Refused(f"{node.op_type} {node.name}, which does not depend on the images")
        if node.op_type == "Div" and (gelu := self.graph.gelu_of(node.input[0])):
            _gelu(self, node, gelu)
            return
        # Two maps can be added or multiplied in int8; with a weight, the operator runs in fp32.
        order = self.values[first].order
        maps = [self.laid(self.values[name], order) for name in node.input
                if name in self.values and len(self.values[name].order) == len(order)]
        both_maps = len(maps) == len(node.input)
        output, fused, levels = self.after_clamp(
            node, node.output[0],
            lambda name: _rescaled(kind, maps, self.whole_int8(maps, name)) if both_maps and kind in _LEAST else None)
        if both_maps:
            operands = [self.source(value, levels, f"{node.name}/{index}") for index, value in enumerate(maps)]
        else:
            operands = [_operand(self, node, name, order) for name in node.input]
        self.write(kind, operands, output, order, levels, node.name, options, fusedActivationFunction=fused)

    return lower


def _rescaled(kind: str, maps: Sequence[Value], levels: Levels | None) -> Levels | None:
    """Return the levels if the delegate takes an operator with these scales, otherwise None: fp32 is then quicker."""
    if levels is None:
        return None
    scales = [float(value.levels.scale) for value in maps if value.levels is not None]
    ratios = [scale / float(levels.scale) for scale in (scales if kind == "ADD" else [math.prod(scales)])]
    return levels if all(_LEAST[kind] <= ratio < _MOST for ratio in ratios) else None


def _operand(self: _Lowering, node: NodeProto, name: str, order: Order) -> int:
    """Return an operand of a sum or product in fp32: an activation, or a weight, with its axes in `order`."""
    if name in self.values:
        value = self.values[name]
        if len(value.order) != len(order):
            raise _Refused(f"{node.op_type} {node.name}, whose inputs have {len(value.order)} and {len(order)} axes")
        return self.fp32(self.laid(value, order), name)
    numbers = self.weights[name].numbers
    if numbers.ndim > len(order):
        raise _Refused(f"{node.op_type} {node.name}, whose weight has {numbers.ndim} axes")
    if numbers.ndim:
        numbers = numbers.reshape((1,) * (len(order) - numbers.ndim) + numbers.shape).transpose(order)
    return self.made.constant(name, np.ascontiguousarray(numbers))


def _gelu(self: _Lowering, node: NodeProto, output: str) -> None:
    """Write a GELU, which torch exports as five nodes."""
    following = node.output[0]
    for kind in ("Erf", "Add", "Mul", "Mul"):
        reader = next(each for each in self.graph.consumers[following] if each.op_type == kind)
        following = reader.output[0]
        self.done.add(following)
    self.in_fp32("GELU", node, output, "GeluOptions", approximate=False)


def _unary(kind: str, options: str = "") -> Callable[[_Lowering, NodeProto, Attributes], None]:
    return lambda self, node, a: self.in_fp32(kind, node, node.output[0], options)


def _sigmoid(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    value = self.read(node.input[0])
    levels = self.whole_int8([value], node.output[0])
    levels = levels and _GATE
    self.write("LOGISTIC", [self.source(value, levels, node.name)], node.output[0], value.order, levels, node.name)


def _hard_sigmoid(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write max(0, min(1, alpha x + beta)) as min(6, max(0, 6 alpha x + 6 beta)) / 6."""
    value, activations = self.read(node.input[0]), schema().ActivationFunctionType
    alpha, beta = round(6 * a.get("alpha", 0.2), 6), 6 * a.get("beta", 0.5)
    source = self.fp32(value, node.name)

    def times(source: int, factor: float, label: str) -> int:
        constant = self.made.constant(f"times_{factor}", np.asarray(factor, np.float32))
        return self.step("MUL", [source, constant], value.laid, label, "MulOptions")

    scaled = source if alpha == 1 else times(source, alpha, f"{node.name}/scaled")
    constant = self.made.constant(f"plus_{beta}", np.asarray(beta, np.float32))
    shifted = self.step("ADD", [scaled, constant], value.laid, f"{node.name}/shifted", "AddOptions",
                        fusedActivationFunction=activations.RELU6)
    self.values[node.output[0]] = replace(value, fp32=times(shifted, 1 / 6, node.name), int8=None, levels=None)


def _clamp(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write a Relu or Clip that is not part of the operator before it."""
    value, (low, high) = self.read(node.input[0]), self._bounds(node)
    clamps = {**_CLAMPS, (0.0, 1.0): "RELU_0_TO_1"}
    source = self.fp32(value, node.name)
    steps = [(clamps[low, high], None)] if (low, high) in clamps else [
        (kind, bound) for kind, bound in (("MAXIMUM", low), ("MINIMUM", high)) if math.isfinite(bound)]
    for number, (kind, bound) in enumerate(steps):
        operands, options = [source], ""
        if bound is not None:
            operands.append(self.made.constant(f"bound_{bound}", np.asarray(bound, np.float32)))
            options = "MaximumMinimumOptions"
        label = node.name if number == len(steps) - 1 else f"{node.name}/{kind}"
        source = self.step(kind, operands, value.laid, label, options)
    self.values[node.output[0]] = replace(value, fp32=source, int8=None, levels=None) if steps else value


def _mean(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write a GlobalAveragePool, or a ReduceMean that keeps its axes."""
    value = self.read(node.input[0])
    usual = (2, 3) if node.op_type == "GlobalAveragePool" else range(len(value.shape))
    axes = [axis % len(value.shape) for axis in a.get("axes", usual)]
    if len(node.input) > 1 and node.input[1]:
        axes = [int(axis) % len(value.shape) for axis in self.stored(node, 1).array]
    if a.get("noop_with_empty_axes", 0):
        raise _Refused(f"ReduceMean {node.name}, which may do nothing")
    if not a.get("keepdims", 1):
        raise _Refused(f"ReduceMean {node.name}, which drops axes")
    levels = self.whole_int8([value], node.output[0])
    operands = [self.source(value, levels, node.name), self._numbers(sorted(value.order.index(axis) for axis in axes))]
    self.write("MEAN", operands, node.output[0], value.order, levels, node.name, "ReducerOptions", keepDims=True)


def _pool(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write a pooling over windows. An operator before it adds padding, and the pixels that ceil_mode needs at the end;
    one behind it corrects an average that leaves padding out."""
    _check_window(node, a)
    if any(step != 1 for step in a.get("dilations", [1, 1])) or len(a["kernel_shape"]) != 2 or len(node.output) > 1:
        raise _Refused(f"{node.op_type} {node.name}, which is dilated, has other axes or returns places")
    value = self.laid(self.read(node.input[0]), _MAPS)
    average, name = node.op_type == "AveragePool", node.output[0]
    kernel, strides, pads = a["kernel_shape"], a.get("strides", [1, 1]), list(a.get("pads", [0, 0, 0, 0]))
    shape = self.shapes[name]
    # The pixels behind the map that the last windows read: padding, and perhaps more with ceil_mode.
    ends = [max((shape[2 + axis] - 1) * strides[axis] + kernel[axis] - value.shape[2 + axis] - pads[axis], 0)
            for axis in (0, 1)]
    counts = _counts(value.shape[2:], shape[2:], kernel, strides, pads, bool(a.get("count_include_pad", 0)))
    correction = math.prod(kernel) / counts if average else np.ones_like(counts)
    exact = bool((correction == 1).all())
    # The delegate does not take an average in int8, which then takes five times as long as in fp32. A maximum keeps the
    # levels of its input; QUANTIZE follows if the output has others.
    levels = value.levels if value.int8 is not None and not average and self.levels_of(name) else None
    filler = 0.0 if average or self.graph.non_negative(_plain(self, node.input[0])) else float(np.finfo("f4").min)
    source = self.padded(value, [*pads[:2], *ends], levels, node.name, filler)
    self.write("AVERAGE_POOL_2D" if average else "MAX_POOL_2D", [source], name, _MAPS, levels,
               node.name if exact else f"{node.name}/sums", "Pool2DOptions", padding=schema().Padding.VALID,
               strideH=strides[0], strideW=strides[1], filterHeight=kernel[0], filterWidth=kernel[1])
    if not exact:
        sums = self.fp32(self.values[name], node.name)
        factor = self.made.constant(f"{node.name}/correction", correction[None, :, :, None].astype(np.float32))
        self.write("MUL", [sums, factor], name, _MAPS, None, node.name, "MulOptions")


def _plain(self: _Lowering, name: str) -> str:
    """Return the name of the activation before its pair, if `name` is a dequantised one."""
    for _ in range(2):
        node = self.graph.producer.get(name)
        if node is not None and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            name = node.input[0]
    return name


def _counts(before: Sequence[int], after: Sequence[int], kernel: Sequence[int], strides: Sequence[int],
            pads: Sequence[int], with_pads: bool) -> NDArray[np.float64]:
    """Return how many pixels each window [h, w] of an average counts: pixels of the map, and of the padding if
    `with_pads`. Pixels beyond both, which ceil_mode reaches, never count."""
    sides = []
    for axis in (0, 1):
        starts = np.arange(after[axis]) * strides[axis] - pads[axis]
        first, last = (-pads[axis], before[axis] + pads[2 + axis]) if with_pads else (0, before[axis])
        sides.append(np.minimum(starts + kernel[axis], last) - np.maximum(starts, first))
    return np.asarray(np.multiply.outer(*sides), np.float64)


def _flatten(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write a Flatten or Reshape, by the shape of its output; levels stay the same."""
    value, shape = self.read(node.input[0]), self.shapes[node.output[0]]
    if not shape or shape[0] != value.shape[0]:
        raise _Refused(f"{node.op_type} {node.name}, which changes the batch")
    value = self.laid(value, tuple(range(len(value.shape))))
    source, levels = value.tensor
    whole = _open(shape)
    self.write("RESHAPE", [source, self._numbers(whole)], node.output[0], tuple(range(len(shape))), levels, node.name,
               "ReshapeOptions", version=1, newShape=whole)


def _resize(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write a Resize that repeats each pixel along both sides; levels stay the same."""
    value, shape = self.laid(self.read(node.input[0]), _MAPS), self.shapes[node.output[0]]
    rule = (a.get("coordinate_transformation_mode", b"half_pixel"), a.get("nearest_mode", b"round_prefer_floor"))
    is_whole = shape[:2] == value.shape[:2] and all(after % before == 0 for after, before in zip(
        shape[2:], value.shape[2:], strict=True))
    if a.get("mode", b"nearest") != b"nearest" or rule not in _NEAREST or not is_whole:
        raise _Refused(f"Resize {node.name}, which is not of nearest pixels, a whole number of times")
    source, levels = value.tensor
    self.write("RESIZE_NEAREST_NEIGHBOR", [source, self._numbers(shape[2:])], node.output[0], _MAPS, levels, node.name,
               "ResizeNearestNeighborOptions")


def _transpose(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Change only the axes' numbers: nothing is written."""
    value, permutation = self.read(node.input[0]), tuple(a["perm"])
    self.values[node.output[0]] = replace(value, shape=tuple(value.shape[axis] for axis in permutation),
                                          order=tuple(permutation.index(axis) for axis in value.order))


def _identity(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    self.values[node.output[0]] = self.read(node.input[0])


def _layer_norm(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write (x - mean) / sqrt(variance + epsilon) * gain + bias over the last axis, in fp32."""
    value = self.read(node.input[0])
    last = len(value.shape) - 1
    if a.get("axis", -1) % len(value.shape) != last or len(node.output) > 1:
        raise _Refused(f"LayerNormalization {node.name} over more than the last axis")
    mean_of = replace(value, shape=(*value.shape[:-1], 1))
    label, source = node.name, self.fp32(value, node.name)

    def step(kind: str, operands: list[int], shape: Value, name: str, options: str = "", **values: Any) -> int:
        return self.step(kind, operands, shape.laid, f"{label}/{name}", options, **values)

    places = self._numbers([value.order.index(last)])
    mean = step("MEAN", [source, places], mean_of, "mean", "ReducerOptions", keepDims=True)
    centred = step("SUB", [source, mean], value, "centred", "SubOptions")
    squares = step("MUL", [centred, centred], value, "squares", "MulOptions")
    variance = step("MEAN", [squares, places], mean_of, "variance", "ReducerOptions", keepDims=True)
    epsilon = self.made.constant(f"{label}/epsilon", np.asarray(a.get("epsilon", 1e-5), np.float32))
    raised = step("ADD", [variance, epsilon], mean_of, "raised", "AddOptions")
    result = step("MUL", [centred, step("RSQRT", [raised], mean_of, "rsqrt")], value, "normalised", "MulOptions")
    shape = [value.shape[axis] if axis == last else 1 for axis in value.order]
    for index, kind in ((1, "MUL"), (2, "ADD")):
        if (weight := self.optional(node, index)) is not None:
            operand = self.made.constant(node.input[index], weight.numbers.reshape(shape))
            result = step(kind, [result, operand], value, kind.lower(), f"{kind.capitalize()}Options")
    self.values[node.output[0]] = replace(value, fp32=result, int8=None, levels=None)


def _concat(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    values = [self.read(name) for name in node.input]
    order, name = values[0].order, node.output[0]
    values = [self.laid(value, order) for value in values]
    levels = self.whole_int8(values, name)
    # In int8 all inputs must have the levels of the output.
    if levels is not None and not all(value.levels is not None and value.levels.same(levels) for value in values):
        operands = [self.step("QUANTIZE", [self.source(value, levels, node.name)], value.laid,
                              f"{node.name}/{index}/levels", levels=levels)
                    for index, value in enumerate(values)]
    else:
        operands = [self.source(value, levels, f"{node.name}/{index}") for index, value in enumerate(values)]
    self.write("CONCATENATION", operands, name, order, levels, node.name, "ConcatenationOptions",
               axis=order.index(a["axis"] % len(order)))


def _slices(self: _Lowering, node: NodeProto, value: Value, parts: Sequence[tuple[str, dict[int, tuple[int, int]]]]
            ) -> None:
    """Write a slice for each of `parts`: a name, and begin and end along some axes; levels stay the same."""
    source, levels = value.tensor
    for number, (name, ends) in enumerate(parts):
        begin = [ends.get(axis, (0, 0))[0] for axis in value.order]
        size = [self.shapes[name][axis] for axis in value.order]
        self.write("SLICE", [source, self._numbers(begin), self._numbers(size)], name, value.order, levels,
                   f"{node.name}/{number}" if number else node.name, "SliceOptions")


def _split(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    value = self.read(node.input[0])
    axis = a.get("axis", 0) % len(value.shape)
    ends = np.cumsum([0, *(self.shapes[name][axis] for name in node.output)])
    _slices(self, node, value, [(name, {axis: (int(ends[i]), int(ends[i + 1]))})
                                for i, name in enumerate(node.output)])


def _slice(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    value = self.read(node.input[0])
    starts, _, *rest = (self.stored(node, index).array for index in range(1, len(node.input)))
    axes = [int(axis) % len(value.shape) for axis in (rest[0] if rest else range(len(starts)))]
    if len(rest) > 1 and any(rest[1] != 1):
        raise _Refused(f"Slice {node.name}, which takes steps")
    begins = [int(np.clip(start + (value.shape[axis] if start < 0 else 0), 0, value.shape[axis]))
              for start, axis in zip(starts, axes, strict=True)]
    _slices(self, node, value, [(node.output[0], {axis: (begin, 0) for axis, begin in zip(axes, begins, strict=True)})])


def _pad(self: _Lowering, node: NodeProto, a: Attributes) -> None:
    """Write a Pad that is not part of the convolution or pooling behind it."""
    value, amounts = self.laid(self.read(node.input[0]), _MAPS), self.stored(node, 1).array
    filler = self.optional(node, 2)
    if a.get("mode", b"constant") != b"constant" or len(node.input) > 3 or len(amounts) != 8 or any(
            amounts[[0, 1, 4, 5]]) or min(amounts) < 0:
        raise _Refused(f"Pad {node.name}, which is not of a fixed value around a map")
    number = 0.0 if filler is None else float(filler.numbers)
    pads = [int(amounts[index]) for index in (2, 3, 6, 7)]
    source = self.padded(replace(value, fp32=self.fp32(value, node.name), int8=None), pads, None, node.name, number)
    self.values[node.output[0]] = replace(value, shape=self.shapes[node.output[0]], fp32=source, int8=None, levels=None)


_LOWERED: dict[str, Callable[[_Lowering, NodeProto, Attributes], None]] = {
    "Add": _binary("ADD"), "AveragePool": _pool, "Clip": _clamp, "Concat": _concat, "Conv": _conv,
    "DequantizeLinear": _dequantize, "Div": _binary("DIV"), "Flatten": _flatten, "Gemm": _gemm,
    "GlobalAveragePool": _mean, "HardSigmoid": _hard_sigmoid, "HardSwish": _unary("HARD_SWISH", "HardSwishOptions"),
    "Identity": _identity, "LayerNormalization": _layer_norm, "MaxPool": _pool, "Mul": _binary("MUL"), "Pad": _pad,
    "QuantizeLinear": _quantize, "ReduceMean": _mean, "Relu": _clamp, "Reshape": _flatten,
    "Resize": _resize, "Sigmoid": _sigmoid, "Slice": _slice, "Split": _split, "Sub": _binary("SUB"),
    "Tanh": _unary("TANH"), "Transpose": _transpose,
}
