"""A runtime of another package, for tests: it computes nothing, and each inference lasts a programmed time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray

from hwnas.errors import FileError, one_line
from hwnas.runtimes.runtime import Execution, NodeTime, check_batch, require
from hwnas.target import PRECISIONS, Target

NULL_KEY = "null_ms"  # of an ONNX file's metadata: how long an inference lasts
USUAL_MS = 0.1  # where the file does not say


class NullRuntime:
    """Every inference lasts `ms` (busy waiting); without `ms`, as long as the file says."""

    name = "null"

    def __init__(self, ms: float | None = None) -> None:
        self._ms = ms

    def version(self) -> str:
        return "null 1"

    def check(self, target: Target) -> None:
        require(target, self.name, PRECISIONS, "cpu")

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> NullCompiled:
        self.check(target)
        try:
            proto = onnx.load(os.fspath(onnx_path))
        except Exception as error:
            raise FileError(onnx_path, f"cannot be read: {one_line(error)}") from error
        metadata = {entry.key: entry.value for entry in proto.metadata_props}
        try:
            ms = float(metadata.get(NULL_KEY, USUAL_MS)) if self._ms is None else self._ms
        except ValueError:
            raise FileError(onnx_path, f"the null runtime needs a time in ms under {NULL_KEY!r}.") from None
        return NullCompiled(ms, proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value, target)


class NullCompiled:
    """A network that takes a programmed time and computes nothing."""

    def __init__(self, ms: float, classes: int, target: Target) -> None:
        self.execution = Execution(target.precision, {}, None, 0.0)
        self._ms, self._classes, self._target = ms, classes, target

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        check_batch(images, self._target)
        seconds, clock = self._ms / 1e3, time.perf_counter

        def wait() -> None:
            end = clock() + seconds
            while clock() < end:
                pass

        return wait

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.zeros((len(images), self._classes), np.float32)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        run = self.bind(images)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return [NodeTime("wait", "Null", (time.perf_counter() - start) * 1e3 / repeats)]
