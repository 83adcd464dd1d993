"""ONNX Runtime on an NVIDIA GPU: by its CUDA provider in fp32 and fp16, by TensorRT's in int8.

What a call is, and why: docs/decisions/gpu.md. Images lie in main memory and so do answers, as a server has them; a
call copies both and ends when the answer is there. No other provider takes the place of one that does not load.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import FileError, TargetError
from hwnas.lazy import LazyModule
from hwnas.runtimes.child import Progress, run_child, serve
from hwnas.runtimes.onnxruntime import (
    FLOAT,
    INT8,
    WARM_UP,
    Events,
    Named,
    OnnxRuntimeCompiled,
    node_times,
    precision_of,
    unwritten,
)
from hwnas.runtimes.runtime import Execution, NodeTime, Runtime, judge, one_line, quantised_in_file, require, threads_of
from hwnas.runtimes.wire import nodes_of
from hwnas.system.libraries import import_onnxruntime
from hwnas.system.paths import home, temporary_folder

if TYPE_CHECKING:
    import onnx
    import onnx.helper
    from numpy.typing import NDArray

    from hwnas.target import Target
else:
    onnx = LazyModule("onnx")

_PACKAGE = "onnxruntime-gpu"
_MEND = f"pip uninstall -y onnxruntime && pip install --force-reinstall --no-deps {_PACKAGE}"
_WEIGHTED = (*INT8, *FLOAT, "NhwcConv", "NhwcFusedConv")
_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
_SHORT = {_CPU: "the CPU", _CUDA: "CUDA"}
_SILENT_S = 600.0  # a profile that says nothing for so long has failed: engines are built meanwhile
Providers = list[tuple[str, dict[str, str]]]


class CudaRuntime:
    """ONNX Runtime's CUDA provider: fp32, without TF32, and fp16, to which the fp32 file is converted."""

    name = "onnxruntime_cuda"
    title = "ONNX Runtime on CUDA"
    extra = "cuda"
    precisions: tuple[str, ...] = ("fp32", "fp16")
    provider = _CUDA  # that is to run every node
    unwanted: tuple[str, ...] = ()  # of ONNX Runtime's optimisers
    memory = "cuda"  # ONNX Runtime's word for where the inputs of a session go

    def version(self) -> str:
        self._check_installed(self.name)
        return f"{self.name} {version(_PACKAGE)}"

    def options(self, precision: str = "fp32") -> Providers:
        """What runs the nodes, the first where it can, with its options; the CPU takes what is left, and is told."""
        cuda = {"device_id": "0", "use_tf32": "0", "cudnn_conv_algo_search": "EXHAUSTIVE",
                "arena_extend_strategy": "kSameAsRequested"}
        return [(_CUDA, cuda), (_CPU, {})]

    def providers(self, precision: str = "fp32") -> Providers:
        """The same, with what is of this machine alone: where timings of kernels are kept."""
        return self.options(precision)

    def check(self, target: Target) -> None:
        require(target, self.name, self.precisions, "cuda")
        self._check_installed(f"target {target.name}")
        self._check_loads(f"target {target.name}")

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> GpuCompiled:
        """As the protocol has it. It runs once, to see which provider took which node."""
        return self._compile(onnx_path, target, refuse=True)

    def inspect(self, onnx_path: str | os.PathLike[str], target: Target) -> GpuCompiled:
        """See `hwnas.runtimes.runtime.inspected`."""
        return self._compile(onnx_path, target, refuse=False)

    def _compile(self, onnx_path: str | os.PathLike[str], target: Target, *, refuse: bool) -> GpuCompiled:
        self.check(target)
        meant = quantised_in_file(onnx_path)
        with temporary_folder() as folder:
            session = self.session(self.source(onnx_path, target, Path(folder)), target, Path(folder))
            compiled = GpuCompiled(session, Execution(target.precision, {}, None, 0.0), target, onnx_path, self)
            compiled.bind(np.zeros(_shape(session, target, onnx_path), np.float32))()
            events = _events(session, folder)
        counts = self.executed(events, onnx_path, meant)
        execution = judge(onnx_path, target, counts, meant, refuse)
        compiled.execution = replace(execution, outside=self.outside(events))
        return compiled

    def source(self, onnx_path: str | os.PathLike[str], target: Target, folder: Path) -> Path:
        """The file that a session reads: for fp16 a converted one in `folder`, whose input and output stay fp32."""
        if target.precision != "fp16":
            return Path(onnx_path)
        import_onnxruntime()
        from onnxruntime.transformers.float16 import convert_float_to_float16

        try:
            proto = onnx.load(os.fspath(onnx_path))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of numbers that fp16 rounds to zero
                half = convert_float_to_float16(proto, keep_io_types=True)
        except Exception as error:  # a foreign file may fail in protobuf, onnx or the file system
            raise FileError(onnx_path, f"cannot be converted to fp16: {one_line(error)}") from error
        path = folder / "half.onnx"
        onnx.save(half, str(path))
        return path

    def session(self, path: Path, target: Target, profile: Path, optimised: Path | None = None) -> Any:
        """A session that profiles to the folder `profile` until its `end_profiling`; TargetError where the provider
        is not in it."""
        ort = import_onnxruntime()

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads_of(target), 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        options.add_free_dimension_override_by_name("batch", target.batch)
        options.enable_profiling, options.profile_file_prefix = True, str(profile / "profile")
        if optimised is not None:
            options.optimized_model_filepath = str(optimised)
        try:
            session = ort.InferenceSession(os.fspath(path), options, providers=self.providers(target.precision),
                                           enable_fallback=0, disabled_optimizers=list(self.unwanted))
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise FileError(path, f"ONNX Runtime cannot compile it: {one_line(error)}") from error
        self._check_taken(session.get_providers(), f"target {target.name}")
        return session

    def executed(self, events: Events, path: str | os.PathLike[str], meant: int) -> dict[str, int]:
        """Convolutions and matrix products by the precision in which they ran, with the provider where it is not this
        runtime's."""
        first = self.provider
        counts: Counter[str] = Counter()
        for said in _nodes(events):
            if said["op_name"] in _WEIGHTED:
                elsewhere = "" if said["provider"] == first else f" on {_short(said['provider'])}"
                counts[f"{precision_of(said)}{elsewhere}"] += 1
        return dict(counts)

    def outside(self, events: Events) -> dict[str, int]:
        """The nodes that another provider took, by kind and provider."""
        first = self.provider
        counts = Counter(f"{said['op_name']} on {_short(said['provider'])}"
                         for said in _nodes(events) if said["provider"] != first)
        return dict(sorted(counts.items()))

    def times(self, path: str, target: Target, shape: Sequence[int], repeats: int) -> list[NodeTime]:
        """Mean time per node, of this process: only where CUDA_LAUNCH_BLOCKING is set are these times of the GPU."""
        with temporary_folder() as folder:
            source, optimised = self.source(path, target, Path(folder)), Path(folder, "optimised.onnx")
            session = self.session(source, target, Path(folder), optimised if self.writes_graph else None)
            compiled = GpuCompiled(session, Execution(target.precision, {}, None, 0.0), target, path, self)
            run = compiled.bind(np.random.default_rng(0).standard_normal(tuple(shape), np.float32))
            for _ in range(WARM_UP + repeats):
                run()
            named = Named.of(optimised, source) if self.writes_graph else Named(())
            return node_times(_events(session, folder), repeats, named)

    writes_graph = True  # whether ONNX Runtime can write what it made of the file

    def usage(self, file: str, target: Target) -> str:
        """The code that a card shows."""
        load = f'model = "{file}"\n'
        if target.precision == "fp16":
            load = ("import onnx\n"
                    "from onnxruntime.transformers.float16 import convert_float_to_float16\n"
                    f'model = convert_float_to_float16(onnx.load("{file}"), keep_io_types=True).SerializeToString()\n')
        unwanted = f", disabled_optimizers={list(self.unwanted)}" if self.unwanted else ""
        return (f"import numpy as np, onnxruntime  # pip install {_PACKAGE}, and no onnxruntime beside it\n{load}"
                f"session = onnxruntime.InferenceSession(model, providers={self.options(target.precision)!r}"
                f"{unwanted})\n"
                f'assert session.get_providers()[0] == "{self.provider}"  # else it would run on the CPU\n'
                "images = np.ascontiguousarray(images, np.float32)\n"
                'there = onnxruntime.OrtValue.ortvalue_from_numpy(images, "cuda", 0)\n'
                "binding = session.io_binding()\n"
                'binding.bind_ortvalue_input("images", there)\n'
                'binding.bind_output("logits")\n'
                "there.update_inplace(images)  # these two calls are what is timed: copies in and out are part of it\n"
                "session.run_with_iobinding(binding)\n"
                "logits = binding.copy_outputs_to_cpu()[0]")

    def _check_installed(self, who: str) -> None:
        """TargetError unless the package is there, and ONNX Runtime is its module."""
        try:
            version(_PACKAGE)
        except PackageNotFoundError:
            raise TargetError(f"{who}: ONNX Runtime for GPUs is not installed. Install it: pip install "
                              f"'hwnas[{self.extra}]' && {_MEND}") from None
        if self.provider not in import_onnxruntime().get_available_providers():
            raise TargetError(f"{who}: onnxruntime lies over {_PACKAGE}, as both are one module, so that only the CPU "
                              f"can be used. Take it away: {_MEND}")

    def _check_loads(self, who: str) -> None:
        """TargetError where the provider's libraries do not load: ONNX Runtime would go on with the CPU."""
        if type(self) in _LOADED:
            return
        ort, said = import_onnxruntime(), io.StringIO()
        with contextlib.redirect_stdout(said):  # it prints what it does not find
            self.preload()
        value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
        graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "least", value[:1], value[1:])
        least = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        try:
            session = ort.InferenceSession(least.SerializeToString(), options, providers=self.providers(),
                                           enable_fallback=0)
        except Exception as error:  # ONNX Runtime's exceptions share no base class
            raise self._unloaded(who, one_line(error)) from error
        self._check_taken(session.get_providers(), who, " ".join(said.getvalue().split())[:200])
        _LOADED.add(type(self))

    def preload(self) -> None:
        """Load the libraries that pip installed, where the system does not find them itself."""
        load = getattr(import_onnxruntime(), "preload_dlls", None)
        if load is not None:
            load()

    def _check_taken(self, taken: Sequence[str], who: str, why: str = "") -> None:
        """TargetError unless a session has this runtime's provider first: ONNX Runtime leaves out, in silence, what it
        cannot load."""
        if list(taken[:1]) != [self.provider]:
            raise self._unloaded(who, why)

    def _unloaded(self, who: str, why: str) -> TargetError:
        reason = f" ({why})" if why else ""
        return TargetError(f"{who}: ONNX Runtime could not load its {self.provider}{reason}, and would have "
                           f"run on something else. See that nvidia-smi works; libraries: pip install "
                           f"'hwnas[{self.extra}]'.")


class TensorRtRuntime(CudaRuntime):
    """ONNX Runtime's TensorRT provider: int8 by symmetric QDQ pairs. What it does not take runs on CUDA, and is told.

    TensorRT does not say through ONNX Runtime which kernels it chose: nodes inside its engine count as the precision
    that their pairs force. What the file leaves in floating point runs in fp32 there, for which TensorRT may take TF32.
    """

    name = "onnxruntime_tensorrt"
    title = "ONNX Runtime on TensorRT"
    extra = "tensorrt"
    precisions = ("int8", "fp32")  # fp32 is what int8 is compared with
    provider = _TENSORRT
    # It would give convolutions int32 biases, which TensorRT's parser refuses.
    unwanted = ("WeightBiasQuantization",)
    writes_graph = False  # not of an engine

    def version(self) -> str:
        base = super().version()
        for package in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
            with contextlib.suppress(PackageNotFoundError):
                return f"{base}, TensorRT {version(package)}"
        return base

    def options(self, precision: str = "fp32") -> Providers:
        own = {"device_id": "0", "trt_int8_enable": str(precision == "int8")}  # some versions know no other words
        return [(self.provider, own), *super().options(precision)]

    def providers(self, precision: str = "fp32") -> Providers:
        (own, said), *others = self.options(precision)
        kept = {"trt_timing_cache_enable": "True", "trt_timing_cache_path": str(_timings())}
        return [(own, {**said, **kept}), *others]

    def preload(self) -> None:
        super().preload()
        _timings().mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):
            import tensorrt  # noqa: F401  loads its libraries

    def executed(self, events: Events, path: str | os.PathLike[str], meant: int) -> dict[str, int]:
        elsewhere = super().executed([event for event in events if event["args"].get("provider") != _TENSORRT], path,
                                     meant)
        every = sum(node.op_type in ("Conv", "Gemm", "MatMul") for node in nodes_of(path))
        inside = max(0, every - sum(elsewhere.values()))
        int8 = min(inside, max(0, meant - sum(elsewhere.values())))
        counts = {"int8": int8, "fp32": inside - int8, **elsewhere}
        return {name: count for name, count in counts.items() if count}


def _timings() -> Path:
    """Where timings of kernels are kept: without them every compilation takes long."""
    return home() / "tensorrt"


_LOADED: set[type[CudaRuntime]] = set()  # runtimes whose provider this process has loaded


class GpuCompiled(OnnxRuntimeCompiled):
    """A session on a GPU with a fixed batch."""

    def __init__(self, session: Any, execution: Execution, target: Target, path: str | os.PathLike[str],
                 runtime: CudaRuntime) -> None:
        super().__init__(session, execution, target, path)
        self._runtime = runtime

    def _bind(self, session: Any, images: NDArray[np.float32]) -> Callable[[], None]:
        if len(images) != self._target.batch:
            raise ValueError(f"bind takes one batch of {self._target.batch} images, got {len(images)}")
        here = np.ascontiguousarray(images, dtype=np.float32).copy()
        there = import_onnxruntime().OrtValue.ortvalue_from_numpy(here, self._runtime.memory, 0)
        binding = session.io_binding()
        binding.bind_ortvalue_input(self._input, there)
        binding.bind_output(self._output)  # in main memory
        return _Call(session, binding, here, there)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        """As the protocol has it, in a process of its own: nodes wait for the GPU there, one after another."""
        job = {"path": os.path.abspath(self._path), "label": os.fspath(self._path), "shape": list(images.shape),
               "repeats": repeats}
        told = run_child("hwnas.runtimes.onnxruntime_gpu", job, self._target, timeout_s=_SILENT_S, memory_mb=1)
        return [NodeTime(**each) for each in told]


class _Call:
    """A bound inference: images to the GPU, the network, answers back."""

    __slots__ = ("_binding", "_here", "_run", "_there")

    def __init__(self, session: Any, binding: Any, here: NDArray[np.float32], there: Any) -> None:
        self._run: Callable[[Any], None] = session.run_with_iobinding
        self._binding, self._here, self._there = binding, here, there

    def __call__(self) -> None:
        self._there.update_inplace(self._here)
        self._run(self._binding)  # ends when the answer is in main memory


def _shape(session: Any, target: Target, path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Of a batch of images; FileError where the file leaves it open."""
    _, *axes = session.get_inputs()[0].shape
    if not all(isinstance(axis, int) for axis in axes):
        raise FileError(path, f"its input has open axes {axes}, and to see what a GPU executes it must be run.",
                        "Export it with a fixed height and width.")
    return (target.batch, *axes)


def _events(session: Any, folder: str) -> Events:
    """What a session's profile says of its runs; it is not profiled any more."""
    try:
        return list(json.loads(Path(session.end_profiling()).read_text()))
    except (OSError, ValueError) as error:
        raise unwritten(folder, error) from error


def _short(provider: str) -> str:
    return _SHORT.get(provider, provider)


def _nodes(events: Events) -> list[Mapping[str, Any]]:
    """What is said of each node that ran."""
    return [event["args"] for event in events
            if event.get("cat") == "Node" and str(event.get("name", "")).endswith("_kernel_time")]


def profiled(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> list[dict[str, Any]]:
    """The task of the child process: `CudaRuntime.times`, as plain values."""
    ours: Any = runtime  # a CudaRuntime, of the module that this one is run as
    return [asdict(time) for time in ours.times(job["path"], target, job["shape"], job["repeats"])]


if __name__ == "__main__":  # a child process
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # otherwise a node's time is that of asking for it
    sys.exit(serve(profiled))
