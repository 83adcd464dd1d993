"""An exported network in torch with rounding to int8 at exactly the points where its QDQ file has it, to be trained."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hwnas.qdq import Graph, Range, quantised_nodes, quantised_tensors, scale_of
from hwnas.quantize import TunedFor, load_fp32
from hwnas.runtimes.torch_graph import OnnxModule

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_WEIGHTED = ("Conv", "Gemm")


class FakeQuantised(OnnxModule):
    """The fp32 file at `path`, its weights and biases parameters, rounded in the forward pass as `insert_pairs` does.

    Activations by `ranges`, which stay; weights per output channel by their own extremes at every step. Gradients pass
    straight through what is not clipped (Jacob et al., Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference, CVPR 2018). Batch norms are folded in the file, so that their statistics stay.
    It computes what the file says; OpenVINO 2026.4 is a little more exact, for it does not round a linear convolution's
    output that it adds to a sum at once.
    """

    def __init__(self, path: str | os.PathLike[str], ranges: Mapping[str, Range], tuned_for: TunedFor) -> None:
        super().__init__(path)
        graph = Graph(load_fp32(path))
        self._pairs = {name: scale_of(*ranges[name]) for name in quantised_tensors(graph, tuned_for)}
        self._quantised = {node.name for node in quantised_nodes(graph)}
        for name in {name for node, _ in self.nodes if node.op_type in _WEIGHTED for name in node.input[1:]}:
            if name in self.weight_names:
                tensor = self.get_buffer(self.weight_names[name])
                delattr(self, self.weight_names[name])
                self.register_parameter(self.weight_names[name], nn.Parameter(tensor))

    def read(self, node: NodeProto, name: str, values: dict[str, Tensor]) -> Tensor:
        if name in self._pairs:
            key = f"{name}_dequantised"
            if key not in values:
                scale, zero_point = self._pairs[name]
                values[key] = torch.fake_quantize_per_tensor_affine(values[name], scale, zero_point, 0, 255)
            return values[key]
        if node.name in self._quantised and name in self.weight_names:
            weight, bias = self._weights(node, values)
            return weight if name == node.input[1] else bias
        return values[name]

    def _weights(self, node: NodeProto, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Rounded weight and bias of a quantised node; scales as the writer of QDQ files chooses them."""
        keys = f"{node.name}/weight_dequantised", f"{node.name}/bias_dequantised"
        if keys[0] not in values:
            weight, input_scale = values[node.input[1]], self._pairs[node.input[0]][0]
            bias = values[node.input[2]] if len(node.input) > 2 else weight.new_zeros(len(weight))
            scale = weight.detach().abs().flatten(1).amax(1) / 127
            scale = torch.maximum(scale, bias.detach().abs() / (input_scale * 2**30)).clamp_min(1e-12)
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            values[keys[0]] = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -127, 127)
            step = scale * input_scale
            values[keys[1]] = bias + ((bias / step).round() * step - bias).detach()
        return values[keys[0]], values[keys[1]]

    def network(self, proto: ModelProto) -> ModelProto:
        """`proto`, the network that this was made from, with the weights as they are now; in place."""
        from onnx import numpy_helper

        for weight in proto.graph.initializer:
            if weight.name in self.weight_names:
                tensor = getattr(self, self.weight_names[weight.name]).detach().contiguous()
                weight.CopyFrom(numpy_helper.from_array(tensor.numpy(), weight.name))
        return proto
