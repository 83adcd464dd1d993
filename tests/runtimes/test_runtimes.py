"""Every runtime keeps the contract; precisions are read back; telemetry stays out; children take crashes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch

from hwnas.errors import CandidateError, QuantizeError, TargetError, UnknownName, UserError
from hwnas.networks.export import export_onnx, randomise
from hwnas.networks.quantize import needs_narrow_weights, quantize_static, tuning_of
from hwnas.runtimes.child import probe_model, serve
from hwnas.runtimes.classifier import target_of
from hwnas.runtimes.openvino import import_openvino
from hwnas.runtimes.runtime import judge, load_runtime, nodes_of, quantised_in_file, threads_of
from hwnas.target import Host, Target
from hwnas.testing import check_runtime, contract_images

OPENVINO = load_runtime("openvino")
HAS_BF16 = "BF16" in import_openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16 instructions")


@pytest.fixture(scope="module")
def files(mnasnet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    int8 = tmp_path_factory.mktemp("models") / "model_int8.onnx"
    quantize_static(mnasnet, int8, contract_images(mnasnet, 64), method="mse")
    return {**dict.fromkeys(("fp32", "fp16", "bf16"), mnasnet), "int8": int8,
            "reference": mnasnet.with_name("reference.npy")}


@pytest.mark.parametrize(("runtime", "precision", "batch", "error"), [
    ("openvino", "fp32", 1, 1e-3), ("openvino", "int8", 1, None), ("openvino", "int8", 4, None),
    pytest.param("openvino", "bf16", 2, 0.3, marks=needs_bf16),
    ("onnxruntime", "fp32", 2, 1e-3), ("onnxruntime", "int8", 1, None), ("null", "fp32", 1, None),
])
def test_contract(files: dict[str, Path], runtime: str, precision: str, batch: int, error: float | None) -> None:
    target = Target("test", runtime, precision, batch=batch)
    reference = np.load(files["reference"]) if error else None
    check_runtime(load_runtime(runtime), files[precision], target, reference=reference, relative_error=error or 0.0)


def test_int8_is_executed_as_quantised_and_answers_agree_between_runtimes(files: dict[str, Path]) -> None:
    meant, answers = quantised_in_file(files["int8"]), []
    for runtime in ("openvino", "onnxruntime"):
        compiled = load_runtime(runtime).compile(files["int8"], Target("test", runtime, "int8"))
        execution = compiled.execution
        assert execution.precisions["int8"] == meant
        assert execution.fallback_share == 0
        assert execution.precisions["fp32"] > 0  # squeeze-and-excite
        assert execution.int8_share == pytest.approx(meant / sum(execution.precisions.values()))
        answers.append(compiled.logits(contract_images(files["int8"], 32)).argmax(1))
    assert (answers[0] == answers[1]).mean() > 0.8


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_no_sum_saturates_in_a_file_that_is_made_for_this_machine(runtime: str, tmp_path: Path) -> None:
    """Without VNNI x86 kernels add two products in 16 bits, which the largest weights and pixels overflow."""
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU(),
                                torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    for layer in model:
        if hasattr(layer, "weight"):
            torch.nn.init.uniform_(layer.weight, 0.9, 1.0)
    fp32, int8 = tmp_path / "fp32.onnx", tmp_path / "int8.onnx"
    export_onnx(model, fp32, (8, 16, 16))
    images = np.random.default_rng(0).uniform(0.5, 1, (64, 8, 16, 16)).astype(np.float32)
    target, host = Target("test", runtime, "int8"), Host.detect()
    quantize_static(fp32, int8, images, method="minmax", tuned_for=tuning_of(target),
                    narrow=needs_narrow_weights(target, host.vendor, host.flags))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # pairs one by one, in fp32
    exact, = onnxruntime.InferenceSession(str(int8), options).run(None, {"images": images[:8]})
    assert load_runtime(runtime).compile(int8, target).logits(images[:8]) == pytest.approx(exact, rel=0.02)


def test_a_cpu_without_bf16_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load_runtime("openvino")

    class Core:
        def get_property(self, *names: str) -> list[str]:
            return ["FP32", "INT8"]

    monkeypatch.setitem(runtime.__dict__, "_core", Core())
    for precision in ("bf16", "fp16"):
        with pytest.raises(TargetError, match=f"mine.*{precision}"):
            runtime.check(Target("mine", "openvino", precision))
    assert runtime.check(Target("mine", "openvino", "int8")) is None


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_files_of_the_wrong_kind_are_refused(files: dict[str, Path], runtime: str) -> None:
    with pytest.raises(CandidateError, match="not quantised"):
        load_runtime(runtime).compile(files["fp32"], Target("t", runtime, "int8"))
    with pytest.raises(CandidateError, match="is quantised"):
        load_runtime(runtime).compile(files["int8"], Target("t", runtime, "fp32"))


def test_a_file_of_integer_operators_without_pairs_is_quantised(tmp_path: Path) -> None:
    """As ONNX Runtime quantises with ranges of each call."""
    make, float_, path = onnx.helper.make_node, onnx.TensorProto.FLOAT, tmp_path / "dynamic.onnx"
    nodes = [make("DynamicQuantizeLinear", ["images"], ["q", "scale", "zero"]),
             make("MatMulInteger", ["q", "w", "zero"], ["sums"]), make("Cast", ["sums"], ["values"], to=float_),
             make("Mul", ["scale", "scale_of_w"], ["factor"]), make("Mul", ["values", "factor"], ["logits"])]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info("images", float_, ["batch", 8])],
        [onnx.helper.make_tensor_value_info("logits", float_, ["batch", 4])],
        [onnx.numpy_helper.from_array(np.ones((8, 4), np.int8), "w"),
         onnx.numpy_helper.from_array(np.ones(1, np.float32), "scale_of_w")]),
        opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), str(path))
    runtime = load_runtime("onnxruntime")
    assert runtime.compile(path, Target("t", "onnxruntime", "int8")).execution.precisions == {"int8": 1}
    with pytest.raises(CandidateError, match="is quantised"):
        runtime.compile(path, Target("t", "onnxruntime", "fp32"))
    with pytest.raises(QuantizeError, match="quantised already"):
        quantize_static(path, tmp_path / "int8.onnx", None)


def test_who_gives_a_file_that_openvino_cannot_compile_reads_the_precision_and_a_way_on(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"no network")
    with pytest.raises(CandidateError, match=r"m\.onnx: .* in int8: .*another precision or runtime"):
        load_runtime("openvino").compile(tmp_path / "m.onnx", Target("t", "openvino", "int8"))


def test_precision_that_was_not_honoured_is_an_error() -> None:
    with pytest.raises(TargetError, match=r"fp32 was forced.*1 bf16, 9 fp32"):
        judge("m.onnx", Target("t", "openvino", "fp32"), {"fp32": 9, "bf16": 1}, 0)
    with pytest.raises(CandidateError, match=r"int8 was forced"):
        judge("m.onnx", Target("t", "openvino", "int8"), {"fp32": 10}, 8)
    execution = judge("m.onnx", Target("t", "openvino", "int8"), {"fp32": 4, "int8": 6}, 8)
    assert execution.fallback_share == pytest.approx(0.25)
    assert execution.int8_share == pytest.approx(0.6)


@pytest.mark.parametrize(("runtime", "precision"), [("openvino", "int8"), ("openvino", "fp32"),
                                                    ("onnxruntime", "int8"), ("onnxruntime", "fp32")])
def test_profiled_nodes_lead_to_every_block(files: dict[str, Path], runtime: str, precision: str) -> None:
    compiled = load_runtime(runtime).compile(files[precision], Target("t", runtime, precision))
    nodes = compiled.profile(contract_images(files[precision], 1), 20)
    told, declared = ({name for node in each for name in re.findall(r"/blocks\.\d+\.\d+/", node.name)}
                      for each in (nodes, nodes_of(files["fp32"])))
    assert told == declared
    assert sum(node.ms for node in nodes) > 0


def test_names_are_looked_up_entry_points_found_and_no_threads_means_all_usable(monkeypatch) -> None:
    with pytest.raises(UnknownName, match="openvino"):
        load_runtime("opnevino")
    assert load_runtime("null").version() == "null 1"  # of tests/null_runtime
    monkeypatch.setattr("hwnas.runtimes.runtime.usable_cores", lambda: [3, 5, 7])
    assert threads_of(Target("t", "openvino", "int8", threads=0)) == 3
    assert threads_of(Target("t", "openvino", "int8", threads=2)) == 2


NO_NETWORK = """
import socket, sys
import openvino_telemetry.main as telemetry
def refuse(*args, **kwargs): raise SystemExit(f"network: {args}")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
telemetry.Telemetry.init = telemetry.Telemetry.send_event = refuse
if sys.argv[2] == "fresh":
    for name in [name for name in sys.modules if name.startswith("openvino")]: del sys.modules[name]
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target
for runtime in sys.argv[3:]:
    load_runtime(runtime).compile(sys.argv[1], Target("t", runtime, "int8"))
if sys.argv[2] == "fresh": assert not [n for n in sys.modules if n.startswith("openvino_telemetry")], "imported"
print("quiet")
"""


@pytest.mark.parametrize(("state", "runtimes"), [
    ("fresh", ["openvino"]), ("loaded", ["openvino", "onnxruntime", "litert"])])
def test_no_runtime_contacts_the_network(files: dict[str, Path], state: str, runtimes: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", NO_NETWORK, str(files["int8"]), state, *runtimes],
                          capture_output=True, text=True, timeout=300)
    assert done.stdout == "quiet\n", done.stderr


def test_onnx_runtime_leaves_no_identifier_of_its_telemetry(tmp_path: Path) -> None:
    code = "import os; before = dict(os.environ); from hwnas.system.libraries import import_onnxruntime as load; " \
           "load(); assert before == dict(os.environ)"
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**environment, "TMPDIR": str(tmp_path)})
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stderr


def test_child_lets_a_good_model_pass_and_reports_why_others_are_none(files: dict[str, Path], tmp_path: Path) -> None:
    assert probe_model(files["int8"], Target("t", "openvino", "int8")) is None
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"\x08" * 4096)
    target = Target("t", "onnxruntime", "fp32")
    with pytest.raises(CandidateError, match=r"garbage\.onnx"):
        probe_model(garbage, target)
    with pytest.raises(CandidateError, match=r"(?i)memory|bad_alloc"):
        probe_model(files["fp32"], target, memory_mb=1)
    with pytest.raises(TargetError, match="bf16"):
        probe_model(files["fp32"], replace(target, precision="bf16"))


@pytest.mark.parametrize(("code", "timeout_s", "said"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 600.0, "SIGSEGV"),
    ("import time; time.sleep(600)", 0.05, r"after 0\.05 s")])
def test_child_that_crashes_or_hangs_is_a_failed_candidate(files, monkeypatch, code, timeout_s, said):
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: real([sys.executable, "-c", code], **options))
    monkeypatch.setattr("hwnas.runtimes.child._PROBED_S", timeout_s)
    with pytest.raises(CandidateError, match=said):
        probe_model(files["fp32"], Target("t", "onnxruntime", "fp32"))


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 100 bytes, as on a disk that is full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_not_a_fault_of_the_network(files: dict[str, Path], request: pytest.FixtureRequest) -> None:
    images = contract_images(files["fp32"], 1)
    compile_it = partial(load_runtime("onnxruntime").compile, files["fp32"], Target("test", "onnxruntime", "fp32"))
    compiled = compile_it()
    request.getfixturevalue("full_disk")
    for work in (compile_it, lambda: compiled.profile(images, 1)):
        with pytest.raises(UserError, match=r"ONNX Runtime cannot write there .* Free space, or set TMPDIR"):
            work()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a child leaves its messages open
def test_a_child_on_a_full_disk_ends_the_command(capfd, monkeypatch):
    def fill(job: object, target: Target, runtime: object, progress: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "decoded.npy")

    monkeypatch.setattr(sys, "argv", ["child", json.dumps({
        "target": asdict(Target("test", "null", "fp32")), "path": "model.onnx", "memory_mb": 1 << 20})])
    kept = os.dup(1)
    try:
        assert serve(fill) == 0
    finally:
        os.dup2(kept, 1)
    answer = json.loads(capfd.readouterr().out)
    assert answer["error"] == "UserError"
    assert answer["message"].startswith("decoded.npy: No space left on device. Free space")


def test_openvino_leaves_no_small_stack_for_signal_handlers() -> None:
    script = """
import ctypes
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target

load_runtime("openvino").check(Target("t", "openvino", "int8"))  # no file is compiled
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
found = Stack()
ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found))
print(found.flags, found.size)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert found.stdout.split()[0] == "2", found.stdout  # SS_DISABLE: handlers run on the thread's own stack


def test_who_asks_for_answers_takes_a_file_that_was_made_for_another_runtime(tmp_path: Path) -> None:
    path = tmp_path / "model_int8.onnx"
    model = randomise(timm.create_model("mobilenetv3_small_050", in_chans=1, num_classes=10), 0)
    export_onnx(model, tmp_path / "model.onnx", (1, 32, 32))
    images = np.random.default_rng(0).standard_normal((64, 1, 32, 32), np.float32)
    quantize_static(tmp_path / "model.onnx", path, images, tuned_for="openvino")
    with pytest.raises(CandidateError, match=r"int8 was forced but not honoured by onnxruntime.*hwnas quantize"):
        probe_model(path, target_of(path))
    probe_model(path, target_of(path), look=True)
