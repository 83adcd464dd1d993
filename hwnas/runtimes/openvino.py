"""OpenVINO on the CPU: precision, threads and streams forced, telemetry kept out, precision read back."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import FileError, one_line
from hwnas.runtimes.runtime import (
    BoundCall,
    Execution,
    NodeTime,
    check_batch,
    judge,
    quantised_in_file,
    quickest_means,
    require,
    run_in_batches,
    threads_of,
)
from hwnas.system.paths import write_atomic
from hwnas.system.processes import use_own_stack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.target import Target

# int8 networks keep their floating-point parts in f32. With the default hint those would be bf16 on CPUs that have it.
_HINTS = {"fp32": "f32", "int8": "f32", "bf16": "bf16", "fp16": "f16"}
_CAPABILITIES = {"fp32": "FP32", "int8": "INT8", "bf16": "BF16"}
_WEIGHTED = ("Convolution", "GroupConvolution", "FullyConnected", "MatMul")
_PRECISIONS = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "u8": "int8", "i8": "int8"}
_REFERENCE = "ref"  # the beginning of the names of kernels in plain C++
# OpenVINO counts whole microseconds, rounded down, so that half of one is added to every executed node.
_ROUNDED_OFF_MS = 0.0005
_ROUNDS, _WARM_UP = 8, 5  # rounds of a profile, and inferences of each that do not count


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry; use this in place of `import openvino`.

    The package reports its use while it is imported. If the telemetry package is missing, it uses a stub.
    """
    if "openvino" not in sys.modules:
        telemetry = sys.modules.get("openvino_telemetry")
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        try:
            importlib.import_module("openvino")
        finally:
            del sys.modules["openvino_telemetry"]
            if telemetry is not None:
                sys.modules["openvino_telemetry"] = telemetry
    return sys.modules["openvino"]


def save_ir(onnx_path: Path, xml: Path, layout: str, classes: Sequence[str], options: Mapping[str, str]) -> None:
    """Write an ONNX file as OpenVINO's own format, `xml` and a .bin beside it, nothing rounded to 16 bits.

    Args:
        onnx_path: The network.
        xml: The file to write. `compile_options.json` beside it says how a server must compile it.
        layout: The layout of the input, such as NHWC.
        classes: Their names go into the file as `model_info/labels`, which OpenVINO's own tools read. Spaces in a name
            become `_`.
        options: The result of `compile_options`.

    Raises:
        FileError: OpenVINO cannot read or run it.
    """
    openvino = import_openvino()
    try:
        core = _open_core()
        model = core.read_model(os.fspath(onnx_path))
        model.input(0).get_node().set_layout(openvino.Layout(layout))
        model.set_rt_info(" ".join("_".join(name.split()) for name in classes), ["model_info", "labels"])
        xml.parent.mkdir(parents=True, exist_ok=True)
        openvino.save_model(model, os.fspath(xml), compress_to_fp16=False)
        core.compile_model(os.fspath(xml), "CPU", dict(options))
        write_atomic(xml.with_name("compile_options.json"), json.dumps(options, indent=1) + "\n")
    except RuntimeError as error:
        raise FileError(onnx_path, f"OpenVINO cannot write it: {one_line(error)}") from error


def _open_core() -> Any:
    """Return OpenVINO with its CPU plugin loaded. Loading it is what sets a small stack for signal handlers."""
    core = import_openvino().Core()
    core.get_versions("CPU")
    use_own_stack()
    return core


class OpenVinoRuntime:
    """OpenVINO's CPU plugin: fp32, bf16 and int8 (QDQ files)."""

    name = "openvino"
    title = "OpenVINO"
    package = "openvino"

    @cached_property
    def _core(self) -> Any:
        return _open_core()

    def version(self) -> str:
        return f"openvino {package_version('openvino')}"

    def check(self, target: Target) -> None:
        able = set(self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
        precisions = tuple(name for name, capability in _CAPABILITIES.items() if capability in able)
        require(target, self.name, precisions, "cpu")

    def compile(self, onnx_path: str | os.PathLike[str], target: Target, *, refuse: bool = True) -> OpenVinoCompiled:
        """Compile, see `hwnas.runtimes.runtime.Runtime`. A fallback is an error only with `refuse`."""
        self.check(target)
        return self._wrap(self.compile_graph(onnx_path, target), onnx_path, target, refuse)

    def usage(self, file: str, target: Target) -> str:
        """Return the code that a card shows."""
        lines = ",\n           ".join(f'"{key}": "{value}"' for key, value in compile_options(target).items())
        return ("import numpy as np, openvino\n"
                f"options = {{{lines}}}  # as measured\n"
                "images = np.ascontiguousarray(images, np.float32)  # write the next images into this very array\n"
                f'core = openvino.Core(); network = core.read_model("{file}")\n'
                "network.reshape(images.shape)  # as measured; where the batch is left open, each call takes longer\n"
                'compiled = core.compile_model(network, "CPU", options)\n'
                "request = compiled.create_infer_request()\n"
                "request.set_input_tensor(openvino.Tensor(images, shared_memory=True))\n"
                "request.infer()  # this call is what is timed; `compiled(images)` copies, and takes longer\n"
                'logits = request.get_tensor("logits").data')

    def _wrap(self, compiled: Any, path: str | os.PathLike[str], target: Target, refuse: bool = True
              ) -> OpenVinoCompiled:
        infos = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
        executed = Counter(_precision(info) for info in infos if _text(info, "layerType") in _WEIGHTED)
        return OpenVinoCompiled(compiled, judge(path, target, executed, quantised_in_file(path), refuse), target, path,
                                self)

    def save_compiled(self, onnx_path: str | os.PathLike[str], target: Target, blob: Path) -> Path:
        """Compile as `compile` does and write the result to `blob`, for `load_compiled` on this same machine."""
        write_atomic(blob, bytes(self.compile(onnx_path, target).native.export_model().getvalue()))
        return blob

    def load_compiled(self, blob: Path, onnx_path: str | os.PathLike[str], target: Target) -> OpenVinoCompiled:
        """Load the file that `save_compiled` wrote, ready to run.

        Loading takes a tenth of the time of compiling. Every call gives another place in memory.
        """
        try:
            compiled = self._core.import_model(blob.read_bytes(), "CPU", _config(target))
        except RuntimeError as error:
            raise FileError(blob, f"OpenVINO cannot load it: {one_line(error)}") from error
        return self._wrap(compiled, onnx_path, target)

    def compile_graph(self, path: str | os.PathLike[str], target: Target, *, counters: bool = False) -> Any:
        """Return OpenVINO's own compiled model, which with `counters` times each node; FileError if that fails."""
        try:
            model = self._core.read_model(os.fspath(path))
            shape = model.input(0).partial_shape
            model.reshape([target.batch, *(shape[axis].get_length() for axis in range(1, len(shape)))])
            return self._core.compile_model(model, "CPU", _config(target, counters=counters))
        except RuntimeError as error:
            raise FileError(path, f"OpenVINO cannot compile it in {target.precision}: {one_line(error).rstrip('.')}.",
                            "Choose a target of another precision or runtime.") from error


def compile_options(target: Target) -> dict[str, str]:
    """Return the options with which networks are measured, and with which all deployed files are compiled.

    OpenVINO's own pinning would put every process on the first core: two of them took 2.4 times as long each.
    """
    return {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads_of(target)),
            "INFERENCE_PRECISION_HINT": _HINTS[target.precision], "EXECUTION_MODE_HINT": "PERFORMANCE",
            "ENABLE_CPU_PINNING": "NO"}


def _config(target: Target, *, counters: bool = False) -> dict[str, Any]:
    return {**compile_options(target), "CACHE_DIR": "", "PERF_COUNT": counters}


def _text(info: Any, key: str) -> str:
    return str(info[key].astype(str)) if key in info else ""


def _precision(info: Any) -> str:
    precision = _text(info, "runtimePrecision")
    return _PRECISIONS.get(precision, precision)


@dataclass(frozen=True)
class OpenVinoCompiled:
    """A network compiled by OpenVINO with a fixed batch."""

    native: Any
    execution: Execution
    target: Target
    path: str | os.PathLike[str]
    runtime: OpenVinoRuntime

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        return BoundCall(*_bind(self.native, images, self.target))

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        return run_in_batches(lambda batch: np.array(self._request.infer([batch])[0]), images, self.target.batch)

    @cached_property
    def _request(self) -> Any:
        return self.native.create_infer_request()

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        """Profile as the protocol says. OpenVINO gives each node's mean over all inferences since it was compiled. The
        network is therefore compiled anew for each of some rounds, and rounds with interruptions are left out."""
        n, rounds = -(-repeats // _ROUNDS), defaultdict[tuple[str, str], list[float]](list)
        for _ in range(_ROUNDS):
            compiled = self.runtime.compile_graph(self.path, self.target, counters=True)
            infer, request = _bind(compiled, images, self.target)
            counted = []
            for runs in (_WARM_UP, n):
                for _ in range(runs):
                    infer()
                counted.append(request.get_profiling_info())
            # Each mean is over all inferences so far: the difference of the two sums leaves out the warm-up.
            for warm, both in zip(*counted, strict=True):
                total_s = both.real_time.total_seconds() * (_WARM_UP + n) - warm.real_time.total_seconds() * _WARM_UP
                rounds[both.node_name, both.node_type].append(max(0.0, 1e3 * total_s / n + _ROUNDED_OFF_MS))
        executed = {}  # nodes by name; `originalLayersNames` are the file's nodes fused into one, comma-separated
        for node in compiled.get_runtime_model().get_ordered_ops():
            info, name = node.get_rt_info(), node.get_friendly_name()
            if _text(info, "layerType") not in ("Const", "Input", "Output", "Parameter", "Result"):
                kernel = _text(info, "primitiveType")
                executed[name] = NodeTime(_text(info, "originalLayersNames") or name, "", 0.0, _precision(info), kernel,
                                          "cpu", kernel.startswith(_REFERENCE))
        timed = {node: times_ms for node, times_ms in rounds.items() if node[0] in executed}
        return [replace(executed[name], kind=kind, ms=mean) for (name, kind), mean
                in zip(timed, quickest_means([*timed.values()]), strict=True)]


def _bind(compiled: Any, images: NDArray[np.float32], target: Target) -> tuple[Callable[[], Any], Any]:
    check_batch(images, target)
    request = compiled.create_infer_request()
    request.set_input_tensor(import_openvino().Tensor(np.ascontiguousarray(images, dtype=np.float32)))
    return request.infer, request
