"""An ONNX file as it is timed: compiled several times for a target and fed noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hwnas.latency.harness import FileCalls
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.paths import temporary_folder
from hwnas.target import Target


@dataclass(frozen=True, slots=True)
class TimedFile:
    """An ONNX file as it is timed: compiled for `target`, fed batches of noise images `shape` [channels, h, w].
    `compiled`: the file in which its runtime has saved the compiled network; None if that is not made yet."""

    path: Path
    target: Target
    shape: tuple[int, ...]
    compiled: Path | None = None


def bind_copies(file: TimedFile, copies: int) -> FileCalls:
    """Return the bound calls of `copies` compilations, each at another place in memory. If the runtime can save a
    compiled network, the file is compiled once and loaded `copies` times."""
    runtime, images = load_runtime(file.target.runtime), noise(file.target.batch, file.shape)
    save, load = getattr(runtime, "save_compiled", None), getattr(runtime, "load_compiled", None)
    if save is None or load is None:
        compiled = [runtime.compile(file.path, file.target) for _ in range(copies)]
    elif file.compiled is not None:
        compiled = [load(file.compiled, file.path, file.target) for _ in range(copies)]
    else:
        with temporary_folder() as folder:
            saved = save(file.path, file.target, Path(folder, "compiled"))
            compiled = [load(saved, file.path, file.target) for _ in range(copies)]
    return FileCalls((each.bind(images) for each in compiled), file.path)


def noise(batch: int, shape: Sequence[int]) -> np.ndarray:
    """Return a fixed random batch of normalised images, float32 [batch, *shape]."""
    return np.random.default_rng(0).standard_normal((batch, *shape), dtype=np.float32)
