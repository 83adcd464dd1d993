"""A network as a TFLite file answers as its ONNX file does: every kind of block and operator, in fp32 and in int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from hwnas.errors import FileError
from hwnas.networks.baselines import Baseline
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.litert.lowering import write_tflite
from hwnas.networks.litert.tflite import read_tflite, schema
from hwnas.networks.network import build
from hwnas.networks.qdq import Graph, head_nodes, quantised_nodes
from hwnas.networks.quantize import activation_ranges, load_fp32, quantise_graph, quantize_static
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.runtime import Execution, load_runtime
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import ACTIVATIONS
from hwnas.target import Target

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert")
from ai_edge_litert.interpreter import Interpreter  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

ZOO = ("mobilenetv3_small_075", "mobilenetv3_large_100", "mobilenetv2_050", "mnasnet_small", "semnasnet_100",
       "fbnetc_100", "tinynet_e", "tf_efficientnet_lite0", "efficientnet_b0", "regnetx_002", "regnety_004", "resnet18",
       "resnet50")
FP32_ERROR = 3e-5  # of the largest logit
OPS = ("cn_r1_k3_s2_c12", "cn_r2_k5_s1_c8", "id_r1_k1_s1_c8", "id_r1_k1_s2_c12", "ds_r1_k3_s2_c12_se0.25",
       "ds_r2_k5_s1_c8", "ir_r1_k3_s2_e3_c12_se0.25", "ir_r2_k5_s1_e3_c8", "ir_r1_k3_s1_e3_c8_noskip",
       "er_r1_k3_s2_e3_c12", "cx_r2_k7_s1_e2_c8", "cxl_r2_k7_s1_e2_c8")


def images(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, *shape), dtype=np.float32)


def exported(model: nn.Module, path: Path, shape: tuple[int, int, int]) -> Path:
    export_onnx(randomise(model.eval(), 1), path, shape)
    return path


def answers(path: Path, precision: str, given: np.ndarray) -> tuple[np.ndarray, np.ndarray, Execution]:
    """What ONNX Runtime and LiteRT answer, and what LiteRT executed."""
    compiled = load_runtime("litert").compile(path, Target("t", "litert", precision, threads=1))
    return run_once(path, given), compiled.logits(given), compiled.execution


def check_fp32(path: Path, given: np.ndarray) -> None:
    expected, got, execution = answers(path, "fp32", given)
    assert np.abs(got - expected).max() <= FP32_ERROR * np.abs(expected).max()
    assert set(execution.precisions) <= {"fp32"}
    # what lies around a maximum of negatives, and larger maps
    assert set(execution.outside) <= {"PADV2", "RESIZE_NEAREST_NEIGHBOR"}


def quantised(path: Path, shape: tuple[int, int, int]) -> Path:
    int8 = path.with_name("int8.onnx")
    quantize_static(path, int8, images(32, *shape, seed=1), tuned_for="litert", method="minmax")
    return int8


def check_int8(path: Path, given: np.ndarray) -> Execution:
    """Logits differ by at most some levels of the last tensor, and the answer where two classes are that near."""
    expected, got, execution = answers(path, "int8", given)
    levels = (got - expected) / np.diff(np.unique(expected)).min()
    assert np.abs(levels).max() < 8
    assert np.abs(levels).mean() < 1.5
    assert (got.argmax(1) == expected.argmax(1)).mean() >= 0.9
    return execution


@pytest.mark.parametrize(("op", "activation"), [
    pytest.param(op, activation, marks=[pytest.mark.soak] * ((number - index) % len(ACTIVATIONS) != 0))
    for number, op in enumerate(OPS) for index, activation in enumerate(ACTIVATIONS)])
def test_every_kind_of_block_runs_in_both_precisions(op: str, activation: str, tmp_path: Path) -> None:
    architecture = Architecture(((op,),), 8, 2, 32, activation, 16, 1, 5)
    path = exported(build(architecture), tmp_path / "model.onnx", (1, 16, 16))
    check_fp32(path, images(8, 1, 16, 16))
    execution = check_int8(quantised(path, (1, 16, 16)), images(32, 1, 16, 16))
    assert execution.precisions["int8"] == len(quantised_nodes(Graph(load_fp32(path))))
    assert execution.fallback_share == 0
    assert not execution.outside


class Net(nn.Module):
    """A function of maps between a convolution and a classifier."""

    def __init__(self, function: Any, channels: int = 8, features: int | None = None, act: Any = None) -> None:
        super().__init__()
        self.conv, self.act, self.function = nn.Conv2d(3, channels, 3, padding=1), act or nn.ReLU(), function
        self.pool, self.linear = features is None, nn.Linear(features or channels, 7)

    def forward(self, x: Any) -> Any:
        x = self.function(self.act(self.conv(x)))
        return self.linear((x.mean((2, 3), keepdim=True) if self.pool else x).flatten(1))


def same(x: Any) -> Any:
    return functional.pad(x, (0, 1, 0, 1))


PARTS: dict[str, Any] = {
    "grouped": lambda: Net(nn.Conv2d(8, 8, 3, padding=1, groups=2)),
    "grouped wide": lambda: Net(nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, bias=False)),
    "depthwise multiplied": lambda: Net(nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.Conv2d(16, 8, 1))),
    "dilated": lambda: Net(nn.Conv2d(8, 8, 3, padding=2, dilation=2)),
    "symmetric padding of stride 2": lambda: Net(nn.Conv2d(8, 8, 5, stride=2, padding=2)),
    "TensorFlow's padding": lambda: Net(nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 8, 3, stride=2))),
    "more padding than a kernel": lambda: Net(nn.Conv2d(8, 8, 1, padding=1)),
    "rectangular": lambda: Net(nn.Conv2d(8, 8, (1, 5), stride=(2, 1), padding=(0, 2))),
    "max": lambda: Net(nn.MaxPool2d(3, 2, 1)),
    "max of negatives": lambda: Net(nn.MaxPool2d(3, 2, 1), act=nn.Identity()),
    "max with ceil_mode": lambda: Net(nn.MaxPool2d(3, 2, 0, ceil_mode=True)),
    "average": lambda: Net(nn.AvgPool2d(2, 2)), "average that counts padding": lambda: Net(nn.AvgPool2d(3, 2, 1)),
    "average without padding": lambda: Net(nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "average with ceil_mode": lambda: Net(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)),
    "average with both": lambda: Net(nn.AvgPool2d(3, 2, 1, ceil_mode=True)),
    "clamp of its own": lambda: Net(lambda x: x.clamp(-0.3, 0.7)),
    "clamp on one side": lambda: Net(lambda x: x.clamp(min=0.2)),
    "joined": lambda: Net(lambda x: torch.cat([x, x.sigmoid() * 2], 1)[:, 3:11]),
    "split": lambda: Net(lambda x: torch.cat(list(reversed(x.split([3, 5], 1))), 1)),
    "a map that is flattened": lambda: Net(nn.Conv2d(8, 4, 3, padding=1, stride=5), features=4 * 3 * 3),
    "maps by maps": lambda: Net(lambda x: x * x.mean((2, 3), keepdim=True) + x),
    "difference and quotient": lambda: Net(lambda x: (x - 0.3) / (x + 1.5)), "tanh": lambda: Net(torch.tanh),
    "no bias": lambda: Net(nn.Conv2d(8, 8, 3, padding=1, bias=False)),
    "channels last": lambda: Net(lambda x: functional.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)),
    "enlarged": lambda: Net(lambda x: functional.interpolate(x, scale_factor=(2, 3))),
    "a pad that stays": lambda: Net(lambda x: torch.relu(same(x) - 0.1)),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_operator_answers_as_in_onnx_runtime(part: str, tmp_path: Path) -> None:
    path = exported(PARTS[part](), tmp_path / "model.onnx", (3, 13, 13))
    check_fp32(path, images(4, 3, 13, 13))
    check_int8(quantised(path, (3, 13, 13)), images(32, 3, 13, 13))


@pytest.mark.parametrize(("name", "px"), [("mobilenetv3_small_050", 48), ("resnet10t", 48), *(
    pytest.param(name, 64, marks=pytest.mark.soak) for name in ZOO)])
def test_networks_of_others_run_whole_in_the_delegate(name: str, px: int, tmp_path: Path) -> None:
    path = exported(Baseline(name).build(3, 10, px), tmp_path / "model.onnx", (3, px, px))
    check_fp32(path, images(3, 3, px, px))
    quantize_static(path, tmp_path / "int8.onnx", None, tuned_for="litert")
    compiled = load_runtime("litert").compile(tmp_path / "int8.onnx", Target("t", "litert", "int8", threads=1))
    assert (compiled.execution.fallback_share, compiled.execution.outside) == (0, {})


@pytest.mark.parametrize("tuned_for", ["openvino", "onnxruntime"])
def test_files_made_for_other_runtimes_answer_alike(tuned_for: Any, tmp_path: Path) -> None:
    architecture = Architecture((("ir_r1_k3_s2_e3_c12_se0.25",),), 8, 2, 32, "relu", 16, 1, 5)
    path = exported(build(architecture), tmp_path / "model.onnx", (1, 16, 16))
    quantize_static(path, tmp_path / "int8.onnx", images(32, 1, 16, 16), tuned_for=tuned_for)
    expected, got, _ = answers(tmp_path / "int8.onnx", "int8", images(16, 1, 16, 16))
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


def test_layers_kept_in_fp32_stay_there(tmp_path: Path) -> None:
    path = exported(Net(nn.Conv2d(8, 8, 3, padding=1)), tmp_path / "model.onnx", (3, 13, 13))
    proto = load_fp32(path)
    kept = head_nodes(Graph(proto)) or tuple(node.name for node in proto.graph.node if node.op_type == "Gemm")
    ranges = activation_ranges(proto, images(8, 3, 13, 13), ["minmax"], tuned_for="litert")["minmax"]
    quantise_graph(proto, ranges, note="", tuned_for="litert", kept=kept)
    onnx.save(proto, tmp_path / "int8.onnx")
    expected, got, execution = answers(tmp_path / "int8.onnx", "int8", images(8, 3, 13, 13))
    assert execution.precisions == {"int8": 2, "fp32": 1}
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()


def test_an_operator_that_cannot_be_written_is_named_with_its_node(tmp_path: Path) -> None:
    path = exported(Net(torch.sin), tmp_path / "model.onnx", (3, 13, 13))
    with pytest.raises(FileError, match=r"LiteRT has no operator Sin \(/Sin\) here\. Choose another network"):
        write_tflite(path)
    blurred = Net(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"))
    with pytest.raises(FileError, match=r"LiteRT cannot run Resize .*nearest pixels"):
        write_tflite(exported(blurred, tmp_path / "model.onnx", (3, 13, 13)))
    with pytest.raises(FileError, match=r"absent\.onnx: cannot be read"):
        write_tflite(tmp_path / "absent.onnx")


@pytest.mark.parametrize(("computed", "changes", "said"), [
    (False, {"auto_pad": "SAME_UPPER"}, "Conv the node, whose padding has no numbers"),
    (True, {}, "Conv the node, whose input 1 is computed")])
def test_a_form_that_cannot_be_written_is_named_with_its_node(computed, changes, said, tmp_path):
    weight = onnx.numpy_helper.from_array(np.ones((2, 2, 1, 1), np.float32), "w")
    nodes = [helper.make_node("ReduceMean", ["images"], ["v"], name="before", axes=[0])] if computed else []
    nodes.append(helper.make_node("Conv", ["images", "v" if computed else "w"], ["logits"], name="the node", **changes))
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("images", 1, ["batch", 2, 4, 4])],
                              [helper.make_tensor_value_info("logits", 1, None)], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    with pytest.raises(FileError, match=said):
        write_tflite(tmp_path / "model.onnx")


def test_the_file_says_what_the_onnx_file_says_and_is_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    export_onnx(Net(nn.Conv2d(8, 8, 3)).eval(), path, (3, 9, 9), {"class_names": '["ä", "b"]', "mean": "[0.5]"})
    content = write_tflite(path, batch=2)
    assert content == write_tflite(path, batch=2)
    (tmp_path / "model.tflite").write_bytes(content)
    graph = read_tflite(tmp_path / "model.tflite")
    assert graph.metadata["class_names"] == '["ä", "b"]'
    assert len(graph.metadata["onnx_sha256"]) == 64
    assert (graph.name, graph.shape) == ("images", (2, 9, 9, 3))
    # Stored weights are aligned.
    model, start = schema().Model.GetRootAs(content, 0), np.frombuffer(content, np.uint8).__array_interface__["data"][0]
    assert model.BuffersLength() > 1
    for index in range(1, model.BuffersLength()):
        assert (model.Buffers(index).DataAsNumpy().__array_interface__["data"][0] - start) % 16 == 0


def test_weights_that_lie_beside_the_file_are_those_of_its_own_folder(tmp_path, monkeypatch):
    path = exported(nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), tmp_path / "whole.onnx",
                    (3, 16, 16))
    (tmp_path / "apart").mkdir()
    apart = tmp_path / "apart" / "model.onnx"
    onnx.save_model(onnx.load(str(path)), str(apart), save_as_external_data=True, location="model.data",
                    size_threshold=0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.data").write_bytes(b"\1" * (apart.parent / "model.data").stat().st_size)  # of another network
    given = images(4, 3, 16, 16)
    whole, parted = (load_runtime("litert").compile(file, Target("t", "litert", "fp32", threads=1)).logits(given)
                     for file in (path, apart))
    assert (whole == parted).all()
    (apart.parent / "model.data").unlink()
    with pytest.raises(FileError, match="cannot be read"):
        write_tflite(apart)


@pytest.mark.parametrize("wide", [True, False])
def test_levels_that_litert_lacks_are_refused(wide: bool, tmp_path: Path) -> None:
    path = quantised(exported(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), tmp_path / "m.onnx",
                              (3, 16, 16)), (3, 16, 16))
    proto = onnx.load(str(path))
    node = next(each for each in proto.graph.node if each.op_type == "QuantizeLinear")
    if wide:
        zero = next(each for each in proto.graph.initializer if each.name == node.input[2])
        zero.CopyFrom(helper.make_tensor(zero.name, onnx.TensorProto.UINT16, [], [32768]))
        proto.opset_import[0].version = 21
    else:
        del node.input[2]  # it may be left out: 0 then
    onnx.save_model(proto, str(path))
    with pytest.raises(FileError, match="LiteRT"):
        write_tflite(path)


def tensor(name: str, *shape: int, value: float | None = None) -> onnx.TensorProto:
    array = images(1, *shape, seed=len(name) + len(shape))[0] if value is None else np.full(shape, value, np.float32)
    return onnx.numpy_helper.from_array(array, name)


@pytest.mark.parametrize(("opset", "nodes", "weights"), [
    (6, [("Conv", ["images", "w3"], {}), ("Clip", ["0"], {"min": 0.0, "max": 6.0}), ("Flatten", ["1"], {})],
     {"w3": (8, 3, 3, 3)}),
    (13, [("Conv", ["images", "w3"], {}), ("Conv", ["0", "w8"], {}), ("Conv", ["1", "v8"], {}), ("Flatten", ["2"], {})],
     {"w3": (16, 3, 3, 3), "w8": (16, 16, 3, 3), "v8": (16, 16, 3, 3)}),
    (13, [("Flatten", ["images"], {}), ("Gemm", ["0", "w", "b"], {})], {"w": (768, 5), "b": (1,)}),
    (13, [("Conv", ["images", "w3"], {}), ("Div", ["0", "one"], {}), ("Erf", ["1"], {}), ("Add", ["2", "one"], {}),
          ("Mul", ["0", "3"], {}), ("Mul", ["4", "quarter"], {}), ("Flatten", ["5"], {})],
     {"w3": (8, 3, 1, 1), "one": 1.0, "quarter": 0.25})],
    ids=["bounds as attributes", "nodes without names", "a bias for all", "no GELU"])
def test_forms_of_other_exporters_answer_alike_or_are_refused(
        opset: int, nodes: list[Any], weights: dict[str, Any], tmp_path: Path) -> None:
    made = [helper.make_node(kind, inputs, ["logits" if at == len(nodes) - 1 else str(at)], **attributes)
            for at, (kind, inputs, attributes) in enumerate(nodes)]
    held = [tensor(name, value=of) if isinstance(of, float) else tensor(name, *of) for name, of in weights.items()]
    graph = helper.make_graph(made, "g", [helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [
        "n", 3, 16, 16])], [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, None)], held)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), str(path))
    given = images(1, 3, 16, 16)
    try:
        content = write_tflite(path, 1)
    except FileError as error:
        assert "Erf" in str(error)  # noqa: PT017
        return
    interpreter = Interpreter(model_content=content, num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], given.transpose(0, 2, 3, 1).copy())
    interpreter.invoke()
    got = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
    expected = run_once(path, given)
    assert np.abs(got - expected).max() <= FP32_ERROR * np.abs(expected).max()
