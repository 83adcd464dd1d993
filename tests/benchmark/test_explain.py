"""What `benchmark explain=true` tells: what runs in which precision, what it computes, and what bounds it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from hwnas.__main__ import main
from hwnas.benchmark import __main__ as command
from hwnas.benchmark.explain import work_of
from hwnas.benchmark.roofs import ARITHMETIC, MEMORY, OVERHEAD, Roofs
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


def test_the_work_of_operators_is_that_of_their_shapes(tmp_path: Path) -> None:
    work = work_of(network(tmp_path / "m.onnx"), batch=2)
    pixels = 16 * 16
    assert work["conv"] == [2 * 2 * 4 * pixels * 27, 2 * 3 * pixels, 4 * 27 + 4, 2 * 4 * pixels]
    assert work["head"] == [2 * 2 * 5 * 4, 2 * 4, 5 * 4, 2 * 5]


@given(st.floats(1e3, 1e12), st.floats(1e2, 1e10), st.floats(1e-5, 1e3))
def test_an_operator_is_bound_by_one_roof_or_by_none(flops: float, moved: float, ms: float) -> None:
    roofs = Roofs(100.0, 50.0, 10.0, 1 << 20)
    speed = 50.0 if moved <= 1 << 20 else 10.0
    bound, least_ms = roofs.bound(flops, moved, ms), 1e-6 * max(flops / 100.0, moved / speed)
    assert (bound == OVERHEAD) == (least_ms < 0.1 * ms)
    if bound != OVERHEAD:
        assert bound == (ARITHMETIC if flops / 100.0 >= moved / speed else MEMORY)


@pytest.mark.parametrize("target", ["ort_fp32", "ort_int8"])
def test_the_command_names_every_operator_and_what_bounds_it(target: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "measure_roofs", lambda target: Roofs(100.0, 50.0, 10.0, 1 << 20))
    model = network(tmp_path / "m.onnx")
    if target == "ort_int8":
        quantize_static(model, model, None, tuned_for="onnxruntime")
    words = ["benchmark", "-q", f"target={target}", f"model={model}", "seconds=1", "explain=true",
             f"out={tmp_path / 'b.json'}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    bounds = said.splitlines()[-1]
    too_busy = "no roof was measured" in bounds
    assert too_busy or ("bound by" in bounds and "GFLOP/s" in bounds)
    rows = [line.split() for line in said.splitlines() if line.startswith("Conv")]
    assert rows
    assert rows[0][2] == ("int8" if target == "ort_int8" else "fp32")  # asked
