"""A runtime that computes nothing and takes a programmed time: it shows the harness's own overhead."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hwnas.errors import FileError
from hwnas.runtimes.runtime import Execution, NodeTime, one_line, require
from hwnas.target import PRECISIONS, Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

METADATA_KEY = "null_ms"


class NullRuntime:
    """Every inference lasts `ms` (busy waiting); without `ms`, as long as the ONNX metadata says under `null_ms`."""

    name = "null"

    def __init__(self, ms: float | None = None) -> None:
        self._ms = ms

    def version(self) -> str:
        return "null 1"

    def check(self, target: Target) -> None:
        require(target, self.name, PRECISIONS, "cpu")

    def compile(self, onnx_path: str | os.PathLike[str], target: Target) -> NullCompiled:
        self.check(target)
        import onnx

        try:
            proto = onnx.load(os.fspath(onnx_path))
        except Exception as error:  # a foreign file may fail in protobuf, onnx or the file system
            raise FileError(onnx_path, f"cannot be read: {one_line(error)}") from error
        metadata = {entry.key: entry.value for entry in proto.metadata_props}
        try:
            ms = self._ms if self._ms is not None else float(metadata[METADATA_KEY])
        except (KeyError, ValueError):
            raise FileError(onnx_path, f"the null runtime needs a time in ms under {METADATA_KEY!r} in the ONNX "
                                       f"metadata, got {metadata.get(METADATA_KEY)!r}.") from None
        return NullCompiled(ms, proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value, target)


class NullCompiled:
    """A network that takes a programmed time and computes nothing."""

    def __init__(self, ms: float, classes: int, target: Target) -> None:
        self.execution = Execution(target.precision, {}, None, 0.0)
        self._ms = ms
        self._classes = classes
        self._batch = target.batch

    def bind(self, images: NDArray[np.float32]) -> Callable[[], None]:
        if len(images) != self._batch:
            raise ValueError(f"bind takes one batch of {self._batch} images, got {len(images)}")
        seconds, clock = self._ms / 1e3, time.perf_counter

        def wait() -> None:
            end = clock() + seconds
            while clock() < end:
                pass

        return wait

    def logits(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Zeros: no class is preferred, so that top-1 is the share of class 0."""
        return np.zeros((len(images), self._classes), np.float32)

    def profile(self, images: NDArray[np.float32], repeats: int) -> list[NodeTime]:
        run = self.bind(images)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return [NodeTime("wait", "Null", (time.perf_counter() - start) * 1e3 / repeats)]
