"""Task: what networks learn and what they are judged by. Classification is the only one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean loss of a batch: logits [n, classes], targets as classes int64 [n] or as shares [n, classes]."""
    from torch.nn import functional

    return functional.cross_entropy(logits, targets, label_smoothing=label_smoothing)


def classes_of(logits: NDArray[np.float32]) -> NDArray[np.int64]:
    """The class [n] that each row of logits [n, classes] says."""
    classes: NDArray[np.int64] = logits.argmax(1)
    return classes


def top1(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """Share of rows whose largest logit is the label's, 0 to 1."""
    return float((classes_of(logits) == labels).mean())


@dataclass(frozen=True, slots=True)
class Task:
    """What a data set asks of a network. Outputs are [n, ...], an answer is one for each image.

    `loss(outputs, targets, label_smoothing)` is a scalar tensor to minimise. `answers(outputs)` can be compared with
    labels. `score(outputs, labels)` is the share of right answers from 0 to 1; `metric` is that share's name.
    """

    class_names: tuple[str, ...]
    name: str = "classification"
    metric: str = "top-1"
    loss: Callable[[Tensor, Tensor, float], Tensor] = cross_entropy
    answers: Callable[[NDArray[np.float32]], NDArray[np.int64]] = classes_of
    score: Callable[[NDArray[np.float32], NDArray[np.int64]], float] = top1
