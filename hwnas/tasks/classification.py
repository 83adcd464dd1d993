"""Classification: each image has one class. Networks are timm's as they are; their score is top-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy, torch
from hwnas.stats import paired_difference, wilson
from hwnas.tasks.task import Answer, CardText, Grades, Task

if TYPE_CHECKING:
    from torch import Tensor


class RightAnswers(Grades):
    """The grades of answers that are right or wrong. `labels` are needed for the score of each class."""

    def __init__(self, right: NDArray[np.bool_], labels: NDArray[np.int64] | None = None) -> None:
        self.per_image, self.labels = right, labels
        self.score = float(right.mean()) if len(right) else 0.0

    def interval(self) -> tuple[float, float]:
        """Return Wilson's interval."""
        return wilson(int(self.per_image.sum()), len(self.per_image))

    def minus(self, other: Grades, confidence: float = 0.95) -> tuple[float, float, float]:
        """Return the difference and its interval, by the images that only one of the two answers rightly."""
        return paired_difference(self.per_image, other.per_image, confidence=confidence)

    def by_class(self, names: Sequence[str]) -> dict[str, float]:
        """Return the recall of each class."""
        if self.labels is None:
            return {}
        return {names[int(label)]: float(self.per_image[self.labels == label].mean())
                for label in np.unique(self.labels)}


class Classification(Task):
    """The task of images with one class each."""

    name = "classification"
    metric = "top-1"
    is_sure = True

    def wanted_logits(self, targets: NDArray[Any], classes: int) -> NDArray[np.float64]:
        """Return 1 for the class of the image and 0 for all others."""
        one_hot: NDArray[np.float64] = np.eye(classes)[targets]
        return one_hot

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the cross entropy. Targets: classes [n], or shares [n, classes] of mixed images, smoothed by timm."""
        is_mixed = targets.ndim == 2
        return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.0 if is_mixed else smoothing)

    def answers(self, outputs: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the class of each image."""
        return np.asarray(outputs.argmax(1))

    def confidence(self, outputs: NDArray[np.float32]) -> NDArray[np.float16]:
        """Return the largest softmax of each image."""
        return np.asarray(scipy.special.softmax(outputs, axis=1).max(1), np.float16)

    def tell(self, outputs: NDArray[np.float32], names: Sequence[str]) -> list[list[Answer]]:
        """Return one class for each image."""
        shares = scipy.special.softmax(outputs, axis=1)
        return [[Answer(names[int(each.argmax())], float(each.max()))] for each in shares]

    def card(self, classes: int) -> CardText:
        """Describe the logits; the largest is the answer."""
        return CardText(f"float32 [n, {classes}]", "", "print([classes[at] for at in logits.argmax(1)])")

    def grade(self, answers: NDArray[Any], targets: NDArray[Any]) -> RightAnswers:
        """Compare the answers with the labels."""
        return RightAnswers(answers == targets, targets)

    def agreement(self, wanted: NDArray[Any], got: NDArray[Any]) -> dict[str, float]:
        """Compare logits [n, classes].

        A plain count of equal answers would weigh an answer by chance like a certain one. A mean over images would
        weigh a common class more than a rare one, and so prefer ranges that spoil the rare one.
        """
        rows, should, answers = np.arange(len(wanted)), wanted.argmax(1), got.argmax(1)
        probabilities = scipy.special.softmax(wanted, axis=1)
        # Lost is the confidence of fp32 in its own answer, less its confidence in int8's.
        lost = probabilities[rows, should] - probabilities[rows, answers]
        of_class = [should == label for label in np.unique(should)]
        return {"agreement": float((should == answers).mean()), "lost": float(lost.mean()),
                "by_class_agreement": float(np.mean([(answers == should)[mask].mean() for mask in of_class])),
                "by_class_lost": float(np.mean([lost[mask].mean() for mask in of_class]))}

    def class_table(self, grades: Grades, answers: NDArray[Any], targets: NDArray[Any], names: Sequence[str]
                    ) -> tuple[list[str], list[list[str]]]:
        """Return the recall of each class, and the classes that its images are taken for."""
        n = len(names)
        counts = np.zeros((n, n), np.int64)  # images by class and by answer
        np.add.at(counts, (np.clip(targets, 0, n - 1), np.clip(answers, 0, n - 1)), 1)
        rows, n_of = [], counts.sum(1)
        for at in np.argsort(counts.diagonal() / np.maximum(n_of, 1), kind="stable"):
            wrong_counts = counts[at].copy()
            wrong_counts[at] = 0
            most = [other for other in np.argsort(-wrong_counts, kind="stable")[:3] if wrong_counts[other]]
            confusions = [f"{names[other]} {wrong_counts[other]}" for other in most]
            share = f"{100 * counts[at, at] / n_of[at]:.2f}" if n_of[at] else ""
            rows.append([names[at], share, str(n_of[at]), ", ".join(confusions)])
        return ["class", "right (%)", "images", "taken for"], rows
