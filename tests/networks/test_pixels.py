"""A graph that takes pixels normalises them as training did, in both runtimes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hwnas.data.dataset import normalise
from hwnas.errors import ModelError
from hwnas.networks.pixels import take_pixels
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.openvino import import_openvino


def nothing(channels: int, size: int) -> onnx.ModelProto:
    """A network that answers with its images."""
    shape = ["batch", channels, size, size]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("images", "logits")]
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["logits"])], "nothing", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_normalised_to_the_last_bit_of_training(tmp_path: Path) -> None:
    """With mean and std 0.5 every level lies half way between two of int8, so that the last bit decides."""
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.2, 0.1)
    proto, path = nothing(3, 16), tmp_path / "pixels.onnx"
    proto.graph.node[0].op_type = "Identity"
    assert take_pixels(proto, 3, 16, mean, std) == ["batch", 16, 16, 3]
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    levels = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), 3, 3)
    expected = normalise(levels.transpose(0, 3, 1, 2), mean, std)
    np.testing.assert_array_equal(run_once(path, levels), expected)
    network = import_openvino().Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    np.testing.assert_array_equal(network(levels)[0], expected)
    np.testing.assert_allclose(expected[0, :, 12, 12], [0.6, 2.0, 5.0], atol=0.01)


def test_a_preparation_is_taken_once() -> None:
    proto = nothing(3, 4)
    take_pixels(proto, 3, 4, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ModelError, match="only once"):
        take_pixels(proto, 3, 4, (0.5,) * 3, (0.5,) * 3)
