"""An exported fp32 ONNX file as a torch module, rebuilt from its own nodes: what is trained is what is deployed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hwnas.errors import FileError
from hwnas.lazy import LazyModule
from hwnas.runtimes.runtime import one_line

if TYPE_CHECKING:
    import onnx
    import onnx.numpy_helper
    from onnx import ModelProto, NodeProto
else:
    onnx = LazyModule("onnx")


Attributes = dict[str, Any]


def _padded(images: Tensor, a: Attributes, value: float) -> tuple[Tensor, list[int]]:
    """The maps, and the padding that is left to do: torch's operators pad both sides alike, other pads are added."""
    top, left, bottom, right = a.get("pads", [0, 0, 0, 0])
    if (top, left) == (bottom, right):
        return images, [top, left]
    return functional.pad(images, (left, right, top, bottom), value=value), [0, 0]


def _conv(inputs: list[Tensor], a: Attributes) -> Tensor:
    images, padding = _padded(inputs[0], a, 0.0)
    bias = inputs[2] if len(inputs) > 2 else None
    return functional.conv2d(images, inputs[1], bias, a.get("strides", [1, 1]), padding,
                             a.get("dilations", [1, 1]), a.get("group", 1))


def _gemm(inputs: list[Tensor], a: Attributes) -> Tensor:
    return functional.linear(inputs[0], inputs[1] if a.get("transB") else inputs[1].T, inputs[2])


def _layer_norm(inputs: list[Tensor], a: Attributes) -> Tensor:
    """Over the last axis, as networks here have it."""
    return functional.layer_norm(inputs[0], inputs[1].shape, inputs[1], inputs[2], a.get("epsilon", 1e-5))


def _pool(inputs: list[Tensor], a: Attributes, kind: Callable[..., Tensor], **options: Any) -> Tensor:
    images, padding = _padded(inputs[0], a, -torch.inf if kind is functional.max_pool2d else 0.0)
    return kind(images, a["kernel_shape"], a.get("strides", [1, 1]), padding,
                ceil_mode=bool(a.get("ceil_mode", 0)), **options)


_OPERATORS: dict[str, Callable[[list[Tensor], Attributes], Tensor]] = {
    "Add": lambda x, a: x[0] + x[1],
    "AveragePool": lambda x, a: _pool(x, a, functional.avg_pool2d,
                                      count_include_pad=bool(a.get("count_include_pad", 0))),
    "Clip": lambda x, a: x[0].clamp(x[1].item(), x[2].item()),
    "Conv": _conv,
    "Div": lambda x, a: x[0] / x[1],
    "Erf": lambda x, a: torch.erf(x[0]),
    "Flatten": lambda x, a: x[0].flatten(a.get("axis", 1)),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda x, a: x[0].mean((2, 3), keepdim=True),
    "HardSigmoid": lambda x, a: functional.hardsigmoid(x[0]),
    "HardSwish": lambda x, a: functional.hardswish(x[0]),
    "LayerNormalization": _layer_norm,
    "MaxPool": lambda x, a: _pool(x, a, functional.max_pool2d),
    "Mul": lambda x, a: x[0] * x[1],
    "ReduceMean": lambda x, a: x[0].mean(a["axes"], keepdim=bool(a.get("keepdims", 1))),
    "Relu": lambda x, a: functional.relu(x[0]),
    "Sigmoid": lambda x, a: torch.sigmoid(x[0]),
    "Transpose": lambda x, a: x[0].permute(a["perm"]),
}


class OnnxModule(nn.Module):
    """Runs an exported graph node by node; weights are buffers, so that `.to()` moves them.

    CandidateError when the file holds an operator that is not in the table, or no weights.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        try:
            proto = onnx.load(os.fspath(path))
        except Exception as error:  # a foreign file may fail in protobuf, onnx or the file system
            raise FileError(path, f"cannot be read: {one_line(error)}") from error
        self.nodes = [(node, _attributes(node)) for node in proto.graph.node if node.op_type != "Constant"]
        unknown = sorted({node.op_type for node, _ in self.nodes} - set(_OPERATORS))
        if unknown:
            raise FileError(path, f"the torch module has no operator {', '.join(unknown)}; it runs fp32 files written "
                                  "by hwnas.networks.export.")
        self.input, self.output = proto.graph.input[0].name, proto.graph.output[0].name
        self.weight_names: dict[str, str] = {}  # of the graph -> of the module's buffers
        self._limits: dict[str, Tensor] = {}
        for name, array in _constants(proto):
            if array.ndim == 0:
                self._limits[name] = torch.from_numpy(array.copy())  # bounds of Clip, read on the host
            else:
                self.weight_names[name] = f"weight_{len(self.weight_names)}"
                self.register_buffer(self.weight_names[name], torch.from_numpy(array.copy()))

    def forward(self, images: Tensor) -> Tensor:
        """[n,c,h,w] -> [n, classes]."""
        for _, values in self.steps(images):
            result = values
        return result

    def steps(self, images: Tensor) -> Iterator[tuple[NodeProto, Tensor]]:
        """Every node with its result, in order."""
        values: dict[str, Tensor] = {self.input: images, **self._limits}
        values |= {name: getattr(self, weight) for name, weight in self.weight_names.items()}
        for node, attributes in self.nodes:
            result = _OPERATORS[node.op_type]([self.read(node, name, values) for name in node.input if name],
                                              attributes)
            values[node.output[0]] = result
            yield node, result

    def read(self, node: NodeProto, name: str, values: dict[str, Tensor]) -> Tensor:
        """The value that `node` takes for its input `name`. Modules that are built on this one put another in its
        place."""
        return values[name]


def _attributes(node: NodeProto) -> Attributes:
    return {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}


def _constants(proto: ModelProto) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    for weight in proto.graph.initializer:
        yield weight.name, onnx.numpy_helper.to_array(weight)
    for node in proto.graph.node:
        if node.op_type == "Constant":
            yield node.output[0], onnx.numpy_helper.to_array(node.attribute[0].t)
