"""LiteRT on the CPU, formerly TensorFlow Lite: the runtime of phones and small boards. XNNPACK runs the nodes it can.

A network is written as a .tflite file first (hwnas/networks/litert). An interpreter holds one input, so each bound
call has its own interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path
from timeit import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import FileError, TargetError, one_line
from hwnas.networks.litert.lowering import write_tflite
from hwnas.networks.litert.tflite import SUFFIX, is_tflite, single_operators
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.target import Target

_PACKAGE = "ai-edge-litert"
_WEIGHTED = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
_TYPES = {"float32": "fp32", "int8": "int8"}
_DELEGATE = "DELEGATE"
_XNNPACK, _BUILT_IN = "XNNPACK", "built-in"  # whose kernels run
_WARM_UP = 3
_NHWC = (0, 2, 3, 1)


class LiteRtRuntime:
    """LiteRT's interpreter with the XNNPACK delegate: fp32 and int8 (QDQ files), and the .tflite files made of both."""

    name = "litert"
    title = "LiteRT"
    package = _PACKAGE
    suffix = SUFFIX

    def version(self) -> str:
        _check_installed(self.name)
        return f"litert {package_version(_PACKAGE)}"

    def check(self, target: Target) -> None:
        require(target, self.name, ("fp32", "int8"), "cpu")
        _check_installed(f"target {target.name}")
        import ai_edge_litert.interpreter  # noqa: F401  before a child limits its memory

    def write(self, onnx_path: str | os.PathLike[str], target: Target) -> bytes:
        """Return the .tflite file of an ONNX network for the target's batch; FileError names what it cannot express."""
        self.check(target)
        return write_tflite(onnx_path, target.batch)

    def compile(self, onnx_path: str | os.PathLike[str], target: Target, *, refuse: bool = True) -> LiteRtCompiled:
        """Compile an ONNX file, or a .tflite file of hwnas, as the protocol says. A fallback is an error only with
        `refuse`."""
        self.check(target)
        if is_tflite(onnx_path):
            content, meant = Path(onnx_path).read_bytes(), None
        else:
            meant = quantised_in_file(onnx_path)
            content = write_tflite(onnx_path, target.batch)
        # Read back what was made of it. A .tflite file holds no pairs: there, int8 weights say what was meant for int8.
        interpreter = _Interpreter(onnx_path, content, target)
        weighted = [node for node in interpreter.nodes if node["op_name"] in _WEIGHTED]
        executed = Counter(map(_precision, weighted))
        int8_weights = sum(np.dtype(node["operand_types"][1]) == np.int8 for node in weighted)
        execution = judge(onnx_path, target, executed, int8_weights if meant is None else meant, refuse)
        outside = Counter(node["op_name"] for node in _outside(interpreter.nodes))
        return LiteRtCompiled(interpreter, replace(execution, outside=dict(sorted(outside.items()))))

    def usage(self, file: str, target: Target) -> str:
        """Return the code that a card shows."""
        return ("import numpy as np\n"
                "from ai_edge_litert.interpreter import Interpreter\n"
                f'interpreter = Interpreter("{file}", num_threads={threads_of(target)})  # as measured\n'
                "interpreter.allocate_tensors()\n"
                "(given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()\n"
                "pixels = images.transpose(0, 2, 3, 1)  # it takes [n, height, width, channels]\n"
                'interpreter.set_tensor(given["index"], np.ascontiguousarray(pixels, np.float32))\n'
                "interpreter.invoke()  # this call is what is timed\n"
                'logits = interpreter.get_tensor(result["index"])')


def _check_installed(who: str) -> None:
    if find_spec("ai_edge_litert") is None:
        raise TargetError(f"{who}: LiteRT is not installed. Install it: pip install 'hwnas[edge]'")


class _Interpreter:
    """A network in its own interpreter, whose tensors are allocated for the target's batch."""

    def __init__(self, path: str | os.PathLike[str], content: bytes, target: Target) -> None:
        self.path, self.content, self.target = path, content, target
        try:
            with _announced():
                self.native = _make(content, threads_of(target))
                self.input, = self.native.get_input_details()
                if self.input["shape"][0] != target.batch:
                    self.native.resize_tensor_input(self.input["index"], [target.batch, *self.input["shape"][1:]])
                self.native.allocate_tensors()
            self.input, = self.native.get_input_details()
            self.output, = self.native.get_output_details()
            self.nodes: list[dict[str, Any]] = self.native._get_ops_details()
        except (RuntimeError, ValueError) as error:
            raise FileError(path, f"LiteRT cannot compile it: {one_line(error)}") from error

    def feed(self, images: NDArray[np.float32]) -> None:
        """Set the input: images [batch, c, h, w]."""
        check_batch(images, self.target)
        if images.ndim == 4:
            images = images.transpose(_NHWC)
        self.native.set_tensor(self.input["index"], np.ascontiguousarray(images, np.float32))


def _make(content: bytes, threads: int) -> Any:
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_content=content, num_threads=threads)


_announcements: list[str] = []


@contextlib.contextmanager
def _announced() -> Iterator[None]:
    """Hide stderr until a block has succeeded: LiteRT prints there once that it made its delegate."""
    if _announcements:
        yield
        return
    stderr = os.dup(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(silent, 2)
        yield
        _announcements.append("made")
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(silent)


def _precision(node: dict[str, Any]) -> str:
    """Return the precision in which a node computes: that of the first input of convolutions and matrix products, and
    of the first output of other nodes. Empty for a type that no target has."""
    kind = node["operand_types" if node["op_name"] in _WEIGHTED else "result_types"][0]
    return _TYPES.get(np.dtype(kind).name, "")


def _outside(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes that no delegate runs. A delegate names its inputs and outputs; it runs all between."""
    made_by = {int(tensor): node for node in nodes if node["op_name"] != _DELEGATE for tensor in node["outputs"]}
    inside: set[int] = set()  # found backwards from a delegate's outputs, up to its inputs
    for delegate in (node for node in nodes if node["op_name"] == _DELEGATE):
        read, waiting = {int(tensor) for tensor in delegate["inputs"]}, [int(tensor) for tensor in delegate["outputs"]]
        while waiting:
            tensor = waiting.pop()
            node = made_by.get(tensor)
            if node is not None and tensor not in read and node["index"] not in inside:
                inside.add(node["index"])
                waiting += [int(each) for each in node["inputs"]]
    return [node for node in nodes if node["op_name"] != _DELEGATE and node["index"] not in inside]


@dataclass(frozen=True)
class LiteRtCompiled:
    """A network in LiteRT with a fixed batch."""

    interpreter: _Interpreter
    execution: Execution

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        own = self.interpreter
        interpreter = _Interpreter(own.path, own.content, own.target)
        interpreter.feed(images)
        return BoundCall(interpreter.native.invoke, interpreter)

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        def run(batch: NDArray[np.float32]) -> NDArray[np.float32]:
            self.interpreter.feed(batch)
            self.interpreter.native.invoke()
            answers = np.asarray(self.interpreter.native.get_tensor(self.interpreter.output["index"]))
            return answers.reshape(len(batch), *answers.shape[1:])

        return run_in_batches(run, images, self.interpreter.target.batch)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        """Profile as the protocol says. LiteRT gives Python no times: each operator is timed in its own interpreter, on
        zeros, over the quickest three quarters of `repeats`. Its precision and kernel are read off the whole
        network."""
        times_s = [repeat(run, number=1, repeat=_WARM_UP + repeats)[_WARM_UP:] for _, run in self._operators]
        means = quickest_means([[1e3 * each for each in own] for own in times_s])
        return [replace(node, ms=ms) for (node, _), ms in zip(self._operators, means, strict=True)]

    @cached_property
    def _operators(self) -> list[tuple[NodeTime, Callable[[], None]]]:
        """Return each operator as a node without a time, and a call that runs it."""
        nodes, threads, operators = self.interpreter.nodes, threads_of(self.interpreter.target), []
        outside = {node["index"] for node in _outside(nodes)}
        for name, kind, place, content in single_operators(self.interpreter.content):
            native = _make(content, threads)
            native.allocate_tensors()
            is_outside = place in outside
            operators.append((NodeTime(name, kind, 0.0, _precision(nodes[place]),
                                       _BUILT_IN if is_outside else _XNNPACK, "cpu", is_outside), native.invoke))
        return operators
