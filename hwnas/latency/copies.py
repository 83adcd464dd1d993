"""An ONNX file as it is timed: compiled several times for a target and fed noise."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.latency.harness import FileCalls
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target

if TYPE_CHECKING:
    from hwnas.runtimes.runtime import Compiled, Runtime


@dataclass(frozen=True, slots=True)
class TimedFile:
    """An ONNX file as it is timed: compiled for `target`, fed batches of noise images `shape` [channels, h, w]."""

    path: Path
    target: Target
    shape: tuple[int, ...]


def bind_copies(file: TimedFile, copies: int, folder: Path, runtime: Runtime | None = None) -> FileCalls:
    """Bound calls of as many compilations, each with another place in memory; `folder` is for what they leave.

    In the target's runtime here, unless another `runtime` is given.
    """
    runtime = runtime or load_runtime(file.target.runtime)
    images = noise(file.target.batch, file.shape)
    compiled = compile_copies(file.path, file.target, copies, folder, runtime)
    return FileCalls((each.bind(images) for each in compiled), file.path)


def compile_copies(path: Path, target: Target, copies: int, folder: Path, runtime: Runtime) -> list[Compiled]:
    """A file compiled so often. If the runtime can keep a compiled network, it is compiled once and loaded instead;
    what that leaves in `folder` is removed."""
    save, load = getattr(runtime, "save_compiled", None), getattr(runtime, "load_compiled", None)
    if save is None or load is None:
        return [runtime.compile(path, target) for _ in range(copies)]
    copy = Path(tempfile.mkdtemp(dir=folder), path.name)
    copy.write_bytes(path.read_bytes())  # what is compiled lands beside its file
    saved = save(copy, target)
    compiled = [load(saved, copy, target) for _ in range(copies)]
    shutil.rmtree(copy.parent)
    return compiled


def noise(batch: int, shape: Sequence[int]) -> np.ndarray:
    """A fixed random batch of normalised images, float32 [batch, *shape]."""
    return np.random.default_rng(0).standard_normal((batch, *shape), dtype=np.float32)
