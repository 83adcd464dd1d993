"""ONNX Runtime on a GPU, as far as that shows without one: what is refused, read back, copied and converted.

The CPU provider stands in for CUDA's: the same sessions, profiles and bindings. tests/gpu is for a machine with a GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hwnas.errors import FileError, TargetError
from hwnas.networks.quantize import quantize_static
from hwnas.runtimes import onnxruntime_gpu
from hwnas.runtimes.onnxruntime import OnnxRuntime, run_once
from hwnas.runtimes.onnxruntime_gpu import CudaRuntime, GpuRuntime, TensorRtRuntime, profile_nodes
from hwnas.runtimes.runtime import BoundCall, NodeTime, load_runtime, quantised_in_file
from hwnas.system.libraries import import_onnxruntime
from hwnas.target import Target
from hwnas.testing import check_runtime, contract_images

FP32 = Target("cuda_fp32", "onnxruntime_cuda", "fp32", device="cuda")
FP16 = Target("cuda_fp16", "onnxruntime_cuda", "fp16", device="cuda")
INT8 = Target("trt_int8", "onnxruntime_tensorrt", "int8", device="cuda")


class StandIn(GpuRuntime):
    """The CPU in place of the GPU."""

    memory = "cpu"

    def __init__(self) -> None:
        super().__init__("cuda")
        self.provider = "CPUExecutionProvider"

    def version(self) -> str:
        return f"{self.name} stand-in"

    def rank_providers(self, precision: str) -> list[tuple[str, dict[str, str]]]:
        return [(self.provider, {})]


@pytest.fixture(scope="module")
def files(mnasnet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    int8 = tmp_path_factory.mktemp("models") / "model_int8.onnx"
    quantize_static(mnasnet, int8, contract_images(mnasnet, 64), method="mse", tuned_for="tensorrt")
    return {"fp32": mnasnet, "int8": int8}


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the child process that profiles."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")


@pytest.mark.usefixtures("blocking")
def test_contract(files: dict[str, Path]) -> None:
    reference = np.load(files["fp32"].with_name("reference.npy"))
    for batch in (1, 2):
        target = Target("cuda_fp32", "onnxruntime_cuda", "fp32", batch=batch, device="cuda")
        check_runtime(StandIn(), files["fp32"], target, reference=reference, relative_error=1e-3)


def test_what_is_not_executed_as_asked_is_refused_or_told(files: dict[str, Path]) -> None:
    with pytest.raises(TargetError, match=r"cuda_fp16: fp16 was forced but not honoured: .* run as \d+ fp32\. "
                                          r"Choose a precision that this GPU has\."):
        StandIn().compile(files["fp32"], FP16)
    compiled = StandIn().inspect(files["fp32"], FP16)
    assert compiled.execution.fallback_share == 1.0
    assert set(compiled.execution.precisions) == {"fp32"}


def test_nodes_are_timed_in_a_process_where_they_wait_for_the_gpu(files, monkeypatch):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    compiled = StandIn().compile(files["fp32"], FP32)
    assert compiled.execution.outside == {}

    def answer(module: str, job: dict[str, Any], target: Target, **_: Any) -> list[dict[str, Any]]:
        assert module == "hwnas.runtimes.onnxruntime_gpu"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_LAUNCH_BLOCKING", "1")
            return profile_nodes(job, target, StandIn(), lambda share, note: None)

    monkeypatch.setattr(onnxruntime_gpu, "run_child", answer)
    nodes = compiled.profile(contract_images(files["fp32"], 1), 3)
    assert all(isinstance(node, NodeTime) and node.ms >= 0 for node in nodes)
    assert {"Conv", "Gemm"} <= {node.kind.removeprefix("Fused") for node in nodes}


def test_a_file_for_fp16_keeps_its_ends_in_fp32_and_answers_alike(files: dict[str, Path], tmp_path: Path) -> None:
    half = tmp_path / "half.onnx"
    half.write_bytes(onnxruntime_gpu._convert_to_fp16(files["fp32"]))
    graph = onnx.load(str(half)).graph
    ends = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert ends == {onnx.TensorProto.FLOAT}
    kinds = [numpy_helper.to_array(weight).dtype for weight in graph.initializer]
    assert kinds.count(np.dtype(np.float16)) > len(kinds) / 2
    images = contract_images(files["fp32"], 16)
    plain, other = (load_runtime("onnxruntime").compile(path, Target("t", "onnxruntime", "fp32")).logits(images)
                    for path in (files["fp32"], half))
    assert np.abs(plain - other).max() < 0.02 * np.abs(plain).max()
    (tmp_path / "torn.onnx").write_bytes(b"torn")
    with pytest.raises(FileError, match="cannot be converted to fp16"):
        StandIn().open_session(tmp_path / "torn.onnx", FP16)


def test_a_call_copies_the_images_and_then_runs(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, done = StandIn().compile(files["fp32"], FP32), list[str]()
    there = SimpleNamespace(update_inplace=lambda images: done.append("copy"))
    monkeypatch.setattr(compiled, "_bind", lambda session, images: BoundCall(lambda: done.append("run"), there))
    compiled.bind(contract_images(files["fp32"], 1))()
    assert done == ["copy", "run"]


def node(kind: str, provider: str, type_: str = "float16") -> dict[str, Any]:
    return {"op_name": kind, "provider": f"{provider}ExecutionProvider", "output_type_shape": [{type_: [1, 8]}]}


def test_what_cuda_leaves_to_the_cpu_is_counted() -> None:
    ran = [node("Conv", "CUDA"), node("FusedConv", "CUDA"), node("Conv", "CPU", "float"), node("Relu", "CPU"),
           node("Relu", "CPU"), node("Gemm", "CUDA", "float")]
    assert CudaRuntime().count_nodes(ran, "", 0) == (
        {"fp16": 2, "fp32 on CPU": 1, "fp32": 1}, {"Conv on CPU": 1, "Relu on CPU": 2})


def test_an_engine_counts_as_what_its_pairs_force(files: dict[str, Path]) -> None:
    meant = quantised_in_file(files["int8"])
    every = sum(node.op_type in ("Conv", "Gemm") for node in onnx.load(str(files["int8"])).graph.node)
    engine = node("TRTKernel_graph_0", "Tensorrt", "float")
    assert TensorRtRuntime().count_nodes([engine], files["int8"], meant) == ({"int8": meant, "fp32": every - meant}, {})
    left = [engine, node("Conv", "CUDA", "float"), node("HardSwish", "CPU", "float")]
    assert TensorRtRuntime().count_nodes(left, files["int8"], meant) == (
        {"int8": meant - 1, "fp32": every - meant, "fp32 on CUDA": 1}, {"Conv on CUDA": 1, "HardSwish on CPU": 1})


def test_tensorrt_gets_pairs_without_zero_points_and_biases_in_fp32(files: dict[str, Path]) -> None:
    graph = onnx.load(str(files["int8"])).graph
    weights = {weight.name: numpy_helper.to_array(weight) for weight in graph.initializer}
    pairs = [node for node in graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert pairs
    assert all(weights[node.input[2]].dtype == np.int8 and not weights[node.input[2]].any() for node in pairs)
    biases = [weights[node.input[2]] for node in graph.node if node.op_type == "Conv" and len(node.input) > 2]
    assert biases
    assert all(bias.dtype == np.float32 for bias in biases)
    images = contract_images(files["fp32"], 64)
    answers = [run_once(files[kind], images) for kind in ("fp32", "int8")]
    assert (answers[0].argmax(1) == answers[1].argmax(1)).mean() > 0.8


def test_a_provider_that_is_not_there_is_an_error() -> None:
    lacking = (r"^onnxruntime_cuda: the onnxruntime that is installed has no CUDAExecutionProvider\. .*"
               r"pip install 'hwnas\[cuda\]' && pip uninstall -y onnxruntime && ")
    for ask in (CudaRuntime().version, lambda: CudaRuntime().check(FP16)):
        with pytest.raises(TargetError, match=lacking):
            ask()
    with pytest.raises(TargetError, match=r"'hwnas\[tensorrt\]'"):
        load_runtime("onnxruntime_tensorrt").check(INT8)


class Alone(StandIn):
    """A provider that ONNX Runtime cannot load."""

    def __init__(self) -> None:
        super().__init__()
        self.provider = "CUDAExecutionProvider"

    def rank_providers(self, precision: str) -> list[tuple[str, dict[str, str]]]:
        return [("CPUExecutionProvider", {})]


def test_a_provider_that_is_left_out_in_silence_or_fails_is_an_error_with_its_reason(files, monkeypatch):
    with pytest.raises(TargetError, match=r"^target cuda_fp32: ONNX Runtime could not load its CUDAExecutionProvider, "
                                          r".* would have run on something else\. .*hwnas\[cuda\]"):
        Alone().check(FP32)
    with pytest.raises(TargetError, match="could not load"):
        Alone().open_session(files["fp32"], FP32)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA failure 100: no CUDA-capable device")

    monkeypatch.setattr(import_onnxruntime(), "InferenceSession", fail)
    with pytest.raises(TargetError, match=r"could not load its CUDAExecutionProvider \(.*CUDA failure 100"):
        Alone().check(FP16)


def test_open_sizes_are_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    proto = onnx.load(str(files["fp32"]))
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    del proto.graph.value_info[:]
    onnx.save(proto, str(tmp_path / "open.onnx"))
    with pytest.raises(FileError, match=r"open axes \[1, 'height', 32\]"):
        StandIn().compile(tmp_path / "open.onnx", FP32)


@pytest.mark.parametrize("target", [FP32, FP16, INT8])
def test_a_card_shows_code_that_refuses_the_cpu(target: Target) -> None:
    code = load_runtime(target.runtime).usage("model.onnx", target)  # type: ignore[attr-defined]
    compile(code, "card", "exec")
    assert "assert session.get_providers()[0]" in code
    assert ("convert_float_to_float16" in code) == (target.precision == "fp16")


def test_a_card_says_nothing_of_the_machine_that_wrote_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))
    given: dict[str, Any] = {}

    def session(path: str, options: Any, **rest: Any) -> Any:
        given.update(rest)
        return SimpleNamespace(get_providers=lambda: ["TensorrtExecutionProvider"])

    monkeypatch.setattr(import_onnxruntime(), "InferenceSession", session)
    runtime = TensorRtRuntime()
    runtime.open_session("model.onnx", INT8, optimised=tmp_path / "optimised.onnx")
    assert given["providers"][0][1]["trt_timing_cache_path"] == str(tmp_path / "tensorrt")
    assert (tmp_path / "tensorrt").is_dir()
    assert str(tmp_path) not in runtime.usage("model.onnx", INT8)
    asked = {precision: runtime.rank_providers(precision)[0][1]["trt_int8_enable"] for precision in runtime.precisions}
    assert asked == {"int8": "True", "fp32": "False"}


def test_biases_stay_as_tensorrt_wants_them(files: dict[str, Path], tmp_path: Path) -> None:
    """Its parser takes no int32 biases, and ONNX Runtime would make some before it asks the provider."""
    types = []
    for number, runtime in enumerate((OnnxRuntime(), StandIn())):
        made = tmp_path / f"{number}.onnx"
        runtime.open_session(files["int8"], INT8, optimised=made)
        graph = onnx.load(str(made)).graph
        stored = {each.name: each.data_type for each in graph.initializer}
        types.append({stored[node.input[0]] for node in graph.node if node.op_type == "DequantizeLinear"
                      and node.input[0] in stored})
    assert onnx.TensorProto.INT32 in types[0]
    assert types[1] == {onnx.TensorProto.INT8}
