"""The runtimes that execute exported networks: one small protocol, looked up by name.

A third party registers a class whose constructor takes no arguments under the entry point group `hwnas.runtimes`. It
must pass `hwnas.testing.check_runtime`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np

from hwnas.errors import FileError, TargetError, one_line
from hwnas.lazy import onnx
from hwnas.system.cores import usable_cores
from hwnas.system.libraries import find_offers
from hwnas.system.paths import write_atomic
from hwnas.target import Target
from hwnas.tasks.task import load_task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.data.dataset import Dataset, Split


GROUP = "hwnas.runtimes"
_BUILT_IN = {
    "openvino": ("hwnas.runtimes.openvino", "OpenVinoRuntime"),
    "onnxruntime": ("hwnas.runtimes.onnxruntime", "OnnxRuntime"),
    "onnxruntime_cuda": ("hwnas.runtimes.onnxruntime_gpu", "CudaRuntime"),
    "litert": ("hwnas.runtimes.litert", "LiteRtRuntime"),
}
_UNITS = {"cpu": "CPU", "cuda": "GPU"}
INTEGER = ("QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger")  # of files without pairs
_MIN_HONOURED = 0.5  # least share of nodes that run in the forced precision; fp32 allows no exception
_CHUNK = 512  # images normalised at a time
MAX_BOOKKEEPING_MS = 0.003  # most that it costs to time one node
FP32 = Target("fp32 reference", "onnxruntime", "fp32", threads=0, batch=64)


@dataclass(frozen=True, slots=True)
class Execution:
    """The precisions of the compiled graph's convolutions and matrix products, read back from it.

    `precisions` counts them by executed precision. `int8_share` is the share executed in int8 (None unless int8 was
    asked for). `fallback_share`: of the nodes that are meant for the asked precision, the share that runs in another
    one. The int8 recipe leaves squeeze-and-excite in floating point. It is not meant for int8 and lowers `int8_share`
    only. `outside` counts, by kind, all nodes that the runtime's fast kernels (a delegate's, a GPU's) do not run.
    """

    precision: str
    precisions: Mapping[str, int]
    int8_share: float | None
    fallback_share: float
    outside: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(replace(self, precisions=dict(self.precisions), outside=dict(self.outside)))


@dataclass(frozen=True, slots=True)
class NodeTime:
    """The mean time of one executed node. `name` holds the ONNX names of the nodes that it was made of.

    Facts that a runtime does not give stay empty. `precision` is the executed one (fp32, bf16, fp16, int8),
    `implementation` the kernel's name, and `device` the place as targets name it (cpu, cuda). `reference` is True if
    none of the runtime's fast kernels takes the node.
    """

    name: str
    kind: str
    ms: float
    precision: str = ""
    implementation: str = ""
    device: str = ""
    reference: bool = False


class Answering(Protocol):
    """A network that answers images, here or on another machine."""

    @property
    def execution(self) -> Execution:
        """The precisions that are really executed, read back from the compiled graph."""

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits [n, classes] of any number n of normalised images."""


@runtime_checkable
class Compiled(Answering, Protocol):
    """A network ready to run on one target."""

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        """Return a call that runs one inference over `images` [batch, c, h, w], which are bound once. It holds what it
        needs; several calls may exist at a time."""

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        """Return each executed node's mean time over `repeats` inferences of [batch, c, h, w], interruptions left out.

        The sum exceeds the time of a plain call: the network is instrumented, or each node is timed by itself. A
        runtime may report the whole network as one node.
        """


@runtime_checkable
class Runtime(Protocol):
    """A way to execute ONNX files. `name` is its name in targets and tables."""

    name: str

    def version(self) -> str:
        """Return name and version, e.g. `openvino 2026.4.1`."""

    def check(self, target: Target) -> None:
        """Raise TargetError, which names what is missing, if this host cannot run `target`."""

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> Compiled:
        """Compile for exactly this precision, these threads, this batch.

        TargetError as `check`, or if a floating-point precision was not honoured. CandidateError if the file cannot be
        compiled or is of the wrong kind for the precision. So too if more than half of its int8 nodes fall back.

        This may also take `refuse`. With False no fallback is an error; the compiled network's `execution` shows it.
        """


@runtime_checkable
class OwnFormat(Protocol):
    """The further methods of a runtime with a file format of its own, in which its networks are deployed. `compile`
    takes such a file in place of the ONNX file, with the same result. `suffix` is that of its name, with the dot."""

    suffix: str

    def write(self, onnx_path: str | os.PathLike[str], target: Target) -> bytes:
        """Return the file's bytes, made from an ONNX file. Errors as `Runtime.compile`."""


@runtime_checkable
class Shown(Protocol):
    """The further parts of a runtime from which cards show how to run a network. `title` is the name that people use,
    `package` the one that pip installs."""

    title: str
    package: str

    def usage(self, file: str, target: Target) -> str:
        """Return Python that runs `file` on `images`, float32 [n, c, h, w], as the target does, and makes `logits`."""


def deployed_of(onnx_path: Path, runtime: str) -> Path:
    """Return the file that the runtime of this name runs: the ONNX file, or the one beside it in its own format."""
    own = load_runtime(runtime)
    return onnx_path.with_suffix(own.suffix) if isinstance(own, OwnFormat) else onnx_path


def write_deployed(onnx_path: Path, target: Target) -> Path:
    """Write the file of `deployed_of`, if it is another; CandidateError if its format cannot express the network."""
    runtime, path = load_runtime(target.runtime), deployed_of(onnx_path, target.runtime)
    if isinstance(runtime, OwnFormat):
        write_atomic(path, runtime.write(onnx_path, target))
    return path


def load_runtime(name: str) -> Runtime:
    """Return the runtime called `name`, built in or registered by another package. UnknownName lists all names."""
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        return cast(Runtime, getattr(importlib.import_module(module), attribute)())
    return cast(Runtime, find_offers(GROUP, "runtime", name, _BUILT_IN)[name].load()())


def inspected(runtime: Runtime, onnx_path: str | os.PathLike[str], target: Target) -> Compiled:
    """Compile a network to be inspected: as `Runtime.compile`, but a fallback is no error if that takes `refuse`."""
    look: dict[str, Any] = {"refuse": False} if "refuse" in signature(runtime.compile).parameters else {}
    return runtime.compile(onnx_path, target, **look)


def threads_of(target: Target) -> int:
    """Return the number of threads to use: the target's, or one for each core that this process may use."""
    return target.threads or len(usable_cores())


def require(target: Target, runtime: str, precisions: tuple[str, ...], device: str) -> None:
    """Raise TargetError unless `target` asks for one of `precisions` on `device`."""
    if target.device != device:
        raise TargetError(f"target {target.name}: {runtime} runs on device {device!r} here, not {target.device!r}. "
                          f"Set target.device={device}.")
    if target.precision not in precisions:
        raise TargetError(f"target {target.name}: {runtime} cannot run {target.precision} on this host; it can run "
                          f"{', '.join(precisions)}. Choose another target or precision.")


def judge(path: str | os.PathLike[str], target: Target, precisions: Mapping[str, int], meant: int,
          refuse: bool = True) -> Execution:
    """Return the Execution of counted nodes; raise an error if the file or the precision is not as `target` forces it.

    `meant` counts the file's own int8 convolutions and matrix products. Without `refuse`, no fallback is an error.
    """
    # 1. The file must be of the right kind: quantised for int8, and not quantised for any other precision.
    total = sum(precisions.values())
    n_asked = precisions.get(target.precision, 0)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(precisions.items())) or "none"
    if target.precision == "int8":
        if not meant:
            raise FileError(path, f"it is not quantised, so that target {target.name} would not run it in int8.",
                            "Quantise it first: hwnas quantize model=FILE dataset=NAME.")
        fallback = max(0, meant - n_asked) / meant if total else 1.0
    else:
        if meant:
            raise FileError(path, f"it is quantised; target {target.name} runs {target.precision} and needs the fp32 "
                                  "file.")
        fallback = (total - n_asked) / total if total else 0.0
    # 2. The nodes must run as forced. If int8 is not honoured the file is to blame, otherwise the host.
    limit = 1.0 if not refuse else 0.0 if target.precision == "fp32" else _MIN_HONOURED
    if fallback > limit and target.precision == "int8":
        raise FileError(path, f"int8 was forced but not honoured by {target.runtime}: convolutions and matrix products "
                              f"run as {counts}.", "Quantise its fp32 file for this runtime: hwnas quantize "
                              "target=NAME model=FILE dataset=NAME.")
    if fallback > limit:
        raise TargetError(f"target {target.name}: {target.precision} was forced but not honoured: convolutions and "
                          f"matrix products of {os.fspath(path)} run as {counts}. Choose a precision that this "
                          f"{_UNITS.get(target.device, target.device)} has.")
    share = n_asked / max(1, total) if target.precision == "int8" else None
    return Execution(target.precision, dict(precisions), share, fallback)


class BoundCall:
    """A bound inference. It drops the result of `run`, and keeps alive what `run` needs."""

    __slots__ = ("_run", "kept")

    def __init__(self, run: Callable[[], object], kept: Any) -> None:
        self._run, self.kept = run, kept

    def __call__(self) -> None:
        self._run()


def check_batch(images: NDArray[np.float32], target: Target) -> None:
    """Raise ValueError unless there are as many `images` as the target's batch."""
    if len(images) != target.batch:
        raise ValueError(f"bind takes one batch of {target.batch} images, got {len(images)}")


def run_in_batches(run: Callable[[NDArray[np.float32]], NDArray[Any]], images: NDArray[np.float32], batch: int
                   ) -> NDArray[np.float32]:
    """Return the answers of `run`, which takes [batch, ...], to any number of images; zeros fill up the last batch."""
    parts = []
    for start in range(0, len(images), batch):
        chunk = np.ascontiguousarray(images[start : start + batch], dtype=np.float32)
        padded = np.concatenate([chunk, np.zeros((batch - len(chunk), *chunk.shape[1:]), np.float32)])
        parts.append(run(padded)[: len(chunk)])
    return np.concatenate(parts).astype(np.float32)


def quickest_means(times_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean time of each node over the quickest three quarters of its runs, which leaves interruptions out.

    Timing a node takes time, too: that of the quickest node, at most MAX_BOOKKEEPING_MS, is subtracted from all.
    """
    means = [float(np.mean(sorted(own)[: max(1, len(own) * 3 // 4)])) for own in times_ms]
    bookkeeping = min([MAX_BOOKKEEPING_MS, *means])
    return [mean - bookkeeping for mean in means]


def quantised_in_file(onnx_path: str | os.PathLike[str]) -> int:
    """Count the convolutions and matrix products of an ONNX file that are INTEGER operators, or whose data and weights
    are both dequantised."""
    nodes = nodes_of(onnx_path)
    dequantised = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    return sum(node.op_type in INTEGER or (
        node.op_type in ("Conv", "Gemm", "MatMul") and set(node.input[:2]) <= dequantised) for node in nodes)


def nodes_of(onnx_path: str | os.PathLike[str]) -> list[onnx.NodeProto]:
    """Return the nodes of an ONNX file's outermost graph, in order; FileError if it is no whole ONNX file."""
    try:
        proto = onnx.load_model_from_string(Path(onnx_path).read_bytes())
    except (MemoryError, ImportError):
        raise
    except Exception as error:  # protobuf's exceptions depend on its implementation
        raise FileError(onnx_path, f"cannot be read: {one_line(error)}") from error
    if not proto.HasField("graph"):
        raise FileError(onnx_path, "cannot be read: it holds no graph")
    return list(proto.graph.node)


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """A network's answers to images, in order, as its task has them. `confidence` is None if the task has none."""

    values: NDArray[Any]
    confidence: NDArray[np.float16] | None


def answer(compiled: Answering, dataset: Dataset, part: Split, progress: Callable[[float], None] | None = None
           ) -> Answers:
    """Return the answers to the images of `part`, which `dataset` normalises."""
    task, values, confidence, n = load_task(dataset.task), [], [], len(part)
    for start in range(0, n, _CHUNK):
        outputs = compiled.logits(dataset.normalise(np.asarray(part.images[start : start + _CHUNK])))
        values.append(task.answers(outputs))
        confidence.append(task.confidence(outputs))
        if progress:
            progress(min(1.0, (start + _CHUNK) / n))
    confidences = [each for each in confidence if each is not None]
    return Answers(np.concatenate(values), np.concatenate(confidences) if confidences else None)


def predict(compiled: Answering, dataset: Dataset, progress: Callable[[float], None] | None = None,
            ) -> NDArray[Any]:
    """Return the answer to every test image, in order."""
    return answer(compiled, dataset, dataset.test, progress).values
