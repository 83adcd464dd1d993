"""The check of a network: every fallback that a runtime's own profile shows is found, and each node has its share."""

from __future__ import annotations

import csv
import io
import json
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from hwnas.check import __main__ as command
from hwnas.check import task
from hwnas.check.report import CHECK, advice
from hwnas.cli.command import run_command
from hwnas.errors import FileError
from hwnas.networks.baselines import Baseline
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.quantize import quantize_static, tuning_of
from hwnas.runtimes.executed import DEVICE, FALLBACKS, INSERTED, LEFT, PRECISION, REFERENCE, Executed, executed
from hwnas.runtimes.onnxruntime import OnnxRuntime
from hwnas.runtimes.openvino import _config, import_openvino
from hwnas.runtimes.runtime import Execution, NodeTime, inspected, load_runtime
from hwnas.space.architecture import Architecture
from hwnas.target import Target
from hwnas.testing import contract_images

OPENVINO, ORT = Target("ov", "openvino", "int8"), Target("ort", "onnxruntime", "int8")
LITERT = Target("edge", "litert", "int8")
RUNTIMES = (OPENVINO, ORT, LITERT) if find_spec("ai_edge_litert") else (OPENVINO, ORT)
NETWORKS = {
    "plain": "stem8s2 ds_r1_k3_s1_c8 ir_r1_k3_s2_e3_c16 head16 relu@16",
    "squeezed": "stem8s2 ir_r2_k3_s1_e3_c8_se0.25 cn_r1_k3_s2_c16 head16 hard_swish@16",
    "swish": "stem8s2 ir_r1_k5_s1_e3_c8_se0.25 er_r1_k3_s2_e3_c16 head16 swish@16",
    "convnext": "stem8s2 cxl_r1_k5_s1_e2_c8 cx_r1_k3_s2_e2_c16 head16 gelu@16",
}


def files_of(network: Any, folder: Path, shape: tuple[int, int, int]) -> dict[str, Path]:
    """Its fp32 file, and one in int8 for each runtime."""
    files = {"fp32": folder / "model.onnx"}
    export_onnx(randomise(network.eval(), 0), files["fp32"], shape)
    for target in RUNTIMES:
        files[target.runtime] = folder / f"{target.runtime}.onnx"
        quantize_static(files["fp32"], files[target.runtime], None, tuned_for=tuning_of(target))
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    from hwnas.networks.build import build

    made = {}
    for name, text in NETWORKS.items():
        made[name] = files_of(build(Architecture.parse(text, 3, 4)), tmp_path_factory.mktemp(name), (3, 16, 16))
    return made


def check(path: Path, target: Target, repeats: int = 5) -> Executed:
    compiled = inspected(load_runtime(target.runtime), path, target)
    return executed(compiled.profile(contract_images(path, target.batch), repeats), path, target)


# What the runtimes' own words say, read here once more by other means


def openvino_layers(path: Path, target: Target) -> list[tuple[str, str, str, str]]:
    """(name, kind, kernel, precision) of every layer that OpenVINO has counters for."""
    core = import_openvino().Core()
    model = core.read_model(str(path))
    model.reshape([target.batch, *(axis.get_length() for axis in list(model.input(0).partial_shape)[1:])])
    compiled = core.compile_model(model, "CPU", _config(target, counters=True))
    request = compiled.create_infer_request()
    request.infer([contract_images(path, target.batch)])
    return [(entry.node_name, entry.node_type, entry.exec_type, entry.exec_type.rsplit("_", 1)[-1])
            for entry in request.get_profiling_info()
            if entry.node_type not in ("Parameter", "Result") and entry.exec_type != "undef"]


def unfused_in_onnx_runtime(path: Path, target: Target, folder: Path) -> list[str]:
    """Operators of the optimised graph that stand alone between a DequantizeLinear on every side and a
    QuantizeLinear: quantised in the file, and run in floating point."""
    optimised = folder / "optimised.onnx"
    OnnxRuntime().open_session(path, target, optimised=optimised)
    graph = onnx.load(str(optimised)).graph
    producer = {name: node for node in graph.node for name in node.output}
    weights = {weight.name for weight in graph.initializer}
    readers: dict[str, list[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node.op_type)
    return [node.op_type for node in graph.node
            if (data := [name for name in node.input if name not in weights])
            and all(name in producer and producer[name].op_type == "DequantizeLinear" for name in data)
            and node.op_type != "QuantizeLinear" and {*readers.get(node.output[0], ["nothing"])} == {"QuantizeLinear"}]


def in_floating_point_in_litert(path: Path) -> tuple[list[str], list[str], list[str]]:
    """By the types of the file that LiteRT is given: names of what runs in fp32 between DEQUANTIZE on every side and
    QUANTIZE, with no weights among it; of the conversions; and, by a delegate that may take one operator at a time
    only, of what it does not take."""
    from ai_edge_litert.interpreter import Interpreter

    from hwnas.networks.lowering import write_tflite
    from hwnas.networks.tflite import read_tflite

    content = write_tflite(path)
    file = path.with_suffix(".tflite")
    file.write_bytes(content)
    graph = read_tflite(file)
    made = {operator.outputs[0]: operator for operator in graph.operators}
    floats = [each for each in graph.operators if each.kind not in ("DEQUANTIZE", "QUANTIZE")
              and graph.tensors[each.outputs[0]].kind == "float32"]
    islands = {each.outputs[0]: each.outputs[0] for each in floats}
    for each in floats:
        for tensor in each.inputs:
            if tensor in islands and islands[tensor] != islands[each.outputs[0]]:
                old, new = islands[tensor], islands[each.outputs[0]]
                islands = {key: new if value == old else value for key, value in islands.items()}
    fallen = []
    for island in {*islands.values()}:
        part = [each for each in floats if islands[each.outputs[0]] == island]
        data = [tensor for each in part for tensor in each.inputs
                if tensor >= 0 and not graph.tensors[tensor].stored and tensor not in islands]
        outward = [reader for reader in graph.operators if reader not in part
                   and {*reader.inputs} & {each.outputs[0] for each in part}]
        asked = data and all(tensor in made and made[tensor].kind == "DEQUANTIZE" for tensor in data)
        if asked and outward and {reader.kind for reader in outward} == {"QUANTIZE"} \
                and not any(each.kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED") for each in part):
            fallen += [graph.tensors[each.outputs[0]].name for each in part
                       if each.kind != "RESHAPE" or each.inputs[0] not in islands]  # it moves what another wrote
    interpreter = Interpreter(model_content=content, experimental_disable_delegate_node_fusion=True)
    interpreter.allocate_tensors()
    nodes = interpreter._get_ops_details()
    taken = {int(tensor) for node in nodes if node["op_name"] == "DELEGATE" for tensor in node["outputs"]}
    left = [graph.tensors[each.outputs[0]].name for each in graph.operators if each.outputs[0] not in taken]
    return fallen, [graph.tensors[each.outputs[0]].name for each in graph.operators
                    if each.kind in ("DEQUANTIZE", "QUANTIZE")], left


def assert_nothing_is_missed(paths: dict[str, Path], folder: Path) -> None:
    """In every runtime and precision."""
    for precision in ("int8", "fp32"):
        for base in RUNTIMES:
            assert_found(base, precision, paths["fp32" if precision == "fp32" else base.runtime], folder)


def refusal(path: Path) -> str:
    """What LiteRT's writer says of a network that it cannot say; empty for others."""
    from hwnas.networks.lowering import write_tflite

    try:
        write_tflite(path)
    except FileError as error:
        return error.fact
    return ""


def assert_found(base: Target, precision: str, path: Path, folder: Path) -> None:
    target = Target("t", base.runtime, precision)
    if base is LITERT and (why := refusal(path)):  # by name, and nothing of it runs anywhere
        assert {node.op_type for node in onnx.load(str(path)).graph.node} & {*re.findall(r"\w+", why)}
        with pytest.raises(FileError, match=re.escape(why)):
            check(path, target, repeats=2)
        return
    result = check(path, target, repeats=2)
    assert sum(node.share for node in result.nodes) == pytest.approx(1)
    kinds = [node.kind for node in result.nodes]
    if base is OPENVINO:
        layers = openvino_layers(path, target)
        assert len(kinds) == len(layers)
        references = [name for name, _, kernel, _ in layers if kernel.startswith("ref")]
        assert sum(REFERENCE in node.findings for node in result.nodes) == len(references)
        conversions = [kind for _, kind, *_ in layers if kind in ("Reorder", "Convert")]
    elif base is ORT:
        alone = unfused_in_onnx_runtime(path, target, folder)
        told = [node.kind for node in result.nodes if {PRECISION, INSERTED} & {*node.findings}]
        assert not [kind for kind in alone if kind not in told]
        assert sum(told.count(kind) for kind in {*alone}) >= len(alone)
        conversions = [kind for kind in kinds if kind.startswith("Reorder") or kind.endswith("eLinear")]
    else:
        fallen, conversions, left = in_floating_point_in_litert(path)
        assert len(profiled(path, target)) == len(result.nodes)
        nodes = dict(zip(profiled(path, target), result.nodes, strict=True))
        missed = [name for name in fallen if not {PRECISION, INSERTED} & {*nodes[name].findings}]
        assert not missed, [nodes[name] for name in missed]
        assert {name for name, node in nodes.items() if PRECISION in node.findings} <= {*fallen}
        assert {name for name, node in nodes.items() if REFERENCE in node.findings} == {*left} & {*nodes}
        assert [name for name in conversions if INSERTED not in nodes[name].findings] == []
    assert sum(INSERTED in node.findings for node in result.nodes) >= len(conversions)
    assert_weighted_are_counted(result, inspected(load_runtime(base.runtime), path, target).execution)


def profiled(path: Path, target: Target) -> list[str]:
    """LiteRT's names of the nodes that it is profiled by, in their order."""
    compiled = inspected(load_runtime("litert"), path, target)
    return [node.name for node in compiled.profile(contract_images(path, target.batch), 1)]


def assert_weighted_are_counted(result: Executed, execution: Execution) -> None:
    """As many convolutions and matrix products in each precision as the compiled graph has."""
    weighted = {each.name for each in result.operators if each.weighted}
    nodes = [node for node in result.nodes if INSERTED not in node.findings and {*node.made_of} & weighted]
    counts = {name: sum(node.precision == name for node in nodes) for name in execution.precisions}
    assert counts == dict(execution.precisions)
    fallen = sum(PRECISION in node.findings and node.meant == "int8" for node in nodes)
    meant = sum(each.weighted and each.meant == "int8" for each in result.operators)
    if execution.precision == "int8":
        assert fallen == round(execution.fallback_share * meant)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_fallback_of_the_profile_is_found(files: dict[str, dict[str, Path]], name: str, tmp_path: Path) -> None:
    assert_nothing_is_missed(files[name], tmp_path)


TWENTY = ("resnet18", "resnet10t", "mobilenetv2_050", "mobilenetv3_small_050", "mobilenetv3_large_100",
          "efficientnet_b0", "efficientnet_lite0", "mnasnet_small", "tinynet_e", "lcnet_050", "regnetx_002",
          "regnety_002", "ghostnet_100", "mobilenetv1_100", "spnasnet_100", "convnext_atto", "mixnet_s",
          "fbnetc_100", "mobilenetv4_conv_small_050", "dla46x_c", "semnasnet_050", "hardcorenas_a", "efficientvit_b0")


@pytest.mark.soak
@pytest.mark.parametrize("name", TWENTY)
def test_every_fallback_of_timm_networks_is_found(name: str, tmp_path: Path) -> None:
    network = Baseline(name).build(3, 10, 64)
    assert_nothing_is_missed(files_of(network, tmp_path, (3, 64, 64)), tmp_path)


def test_an_activation_that_is_not_fused_is_named_with_what_it_costs(files: dict[str, dict[str, Path]]) -> None:
    result = check(files["squeezed"]["onnxruntime"], ORT)
    fallen = [node for node in result.nodes if node.role == "HardSwish"]
    assert {(node.precision, node.findings) for node in fallen} == {("fp32", (PRECISION,))}
    text = "\n".join(advice(result, ORT))
    every = [each for each in result.operators if each.role == "HardSwish"]
    n, meant = len(every), sum(each.meant == "int8" for each in every)
    assert n > meant > 0  # those inside squeeze-and-excite stay in fp32
    assert f"falls back: {meant} of {n} HardSwish: int8 was asked for, and fp32 runs: " in text
    assert "with the conversions around" in text
    assert re.search(r"activations: HardSwish \d+\.\d% \(\d+ of \d+ in nodes", text)
    assert "around HardSwish" in text
    fused = "\n".join(advice(check(files["squeezed"]["openvino"], OPENVINO), OPENVINO))
    assert f"HardSwish 0 % (all {n} fused or folded)" in fused


@pytest.mark.skipif(LITERT not in RUNTIMES, reason="LiteRT is not installed")
def test_litert_tells_what_runs_in_floating_point_inside_an_int8_file(files: dict[str, dict[str, Path]]) -> None:
    result = check(files["squeezed"]["litert"], LITERT)
    fallen = [node for node in result.nodes if node.role == "HardSwish"]
    assert {(node.precision, node.implementation, node.findings) for node in fallen if node.meant} == {
        ("fp32", "XNNPACK", (PRECISION,))}
    serving = [node.kind for node in result.nodes if INSERTED in node.findings and node.serves == "HardSwish"]
    n = sum(bool(node.meant) for node in fallen)
    assert serving.count("DEQUANTIZE") >= n
    assert serving.count("QUANTIZE") >= n
    assert {node.precision for node in result.nodes if node.role == "Conv (depthwise)"} == {"int8"}
    text = "\n".join(advice(result, LITERT))
    assert f"falls back: {n} of {len(fallen)} HardSwish: int8 was asked for, and fp32 runs: " in text
    assert "left in fp32 by the file: 4 Conv" in text  # of two squeeze-and-excites
    assert "does not tell" not in text


@pytest.mark.parametrize("target", [OPENVINO, ORT])
def test_what_the_file_leaves_in_floating_point_is_no_fallback(files: dict[str, dict[str, Path]],
                                                              target: Target) -> None:
    result = check(files["swish"][target.runtime], target)
    left = [node for node in result.nodes if LEFT in node.findings]
    assert len(left) == 2  # of one squeeze-and-excite
    assert not any(node.falls_back for node in left)
    assert "left in fp32 by the file: 2 Conv" in "\n".join(advice(result, target))


def test_gelu_and_swish_are_counted_once(files: dict[str, dict[str, Path]]) -> None:
    for name, role, count in (("swish", "Swish", 6), ("convnext", "Gelu", 4)):
        result = check(files[name]["onnxruntime"], ORT)
        assert len({each.whole for each in result.operators if each.role == role}) == count


# From programmed profiles


def programmed(files: dict[str, dict[str, Path]], *nodes: NodeTime, target: Target = ORT) -> Executed:
    return executed(nodes, files["plain"]["onnxruntime"], target)


def test_a_layer_that_a_runtime_drops_is_named_with_its_cost(files: dict[str, dict[str, Path]]) -> None:
    nodes = [NodeTime("/classifier/Gemm", "Gemm", 0.12, "fp32", "gemm"),
             NodeTime("/conv_stem/Conv", "QLinearConv", 0.88, "int8", "conv")]
    result = programmed(files, *nodes)
    assert [node.findings for node in result.nodes] == [(PRECISION,), ()]
    assert ("falls back: 1 of 1 Gemm: int8 was asked for, and fp32 runs: 12.0% of the time (/classifier/Gemm)"
            in [*advice(result, ORT)])


def test_other_devices_and_reference_kernels_are_found_by_what_the_runtime_says(
        files: dict[str, dict[str, Path]]) -> None:
    nodes = [NodeTime("/conv_stem/Conv", "Conv", 1.0, "int8", "conv", "cpu"),
             NodeTime("/classifier/Gemm", "Gemm", 2.0, "int8", "plain", "cuda", reference=True)]
    result = programmed(files, *nodes, target=Target("t", "onnxruntime", "int8", device="cuda"))
    assert [node.findings for node in result.nodes] == [(DEVICE,), (REFERENCE,)]
    text = "\n".join(advice(result, Target("t", "onnxruntime", "int8", device="cuda")))
    assert "1 Conv: it runs on cpu, and not on cuda: 33.3% of the time" in re.sub(r"1 of \d+", "1", text)
    assert "no fast kernel takes it (plain runs): 66.7% of the time" in text


def test_a_runtime_that_tells_only_times_is_not_believed_to_run_in_int8(files: dict[str, dict[str, Path]]) -> None:
    result = programmed(files, NodeTime("/conv_stem/Conv", "Conv", 1.0), NodeTime("mine", "Odd", 1.0))
    assert not any({*node.findings} & {*FALLBACKS} for node in result.nodes)
    assert "does not tell what its nodes are executed in" in next(iter(advice(result, ORT)))


words = st.text("/_:.abConvReorder0123456789,", min_size=1, max_size=30)
profiles = st.lists(st.builds(NodeTime, words, words, st.floats(0, 1e6) | st.just(0.0), st.sampled_from(
    ["", "fp32", "int8", "i32"]), words, st.sampled_from(["", "cpu", "cuda"]), st.booleans()), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(nodes=profiles)
def test_shares_sum_to_one_whatever_a_runtime_says(files: dict[str, dict[str, Path]], nodes: list[NodeTime]) -> None:
    result = programmed(files, *nodes)
    assert sum(node.share for node in result.nodes) == pytest.approx(1)
    assert len(result.nodes) == len(nodes)
    assert Executed.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    assert all("\n" not in line for line in advice(result, ORT))


# The command as a user types it


def command_line(*overrides: str) -> int:
    return run_command(command.main, "check", command.USAGE, ["-q", *overrides])


def test_a_file_is_checked_in_a_child(files: dict[str, dict[str, Path]], tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    path, out = files["squeezed"]["onnxruntime"], tmp_path / "c.json"
    given = ("+target=ort_int8", f"model={path}", "repeats=3", f"out={out}")
    assert command_line(*given) == 0
    table = out.with_suffix(".csv").read_text()
    printed = capsys.readouterr().out
    out.with_suffix(".csv").write_text(table.splitlines()[0].rpartition(",")[0])  # as of an earlier version
    assert command_line(*given) == 0  # its own files are replaced
    out.with_suffix(".csv").write_text("mine\n" + table)
    assert command_line(*given) == 2
    assert "hwnas did not write this file" in capsys.readouterr().err
    out.with_suffix(".csv").write_text(table)
    for part in (str(path), "operator", "HardSwish", "another precision", "inserted for HardSwish", "falls back: "):
        assert part in printed
    data = CHECK.read(out)
    rows = [*csv.DictReader(io.StringIO(out.with_suffix(".csv").read_text()))]
    assert len(rows) == len(data["nodes"])
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1, abs=1e-4)
    assert {row["findings"] for row in rows} >= {"", INSERTED, LEFT, PRECISION}
    assert data["target"]["name"] == "ort_int8"
    assert data["advice"]


def one_node(folder: Path, operator: str) -> Path:
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=["batch", 3, 8, 8])
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", [value("x")], [value("y")])
    path = folder / "one.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


@pytest.mark.parametrize(("overrides", "why"), [
    (["+target=ort_int8"], "which network, or which space"),
    (["+target=ort_int8", "model=m.onnx", "space=mnasnet"], "only one of them"),
    (["+target=ort_int8", "model=absent.onnx"], "no such file"),
    (["+target=ort_int8", "model=."], "is a directory"),
    (["+target=ort_int8", "model=timm:resnet1888"], "resnet18"),
    (["+target=ort_int8", "model=FP32"], "Add quantize=true"),
    (["+target=ort_fp32", "model=INT8"], "is quantised"),
    (["+target=ort_fp32", "model=ODD"], "has no operator Frobnicate"),
    (["+target=ort_fp32", "model=FP32", "quantize=true"], "goes with an int8 target"),
    (["+target=ort_fp32", "model=FP32", "classes=3"], "timm: networks only"),
    (["+target=ort_fp32", "model=FP32", "image_size=99"], "is fixed to 16"),
    (["+target=ort_int9", "model=FP32"], "ort_int8"),
])
def test_bad_input_is_one_line(overrides: list[str], why: str, files: dict[str, dict[str, Path]], tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    names = {"FP32": files["plain"]["fp32"], "INT8": files["plain"]["onnxruntime"],
             "ODD": one_node(tmp_path, "Frobnicate")}
    given_overrides = [re.sub("FP32|INT8|ODD", lambda match: str(names[match[0]]), text)
                       if text.startswith("model=") else text for text in overrides]
    assert command_line(*given_overrides) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert re.search(why, said), said


def test_a_file_that_the_runtime_would_refuse_for_falling_back_is_looked_at(
        files: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    from hwnas.runtimes import onnxruntime

    monkeypatch.setattr(onnxruntime, "_count_executed", lambda optimised: {"fp32": 9})
    job = {"path": str(files["plain"]["onnxruntime"]), "label": "m.onnx", "repeats": 1, "batches": [1],
           "memory_mb": 4096, "quantize": False, "channels": None, "image_size": None}
    result = task.run(job, ORT, load_runtime("onnxruntime"), lambda share, note: None)
    assert result["execution"]["fallback_share"] == 1
    assert result["nodes"]
