"""An ONNX teacher's task, which runs in a limited child process: answer batch after batch until nobody asks.

The socket lies in a folder of the parent's own, and only raw numbers go over it. First come (classes, height, width) as
int32; then float32 images of one whole batch go in and float32 logits come out. Nothing that comes from here is
unpickled.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import CandidateError, ModelError
from hwnas.runtimes.child import WAITING, Progress, serve
from hwnas.runtimes.foreign import check_batches, check_path, input_of, load_checked
from hwnas.runtimes.runtime import one_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.runtimes.runtime import Compiled, Runtime
    from hwnas.target import Target


def answer(job: Mapping[str, Any], target: Target, runtime: Runtime, progress: Progress) -> int:
    """Serve `job["socket"]`; the number of batches answered. ModelError for a file that cannot teach."""
    label = job["label"]
    check_path(job["path"], job["memory_mb"])
    axes = input_of(load_checked(job["path"]), label)
    check_batches(axes, label, [target.batch])
    if len(axes.shape) != 4 or axes.shape[1] not in (None, job["channels"]):
        raise ModelError(f"{label} takes images of shape {list(axes.shape[1:])}; the data set has "
                         f"{job['channels']} channel(s), [channels, height, width]. Give another teacher.")
    size = job["image_size"]
    height, width = (job["asked_size"] or fixed or size for fixed in axes.shape[2:])
    shape = (target.batch, job["channels"], height, width)
    compiled = runtime.compile(job["path"], target)
    logits = _logits(compiled, np.zeros(shape, np.float32), label)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(job["socket"])
        with line.makefile("rwb") as stream:
            stream.write(np.array([logits.shape[1], height, width], "<i4").tobytes())
            stream.flush()
            return _serve(stream, shape, compiled, label, progress)


def _serve(stream: Any, shape: tuple[int, ...], compiled: Compiled, label: str, progress: Progress) -> int:
    answered, size = 0, 4 * int(np.prod(shape))
    while True:
        progress(0.0, f"{WAITING} for images")  # the time-out is for answering only
        asked = stream.read(size)
        if len(asked) < size:
            return answered
        progress(0.0, "answering")
        stream.write(_logits(compiled, np.frombuffer(asked, "<f4").reshape(shape), label).tobytes())
        stream.flush()
        answered += 1


def _logits(compiled: Compiled, images: NDArray[np.float32], label: str) -> NDArray[np.float32]:
    try:
        logits = compiled.logits(images)
    except MemoryError:
        raise
    except Exception as error:  # runtimes' exceptions share no base class
        raise CandidateError(f"{label} cannot answer a batch of {list(images.shape)}: {one_line(error)}") from None
    if logits.ndim != 2 or len(logits) != len(images):
        raise ModelError(f"{label} answers {list(logits.shape)} to a batch of {len(images)}; [batch, classes] is "
                         "expected. Give a classifier.")
    return np.ascontiguousarray(logits, "<f4")


if __name__ == "__main__":
    sys.exit(serve(answer))
