"""ONNX Runtime on an NVIDIA GPU by its CUDA provider, in fp32 and fp16.

docs/decisions/gpu.md says what a call is, and why. If the provider does not load, no other one takes its place.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from hwnas.errors import FileError, TargetError, one_line
from hwnas.runtimes.child import Progress, run_child, serve
from hwnas.runtimes.onnxruntime import WEIGHTED, OnnxRuntime, OnnxRuntimeCompiled, precision_of, read_nodes, run_session
from hwnas.runtimes.runtime import NodeTime, Runtime, inspected, judge, quantised_in_file
from hwnas.system.libraries import import_onnxruntime
from hwnas.system.paths import temporary_folder
from hwnas.target import Target

_LEAST = '<ir_version: 8, opset_import: ["": 17]> least (float[1] x) => (float[1] y) { y = Relu(x) }'
_LOADED: set[str] = set()  # providers that this process could load
_BLOCKING = "CUDA_LAUNCH_BLOCKING"  # if it is 1, a node's time is the GPU's, not that of the launch


class CudaRuntime(OnnxRuntime):
    """ONNX Runtime on the GPU that CUDA shows first: fp32, without TF32, and fp16, to which the fp32 file is converted.

    Nodes that CUDA cannot run are run on the CPU, and are named.
    """

    name = "onnxruntime_cuda"
    title = "ONNX Runtime on CUDA"
    package = "onnxruntime-gpu"
    precisions = ("fp32", "fp16")
    device = memory = "cuda"
    timed = "timed together with the copies of the images to the GPU and of the logits back"
    provider = "CUDAExecutionProvider"
    # The providers with their options: each node runs on the first that can run it.
    providers: tuple[tuple[str, dict[str, str]], ...] = (
        (provider, {"device_id": "0", "use_tf32": "0", "cudnn_conv_algo_search": "EXHAUSTIVE",
                    "arena_extend_strategy": "kSameAsRequested"}), ("CPUExecutionProvider", {}))

    def version(self) -> str:
        """Return name and version. TargetError if ONNX Runtime was built without the provider."""
        ort = import_onnxruntime()
        if self.provider not in ort.get_available_providers():
            raise TargetError(f"{self.name}: the onnxruntime that is installed has no {self.provider}. Put the one for "
                              "GPUs in its place: pip install 'hwnas[cuda]' && pip uninstall -y onnxruntime && pip "
                              "install --force-reinstall --no-deps onnxruntime-gpu")
        return f"{self.name} {ort.__version__}"

    def check(self, target: Target) -> None:
        """Check `target` as the protocol says. It opens a session, because only that loads the provider's libraries."""
        super().check(target)
        self.version()
        if self.provider in _LOADED:
            return
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            ort = import_onnxruntime()
            ort.preload_dlls()
        # It prints an error for each way to run a convolution that cuDNN does not have, and then takes another.
        ort.set_default_logger_severity(4)
        least = onnx.parser.parse_model(_LEAST).SerializeToString()
        try:
            self.open_session("", replace(target, precision="fp32"), model=least)
        except FileError as error:
            raise self._unloaded(target, f" ({error.fact})") from error
        _LOADED.add(self.provider)

    def _unloaded(self, target: Target, why: str = "") -> TargetError:
        return TargetError(f"target {target.name}: ONNX Runtime could not load its {self.provider}{why}, and "
                           "would have run on something else. See that nvidia-smi works; libraries: pip install "
                           "'hwnas[cuda]'.")

    def open_session(self, path: str | os.PathLike[str], target: Target, **options: Any) -> Any:
        """Open a session as on the CPU. TargetError if ONNX Runtime silently left out the provider (it did not
        load)."""
        if target.precision == "fp16":
            options["model"] = _convert_to_fp16(path)
        session = super().open_session(path, target, providers=self.providers, **options)
        if session.get_providers()[:1] != [self.provider]:
            raise self._unloaded(target)
        return session

    def compile(self, onnx_path: str | os.PathLike[str], target: Target, *, refuse: bool = True) -> GpuCompiled:
        """Compile as the protocol says. The network runs once, to show which provider takes which node."""
        self.check(target)
        with temporary_folder() as folder:
            session = self.open_session(onnx_path, target, profile=Path(folder, "profile"))
            axes = session.get_inputs()[0].shape[1:]
            if not all(isinstance(axis, int) for axis in axes):
                raise FileError(onnx_path, f"its input has open axes {axes}, and to see what a GPU executes it must be "
                                           "run.", "Export it with a fixed height and width.")
            run_session(session, onnx_path, np.zeros((target.batch, *axes), np.float32))
            executed_nodes = [event["args"] for event in read_nodes(session, folder)]
        executed, outside = self.count_nodes(executed_nodes)
        execution = judge(onnx_path, target, executed, quantised_in_file(onnx_path), refuse)
        return GpuCompiled(session, replace(execution, outside=outside), target, onnx_path, self)

    def count_nodes(self, ran: list[Mapping[str, Any]]) -> tuple[dict[str, int], dict[str, int]]:
        """Count convolutions and matrix products by executed precision, and all nodes that another provider ran, by
        kind. Both name the other provider."""
        executed, outside = Counter[str](), Counter[str]()
        for node in ran:
            own = node["provider"] == self.provider
            place = "" if own else f" on {node['provider'].removesuffix('ExecutionProvider')}"
            if not own:
                outside[f"{node['op_name']}{place}"] += 1
            if node["op_name"] in WEIGHTED:
                executed[f"{precision_of(node)}{place}"] += 1
        return dict(executed), dict(sorted(outside.items()))

    def _session_code(self, file: str, target: Target) -> str:
        load = f'model = "{file}"\n'
        if target.precision == "fp16":
            load = ("import onnx\nfrom onnxruntime.transformers.float16 import convert_float_to_float16\n"
                    f'model = convert_float_to_float16(onnx.load("{file}"), keep_io_types=True).SerializeToString()\n')
        return (f"# onnxruntime must not be installed beside onnxruntime-gpu\n{load}"
                f"session = onnxruntime.InferenceSession(model, options, providers={[*self.providers]})\n"
                f'assert session.get_providers()[0] == "{self.provider}"  # else it would run on the CPU')


class GpuCompiled(OnnxRuntimeCompiled):
    """A session on a GPU with a fixed batch. Images and answers are in main memory, as on a server."""

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        """Bind as the protocol says. A call copies the images to the GPU and ends with the answer in main memory."""
        host_images = np.array(images, np.float32, order="C")
        run = self._bind(self.session, host_images)

        def copy_and_run() -> None:
            run.kept.update_inplace(host_images)
            run()

        return copy_and_run

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        """Profile as the protocol says, in a child process in which each node waits for the GPU. It may be silent for
        ten minutes, as the network is compiled again there."""
        if os.environ.get(_BLOCKING) == "1":
            return super().profile(images, repeats)
        job = {"path": os.fspath(self.path), "shape": images.shape, "repeats": repeats}
        times = run_child("hwnas.runtimes.onnxruntime_gpu", job, self.target, timeout_s=600, memory_mb=1)
        return [NodeTime(**time) for time in times]


def _convert_to_fp16(path: str | os.PathLike[str]) -> bytes:
    """Return a network in fp16 whose input and output stay fp32."""
    import_onnxruntime()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    try:
        with warnings.catch_warnings(action="ignore"):  # of numbers that fp16 rounds to zero
            half: bytes = convert_float_to_float16(onnx.load(os.fspath(path)), keep_io_types=True).SerializeToString()
    except Exception as error:  # a foreign file may fail in protobuf, onnx or the file system
        raise FileError(path, f"cannot be converted to fp16: {one_line(error)}") from error
    return half


def profile_nodes(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> list[dict[str, Any]]:
    """Run `GpuCompiled.profile` as the task of the child process; return plain values."""
    images = np.random.default_rng(0).standard_normal(tuple(job["shape"]), np.float32)
    return [asdict(time) for time in inspected(runtime, job["path"], target).profile(images, job["repeats"])]


if __name__ == "__main__":  # a child process
    os.environ[_BLOCKING] = "1"
    sys.exit(serve(profile_nodes))
