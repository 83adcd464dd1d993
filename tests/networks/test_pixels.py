"""A graph with the preparation in front gives the pixels that the data set gives, in both runtimes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from hwnas.data.dataset import Preparation, normalise, resize
from hwnas.data.decoding import decode
from hwnas.errors import ModelError
from hwnas.networks.pixels import take_pixels
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.openvino import import_openvino

SHAPES = [(16, 16), (40, 53), (53, 40), (11, 17), (20, 24), (9, 75), (32, 32), (150, 200)]  # kept, shrunk, enlarged


def nothing(channels: int, size: int) -> onnx.ModelProto:
    """A network that answers with its images."""
    shape = ["batch", channels, size, size]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("images", "logits")]
    graph = helper.make_graph([helper.make_node("Relu", ["images"], ["logits"])], "nothing", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("preparation", "image_size", "shapes"), [
    (Preparation(True, (16,), 3), None, SHAPES), (Preparation(True, (16, 12), 3), None, SHAPES[:4]),
    (Preparation(True, (16,), 1), None, SHAPES[:4]), (Preparation(True, (16, 12), 3), 21, [(21, 21)]),
    (Preparation(False, (14, 16, 10), 1), None, [(14, 14)])])
def test_pixels_are_prepared_as_in_training(tmp_path: Path, preparation: Preparation, image_size: int | None,
                                            shapes: list[tuple[int, int]]) -> None:
    channels, rng = preparation.channels, np.random.default_rng(0)
    proto = nothing(channels, preparation.sizes[-1])
    said = take_pixels(proto, preparation, (0.0,) * channels, (1 / 255,) * channels, image_size)
    onnx.checker.check_model(proto, full_check=True)
    assert said[0] == "batch"
    assert said[3] == channels
    path = tmp_path / "pixels.onnx"
    onnx.save(proto, path)
    network = import_openvino().Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for shape in shapes:
        pictures = rng.integers(0, 256, (2, *shape, channels)).astype(np.uint8)
        expected = np.stack([decode(Image.fromarray(picture.squeeze()), preparation.sizes[0], channels)
                             for picture in pictures])
        for size in preparation.sizes[1:]:
            expected = resize(expected, size)
        for got in (run_once(path, pictures), network(pictures)[0]):
            np.testing.assert_allclose(got, expected, atol=0.01, err_msg=str(shape))


def test_normalised_to_the_last_bit_of_training(tmp_path: Path) -> None:
    """With mean and std 0.5 every level lies half way between two of int8, so that the last bit decides."""
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.2, 0.1)
    proto, path = nothing(3, 16), tmp_path / "pixels.onnx"
    proto.graph.node[0].op_type = "Identity"
    take_pixels(proto, Preparation(True, (16,), 3), mean, std, 16)
    onnx.save(proto, path)
    levels = np.repeat(np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1), 3, 3)
    expected = normalise(levels.transpose(0, 3, 1, 2), mean, std)
    np.testing.assert_array_equal(run_once(path, levels), expected)
    np.testing.assert_allclose(expected[0, :, 12, 12], [0.6, 2.0, 5.0], atol=0.01)


def test_a_preparation_is_taken_once() -> None:
    proto = nothing(3, 4)
    take_pixels(proto, Preparation(True, (4,), 3), (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ModelError, match="only once"):
        take_pixels(proto, Preparation(True, (4,), 3), (0.5,) * 3, (0.5,) * 3)
