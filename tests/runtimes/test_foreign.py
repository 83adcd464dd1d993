"""Model files: what would harm or cannot be timed is refused in one line that says why, and nodes are never too few."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper

from hwnas.errors import CandidateError, FileError, ModelError
from hwnas.runtimes import child
from hwnas.runtimes.child import probe_model
from hwnas.runtimes.foreign import check_path, input_of, load_checked, read_model, sized
from hwnas.runtimes.runtime import load_runtime, nodes_of
from hwnas.target import Target

TARGET = Target("t", "onnxruntime", "fp32")


def model(nodes: list[Any], shape: tuple[Any, ...] = ("N", 3, 8, 8), inputs: list[Any] | None = None,
          weights: tuple[Any, ...] = (), functions: tuple[Any, ...] = (), kind: int = T.FLOAT) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs or [helper.make_tensor_value_info("x", kind, shape)],
                              [helper.make_tensor_value_info("y", kind, None)], list(weights))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("custom", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=list(functions))


def relu() -> list[Any]:
    return [helper.make_node("Relu", ["x"], ["y"])]


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def external(location: str) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name="w", data_type=T.FLOAT, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def inside_if(tensor: onnx.TensorProto) -> list[Any]:
    body = helper.make_graph([helper.make_node("Add", ["x", "w"], ["o"])], "b", [],
                             [helper.make_tensor_value_info("o", T.FLOAT, None)], [tensor])
    return [helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)]


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    empty = tmp_path / "empty.onnx"
    empty.touch()
    large = tmp_path / "large.onnx"
    large.touch()
    os.truncate(large, 2 << 20)
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    for path, why in ((tmp_path / "absent.onnx", "no such file"), (tmp_path, "is a directory"), (empty, "is empty"),
                      (pipe, "not a regular file"), (large, "memory limit is 1 MiB")):
        with pytest.raises(ModelError, match=why):
            check_path(path, 1)


@pytest.mark.parametrize("content", [b"hello, this is text\n" * 20, b"\x08" * 4096, b"PK\x03\x04" + bytes(500),
                                     model(relu()).SerializeToString()[:-30]], ids=["text", "varints", "zip", "torn"])
def test_what_is_not_onnx(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not an ONNX file, or is torn"):
        load_checked(path)


@pytest.mark.parametrize("location", ["../w.bin", "/etc/hostname", "a/../../w.bin", "..\\w.bin", "", "link.bin"])
@pytest.mark.parametrize("where", ["graph", "subgraph", "attribute", "function"])
def test_external_data_outside_the_folder_is_refused(location: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(4))
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    tensor = external(location)
    constant = helper.make_node("Constant", [], ["k"], value=tensor)
    proto = {
        "graph": lambda: model(relu(), weights=(tensor,)), "subgraph": lambda: model(inside_if(tensor)),
        "attribute": lambda: model([constant, *relu()]),
        "function": lambda: model(relu(), functions=(helper.make_function(
            "custom", "F", ["x"], ["k"], [constant], [helper.make_opsetid("", 17)]),))}[where]()
    with pytest.raises(ModelError, match="external data outside its folder"):
        load_checked(saved(proto, folder))


def test_external_data_beside_the_model(tmp_path: Path) -> None:
    path = saved(model(relu(), weights=(external("w.bin"),)), tmp_path)
    with pytest.raises(ModelError, match=r"w\.bin.*no such file"):
        load_checked(path)
    (tmp_path / "w.bin").write_bytes(bytes(4))
    assert load_checked(path).graph.node


def wrapped(content: bytes, *fields: int) -> bytes:
    """`content` as the value of nested length-delimited protobuf fields, innermost last."""
    for field in reversed(fields):
        size, length = len(content), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        content = bytes([field << 3 | 2]) + length + bytes([size]) + content
    return content


@pytest.mark.parametrize(("depth", "why"), [(20, "more than 16 deep"), (5000, "deeper than ONNX files may")])
def test_nested_graphs(depth: int, why: str, tmp_path: Path) -> None:
    content = model(relu()).graph.SerializeToString()
    for _ in range(depth):
        content = wrapped(content, 1, 5, 6)  # node, attribute, graph
    path = tmp_path / "m.onnx"
    path.write_bytes(model(relu()).SerializeToString() + wrapped(content, 7))
    with pytest.raises(ModelError, match=why):
        load_checked(path)
    with pytest.raises(CandidateError, match=why):
        probe_model(path, TARGET)


def function(name: str, *calls: str) -> onnx.FunctionProto:
    nodes = [helper.make_node(call, ["x"], ["y"], domain="custom") for call in calls]
    return helper.make_function("custom", name, ["x"], ["y"], nodes or relu(),
                                [helper.make_opsetid("", 17), helper.make_opsetid("custom", 1)])


@pytest.mark.parametrize(("functions", "why"), [
    ([function("F0"), *(function(f"F{i}", f"F{i - 1}", f"F{i - 1}") for i in range(1, 40))], "blows up"),
    ([function("F0"), *(function(f"F{i}", f"F{i - 1}") for i in range(1, 5000))], "blows up"),
    ([function("F0", "F1"), function("F1", "F0")], "calls itself"), ([function("F0", "F0")], "calls itself"),
    ([function("F0"), function("F1", "F0", "F0")], ""),
], ids=["doubling", "chain", "ring", "self", "few"])
def test_functions_that_explode(functions: list[Any], why: str, tmp_path: Path) -> None:
    last = functions[-1].name
    proto = model([helper.make_node(last, ["x"], ["y"], domain="custom")], functions=tuple(functions))
    with pytest.raises(ModelError, match=why) if why else nullcontext():
        load_checked(saved(proto, tmp_path))


def test_inputs_that_cannot_be_timed() -> None:
    two = [helper.make_tensor_value_info(name, T.FLOAT, ["N", 3]) for name in ("x", "z")]
    for proto, why in ((model(relu(), inputs=two), r"2 inputs \(x, z\)"),
                       (model(relu(), kind=T.FLOAT16), "takes float16"),
                       (model(relu(), kind=T.UINT8), "takes uint8"), (model(relu(), ("N",)), "has 1 axes"),
                       (model(relu(), None), "known axes")):  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=why):
            input_of(proto, "m.onnx")
    # Weights among the inputs are none.
    both = [helper.make_tensor_value_info("x", T.FLOAT, ["N", 3]), helper.make_tensor_value_info("w", T.FLOAT, [1])]
    weight = helper.make_tensor("w", T.FLOAT, [1], [1.0])
    assert input_of(model(relu(), inputs=both, weights=(weight,)), "m").shape == (None, 3)


@pytest.mark.parametrize(("shape", "channels", "size", "expected"), [
    (("N", 3, 8, 8), None, None, (3, 8, 8)), (("N", 3, "h", "w"), None, 16, (3, 16, 16)),
    (("N", "c", "h", "w"), 1, 16, (1, 16, 16)), (("N", "h", "w", 3), None, 16, (16, 16, 3)),
    (("N", 3, 8, 8), 3, 8, (3, 8, 8)), (("N", 20), None, None, (20,))])
def test_open_axes_are_filled(shape: Any, channels: Any, size: Any, expected: Any) -> None:
    assert sized(input_of(model(relu(), shape), "m"), "m", channels, size) == expected


@pytest.mark.parametrize(("shape", "channels", "size", "why"), [
    (("N", 3, "h", "w"), None, None, "Add image_size=N"), (("N", "c", 8, 8), None, None, "Add channels=N"),
    (("N", 3, 8, 8), None, 16, "fixed to 8, but image_size=16"),
    (("N", "length"), None, 16, "axis 1 .* no fixed size")])
def test_axes_that_stay_open(shape: Any, channels: Any, size: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        sized(input_of(model(relu(), shape), "m"), "m", channels, size)


def test_a_fixed_batch_axis() -> None:
    found = input_of(model(relu(), (1, 3, 8, 8)), "m")
    sized(found, "m", None, None, [1])
    with pytest.raises(ModelError, match=r"fixed to 1; batch=4 cannot"):
        sized(found, "m", None, None, [1, 4])
    sized(input_of(model(relu()), "m"), "m", None, None, [1, 4])


def test_a_tflite_file_tells_its_input_where_hwnas_wrote_it_and_litert_runs_it(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from hwnas.networks.litert.tflite import TfliteFile

    path, made = tmp_path / "m.tflite", TfliteFile()
    given, told = (made.tensor(name, (1, 8, 8, 3)) for name in ("in0", "out0"))
    made.operator("ADD", [given, given], [told], "AddOptions")
    path.write_bytes(made.pack({"in0": given}, {"out0": told}, {"class_names": "[]"}))
    read = read_model(path, load_runtime("litert"))
    assert (read.input.shape, read.input.name, read.proto) == ((None, 3, 8, 8), "in0", None)
    assert read.metadata == {"class_names": "[]"}
    with pytest.raises(ModelError, match=r"is a TFLite file; onnxruntime takes ONNX files\. .*target=edge_int8"):
        read_model(path, load_runtime("onnxruntime"))
    with pytest.raises(ModelError, match="is a TFLite file, and an ONNX file is needed here"):
        load_checked(path)
    path.write_bytes(made.pack({"in0": given}, {"out0": told}, {}))
    with pytest.raises(ModelError, match="that hwnas did not write"):
        read_model(path, load_runtime("litert"))


@pytest.mark.parametrize(("device", "longest_s"), [("cpu", 60), ("cuda", 900), ("npu", 900)])
def test_devices_that_no_runtime_here_has_may_take_as_long_as_a_gpu(device, longest_s, monkeypatch):
    asked = []
    monkeypatch.setattr(child, "run_child", lambda *given, timeout_s, **_: asked.append((timeout_s, given[2].threads)))
    probe_model("model.onnx", Target("mine", "mine", "fp32", device=device, threads=0))
    assert asked == [(longest_s, 4)]  # the stacks of a thread for each of many cores need the memory that it may have


def test_the_stacks_of_many_threads_leave_a_child_the_memory_that_it_may_have(monkeypatch):
    monkeypatch.setattr(child, "usable_cores", lambda: [*range(256)])
    assert child.stacks_mb([1]) == 0
    assert child.stacks_mb([1, 0]) > 8 * 9 * 255


def count(path: Path) -> int:
    """Nodes of a file; 0 where it is refused, which any other error is not."""
    try:
        return len(nodes_of(path))
    except FileError:
        return 0


def test_a_torn_graph_is_an_error_and_never_fewer_nodes(tmp_path: Path) -> None:
    path = tmp_path / "torn.onnx"
    inner = helper.make_graph([helper.make_node("Inner", ["a"], ["b"])], "g", [], [])
    nodes = [helper.make_node("Conv", ["a", "b"], ["c"], body=inner) for _ in range(3)]
    content = helper.make_model(helper.make_graph(nodes, "g", [], []), ir_version=9).SerializeToString()
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        assert count(path) in (0, 3)  # 3: what is behind the graph was torn off
    assert [node.op_type for node in nodes_of(path)] == ["Conv"] * 3


@given(st.binary(max_size=300))
def test_any_bytes_are_nodes_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.onnx"
    path.write_bytes(content)
    assert count(path) >= 0
