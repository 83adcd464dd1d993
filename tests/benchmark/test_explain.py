"""What `benchmark explain=true` tells: what runs in which precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hwnas.__main__ import main
from hwnas.networks.quantize import quantize_static


def network(path: Path) -> Path:
    """A convolution of 3 to 4 channels at 16 px, and a classifier of 5 classes."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal(size, np.float32), name)
               for name, size in (("w", (4, 3, 3, 3)), ("b", (4,)), ("v", (5, 4)))]
    nodes = [helper.make_node("Conv", ["images", "w", "b"], ["a"], pads=[1, 1, 1, 1], name="conv"),
             helper.make_node("GlobalAveragePool", ["a"], ["p"], name="pool"),
             helper.make_node("Flatten", ["p"], ["f"], name="flat"),
             helper.make_node("Gemm", ["f", "v"], ["logits"], transB=1, name="head")]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
              for name, shape in (("images", ["n", 3, 16, 16]), ("logits", ["n", 5]))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


@pytest.mark.parametrize("target", ["ort_fp32", "ort_int8"])
def test_the_command_names_every_operator(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = network(tmp_path / "m.onnx")
    if target == "ort_int8":
        quantize_static(model, model, None, tuned_for="onnxruntime")
    words = ["benchmark", "-q", f"target={target}", f"model={model}", "seconds=1", "explain=true",
             f"out={tmp_path / 'b.json'}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.startswith("Conv")]
    assert rows
    assert rows[0][2] == ("int8" if target == "ort_int8" else "fp32")  # asked
