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
from hwnas.runtimes import onnxruntime_gpu
from hwnas.runtimes.onnxruntime_gpu import CudaRuntime, profile_nodes
from hwnas.runtimes.runtime import BoundCall, NodeTime, load_runtime
from hwnas.system.libraries import import_onnxruntime
from hwnas.target import Target
from hwnas.testing import check_runtime, contract_images

FP32 = Target("cuda_fp32", "onnxruntime_cuda", "fp32", device="cuda")
FP16 = Target("cuda_fp16", "onnxruntime_cuda", "fp16", device="cuda")


class StandIn(CudaRuntime):
    """The CPU in place of the GPU."""

    memory = "cpu"
    provider = "CPUExecutionProvider"
    providers = ((provider, {}),)

    def version(self) -> str:
        return f"{self.name} stand-in"


@pytest.fixture(scope="module")
def files(mnasnet: Path) -> dict[str, Path]:
    return {"fp32": mnasnet}


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
    compiled = StandIn().compile(files["fp32"], FP16, refuse=False)
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
    assert CudaRuntime().count_nodes(ran) == (
        {"fp16": 2, "fp32 on CPU": 1, "fp32": 1}, {"Conv on CPU": 1, "Relu on CPU": 2})


def test_a_provider_that_is_not_there_is_an_error() -> None:
    lacking = (r"^onnxruntime_cuda: the onnxruntime that is installed has no CUDAExecutionProvider\. .*"
               r"pip install 'hwnas\[cuda\]' && pip uninstall -y onnxruntime && ")
    for ask in (CudaRuntime().version, lambda: CudaRuntime().check(FP16)):
        with pytest.raises(TargetError, match=lacking):
            ask()


class Alone(StandIn):
    """A provider that ONNX Runtime cannot load."""

    provider = "CUDAExecutionProvider"


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


@pytest.mark.parametrize("target", [FP32, FP16])
def test_a_card_shows_code_that_refuses_the_cpu(target: Target) -> None:
    code = load_runtime(target.runtime).usage("model.onnx", target)  # type: ignore[attr-defined]
    compile(code, "card", "exec")
    assert "assert session.get_providers()[0]" in code
    assert ("convert_float_to_float16" in code) == (target.precision == "fp16")
