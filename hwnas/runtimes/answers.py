"""Answers of a file to images, in batches, as the task reads its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hwnas.target.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hwnas.data.dataset import Dataset
    from hwnas.runtimes.runtime import Compiled


_CHUNK = 512  # images normalised at a time
FP32 = Target("fp32 reference", "onnxruntime", "fp32", threads=0, batch=64)


def predict(compiled: Compiled, dataset: Dataset, progress: Callable[[float], None] | None = None,
            ) -> NDArray[np.int64]:
    """The class of every test image, in order."""
    parts, n = [], len(dataset.test)
    for start in range(0, n, _CHUNK):
        images = dataset.normalise(np.asarray(dataset.test.images[start : start + _CHUNK]))
        parts.append(dataset.task.answers(compiled.logits(images)))
        if progress:
            progress(min(1.0, (start + _CHUNK) / n))
    return np.concatenate(parts)
