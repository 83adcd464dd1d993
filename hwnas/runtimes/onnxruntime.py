"""ONNX Runtime on the CPU: threads fixed, inputs and outputs bound, executed operators read back."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import FileError, UserError
from hwnas.runtimes.runtime import Execution, NodeTime, judge, one_line, quantised_in_file, require, threads_of
from hwnas.runtimes.wire import nodes_of
from hwnas.system.libraries import import_onnxruntime
from hwnas.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INT8 = ("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat")
_FLOAT = ("Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")
_SUFFIX = "_kernel_time"
_WARM_UP = 5
_MAX_BOOKKEEPING_MS = 0.003


class OnnxRuntime:
    """ONNX Runtime's CPU provider: fp32 and int8 (QDQ files)."""

    name = "onnxruntime"

    def version(self) -> str:
        return f"onnxruntime {package_version('onnxruntime')}"

    def check(self, target: Target) -> None:
        require(target, self.name, ("fp32", "int8"), "cpu")

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> OnnxRuntimeCompiled:
        self.check(target)
        meant = quantised_in_file(onnx_path)
        with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
            optimised = Path(folder, "optimised.onnx")
            try:
                session = _session(onnx_path, target, optimised=optimised)
            except FileError as error:
                _session(onnx_path, target)  # the file is to blame if this fails, too
                raise _unwritten(folder, error.__cause__ or error) from error
            executed = _count_executed(optimised)
        return OnnxRuntimeCompiled(session, judge(onnx_path, target, executed, meant), target, onnx_path)


def _session(path: str | os.PathLike[str], target: Target, *, optimised: Path | None = None,
             profile: Path | None = None) -> Any:
    ort = import_onnxruntime()

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads_of(target), 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    options.add_free_dimension_override_by_name("batch", target.batch)
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    try:
        return ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"],
                                    enable_fallback=0)  # it would be to the same, and be printed
    except Exception as error:  # ONNX Runtime's exceptions share no base class
        raise FileError(path, f"ONNX Runtime cannot compile it: {one_line(error)}") from error


def run_once(path: str | os.PathLike[str], images: NDArray[Any]) -> NDArray[np.float32]:
    """What a network answers to `images`, in whatever type it takes them; FileError when it cannot be run."""
    session = _session(path, Target("once", "onnxruntime", "fp32", batch=len(images)))
    try:
        logits: NDArray[np.float32] = session.run(None, {session.get_inputs()[0].name: images})[0]
    except Exception as error:  # as above
        raise FileError(path, f"ONNX Runtime cannot run it: {one_line(error)}") from error
    return logits


def _unwritten(folder: str, error: BaseException) -> UserError:
    """What to say where ONNX Runtime could not write in a folder of temporary files; it does not tell why itself."""
    return UserError(f"{folder}: ONNX Runtime cannot write there ({one_line(error)}). Free space, or set TMPDIR to a "
                     "folder on another disk; then give the same command again.")


def _count_executed(optimised: Path) -> dict[str, int]:
    """Convolutions and matrix products of the optimised graph, counted by the precision they run in."""
    counts: Counter[str] = Counter()
    for node in nodes_of(optimised):
        if node.op_type in _INT8:
            counts["int8"] += 1
        elif node.op_type in _FLOAT:
            counts["fp32"] += 1
    return dict(counts)


class OnnxRuntimeCompiled:
    """A session with a fixed batch."""

    def __init__(self, session: Any, execution: Execution, target: Target, path: str | os.PathLike[str]) -> None:
        self.execution = execution
        self._session = session
        self._target = target
        self._path = path
        self._input = session.get_inputs()[0].name
        self._output = session.get_outputs()[0].name

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        return self._bind(self._session, images)

    def _bind(self, session: Any, images: NDArray[np.float32]) -> Callable[[], None]:
        ort = import_onnxruntime()

        if len(images) != self._target.batch:
            raise ValueError(f"bind takes one batch of {self._target.batch} images, got {len(images)}")
        kept = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(images, dtype=np.float32))
        binding = session.io_binding()
        binding.bind_ortvalue_input(self._input, kept)
        binding.bind_output(self._output)
        return _Call(session, binding, kept)

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        batch, parts = self._target.batch, []
        for start in range(0, len(images), batch):
            chunk = np.ascontiguousarray(images[start : start + batch], dtype=np.float32)
            padded = np.concatenate([chunk, np.zeros((batch - len(chunk), *chunk.shape[1:]), np.float32)])
            parts.append(self._session.run([self._output], {self._input: padded})[0][: len(chunk)])
        return np.concatenate(parts).astype(np.float32)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        with tempfile.TemporaryDirectory(prefix="hwnas-") as folder:
            session = _session(self._path, self._target, profile=Path(folder, "profile"))
            run = self._bind(session, images)
            for _ in range(_WARM_UP + repeats):
                run()
            try:
                events = json.loads(Path(session.end_profiling()).read_text())
            except (OSError, ValueError) as error:
                raise _unwritten(folder, error) from error
        return _node_times(events, repeats)


class _Call:
    """A bound inference, with what it needs to stay valid."""

    __slots__ = ("_binding", "_kept", "_run")

    def __init__(self, session: Any, binding: Any, kept: Any) -> None:
        self._run: Callable[[Any], None] = session.run_with_iobinding
        self._binding, self._kept = binding, kept

    def __call__(self) -> None:
        self._run(self._binding)


def _node_times(events: list[dict[str, Any]], repeats: int) -> list[NodeTime]:
    """Mean time of each node over the quickest three quarters of the last `repeats` runs, which leaves interruptions
    out.

    ONNX Runtime records whole microseconds, rounded down, so that half of one is added. The time of the quickest node
    is taken as the cost of recording.
    """
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_SUFFIX):
            durations[name.removesuffix(_SUFFIX), event["args"]["op_name"]].append(event["dur"] + 0.5)
    kept = max(1, repeats * 3 // 4)
    means = {key: float(np.mean(sorted(times[-repeats:])[:kept])) / 1e3 for key, times in durations.items()}
    bookkeeping = min(_MAX_BOOKKEEPING_MS, min(means.values(), default=0.0))
    return [NodeTime(name, kind, max(0.0, ms - bookkeeping)) for (name, kind), ms in means.items()]
