"""ONNX Runtime on a GPU, as far as that shows without one: what is refused, read back, copied and converted.

The CPU provider stands in for CUDA's: the same sessions, profiles and bindings. tests/gpu is for a machine with a GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hwnas.cli.command import run_command
from hwnas.errors import FileError, TargetError
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.quantize import quantize_static
from hwnas.runtimes import onnxruntime_gpu
from hwnas.runtimes.onnxruntime import run_once
from hwnas.runtimes.onnxruntime_gpu import CudaRuntime, GpuCompiled, Providers, TensorRtRuntime, profiled
from hwnas.runtimes.runtime import load_runtime, quantised_in_file
from hwnas.system import gpu
from hwnas.system.libraries import declare_missing
from hwnas.target import Target
from hwnas.testing import check_runtime, contract_images

declare_missing()

import timm  # noqa: E402
import torch  # noqa: E402

FP32 = Target("cuda_fp32", "onnxruntime_cuda", "fp32", device="cuda")
FP16 = Target("cuda_fp16", "onnxruntime_cuda", "fp16", device="cuda")
INT8 = Target("trt_int8", "onnxruntime_tensorrt", "int8", device="cuda")


class StandIn(CudaRuntime):
    """The CPU in place of the GPU."""

    memory, provider = "cpu", "CPUExecutionProvider"

    def options(self, precision: str = "fp32") -> Providers:
        return [(self.provider, {})]

    def version(self) -> str:
        return f"{self.name} stand-in"

    def _check_installed(self, who: str) -> None:
        return


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = randomise(timm.create_model("mnasnet_small", in_chans=1, num_classes=5), 0)
    found = {"fp32": folder / "model.onnx", "int8": folder / "model_int8.onnx"}
    export_onnx(model, found["fp32"], (1, 32, 32))
    quantize_static(found["fp32"], found["int8"], contract_images(found["fp32"], 64), method="mse",
                    tuned_for="tensorrt")
    return found


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are made here, by the stand-in, and not in a child process."""
    monkeypatch.setattr(onnxruntime_gpu, "run_child", lambda module, job, target, **_: profiled(
        job, target, StandIn(), lambda share, note: None))


@pytest.mark.usefixtures("in_process")
def test_contract(files: dict[str, Path]) -> None:
    with torch.inference_mode():
        wanted = load_runtime("onnxruntime").compile(files["fp32"], Target("t", "onnxruntime", "fp32"))
        reference = wanted.logits(contract_images(files["fp32"], 5))
    for batch in (1, 2):
        target = Target("cuda_fp32", "onnxruntime_cuda", "fp32", batch=batch, device="cuda")
        check_runtime(StandIn(), files["fp32"], target, reference=reference)


def test_what_is_not_executed_as_asked_is_refused_or_told(files: dict[str, Path]) -> None:
    with pytest.raises(TargetError, match=r"cuda_fp16: fp16 was forced but not honoured: .* run as \d+ fp32\. "
                                          r"Choose a precision that this GPU has\."):
        StandIn().compile(files["fp32"], FP16)
    compiled = StandIn().inspect(files["fp32"], FP16)
    assert compiled.execution.fallback_share == 1.0
    assert set(compiled.execution.precisions) == {"fp32"}


def test_a_file_for_fp16_keeps_its_ends_in_fp32_and_answers_alike(files: dict[str, Path], tmp_path: Path) -> None:
    half = StandIn().source(files["fp32"], FP16, tmp_path)
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
        StandIn().source(tmp_path / "torn.onnx", FP16, tmp_path)


def test_a_call_copies_the_images_and_then_runs() -> None:
    seen: list[str] = []

    class There:
        def update_inplace(self, images: Any) -> None:
            seen.append(f"copy of {images}")

    class Session:
        def run_with_iobinding(self, binding: Any) -> None:
            seen.append(f"run of {binding}")

    onnxruntime_gpu._Call(Session(), "binding", "images", There())()  # type: ignore[arg-type]
    assert seen == ["copy of images", "run of binding"]


def event(kind: str, provider: str, type_: str = "float16") -> dict[str, Any]:
    return {"cat": "Node", "name": f"{kind}_kernel_time", "dur": 5, "args": {
        "op_name": kind, "provider": f"{provider}ExecutionProvider", "output_type_shape": [{type_: [1, 8]}]}}


def test_what_cuda_leaves_to_the_cpu_is_counted() -> None:
    events = [event("Conv", "CUDA"), event("FusedConv", "CUDA"), event("Conv", "CPU", "float"), event("Relu", "CPU"),
              event("Relu", "CPU"), event("Gemm", "CUDA", "float"), {"cat": "Session", "name": "model_run"}]
    assert CudaRuntime().executed(events, "", 0) == {"fp16": 2, "fp32 on the CPU": 1, "fp32": 1}
    assert CudaRuntime().outside(events) == {"Conv on the CPU": 1, "Relu on the CPU": 2}


def test_an_engine_counts_as_what_its_pairs_force(files: dict[str, Path]) -> None:
    meant = quantised_in_file(files["int8"])
    every = sum(node.op_type in ("Conv", "Gemm") for node in onnx.load(str(files["int8"])).graph.node)
    engine = event("TRTKernel_graph_0", "Tensorrt", "float")
    whole = TensorRtRuntime().executed([engine], files["int8"], meant)
    assert whole == {"int8": meant, "fp32": every - meant}
    assert TensorRtRuntime().outside([engine]) == {}
    left = [engine, event("Conv", "CUDA", "float"), event("HardSwish", "CPU", "float")]
    assert TensorRtRuntime().executed(left, files["int8"], meant) == {
        "int8": meant - 1, "fp32": every - meant, "fp32 on CUDA": 1}
    assert TensorRtRuntime().outside(left) == {"Conv on CUDA": 1, "HardSwish on the CPU": 1}


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


def test_a_provider_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    lacking = r"^target cuda_fp16: ONNX Runtime for GPUs is not installed\. Install it: pip install 'hwnas\[cuda\]' && "
    with pytest.raises(TargetError, match=lacking):
        CudaRuntime().check(FP16)
    with pytest.raises(TargetError, match=r"'hwnas\[tensorrt\]'"):
        load_runtime("onnxruntime_tensorrt").check(INT8)
    with pytest.raises(TargetError, match="is not installed"):
        CudaRuntime().version()
    monkeypatch.setattr(onnxruntime_gpu, "version", lambda package: "1.31.1")
    with pytest.raises(TargetError, match=r"onnxruntime lies over onnxruntime-gpu.*pip uninstall -y onnxruntime"):
        CudaRuntime().check(FP16)


def test_a_provider_that_does_not_load_is_an_error(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    class Alone(StandIn):
        """ONNX Runtime leaves out what it cannot load, and goes on with the CPU."""

        provider = "AzureExecutionProvider"

        def options(self, precision: str = "fp32") -> Providers:
            return [(self.provider, {}), ("CPUExecutionProvider", {})]

    class Silent:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    ort = onnxruntime_gpu.import_onnxruntime()
    monkeypatch.setattr(ort, "InferenceSession", Silent)
    with pytest.raises(TargetError, match=r"^target cuda_fp32: ONNX Runtime could not load its AzureExecutionProvider"
                                          r".* would have run on something else\. .*hwnas\[cuda\]"):
        Alone().check(FP32)
    with pytest.raises(TargetError, match="could not load"):
        Alone().session(files["fp32"], FP32, files["fp32"].parent)


def test_other_precisions_and_devices_are_refused_by_name() -> None:
    with pytest.raises(TargetError, match=r"can run fp32, fp16"):
        StandIn().check(Target("t", "onnxruntime_cuda", "int8", device="cuda"))
    with pytest.raises(TargetError, match="device 'cuda'"):
        StandIn().check(Target("t", "onnxruntime_cuda", "fp32"))


def test_an_open_size_is_told(tmp_path: Path, files: dict[str, Path]) -> None:
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
    runtime = TensorRtRuntime()
    assert str(tmp_path) in str(runtime.providers("int8"))
    assert str(tmp_path) not in runtime.usage("model.onnx", INT8)


def test_tensorrt_runs_in_int8_what_is_asked_in_int8() -> None:
    asked = {precision: TensorRtRuntime().providers(precision)[0][1]["trt_int8_enable"]
             for precision in TensorRtRuntime.precisions}
    assert asked == {"int8": "True", "fp32": "False"}


def test_biases_stay_as_tensorrt_wants_them(files: dict[str, Path], tmp_path: Path) -> None:
    """Its parser takes no int32 biases, and ONNX Runtime would make some before it asks the provider."""
    types = []
    for unwanted in ((), TensorRtRuntime.unwanted):
        runtime, made = StandIn(), tmp_path / f"{len(unwanted)}.onnx"
        runtime.unwanted = unwanted
        runtime.session(files["int8"], INT8, tmp_path, made)
        graph = onnx.load(str(made)).graph
        stored = {each.name: each.data_type for each in graph.initializer}
        types.append({stored[node.input[0]] for node in graph.node if node.op_type == "DequantizeLinear"
                      and node.input[0] in stored})
    assert onnx.TensorProto.INT32 in types[0]
    assert types[1] == {onnx.TensorProto.INT8}


@pytest.mark.parametrize("name", ["cuda_fp16", "cuda_fp32", "trt_int8"])
def test_a_command_says_in_one_line_what_is_missing(name: str, files: dict[str, Path],
                                                    monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    from hwnas.benchmark import __main__ as benchmark

    gpu._open_gpu.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert run_command(benchmark.main, "benchmark", "usage", [f"+target={name}", f"model={files['fp32']}"]) == 2
    line, = capsys.readouterr().err.strip().splitlines()
    assert "pip install 'hwnas[cuda]'" in line


def test_targets_of_a_gpu_name_what_they_run(files: dict[str, Path]) -> None:
    compiled = StandIn().compile(files["fp32"], FP32)
    assert isinstance(compiled, GpuCompiled)
    assert compiled.execution.outside == {}
    assert asdict(FP32)["device"] == "cuda"
