"""Multi-label classification: any number of the classes are in an image, and each has a sigmoid of its own.

The right answers are taken from boxes: a class is in an image if one of its objects is. The score is the mean over
classes of the average precision by which images are ranked. It is not interpolated, and otherwise as for the
classification of PASCAL VOC (Everingham et al., IJCV 2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy, torch
from hwnas.tasks.task import Answer, BootstrapGrades, CardText, Grades, Task

if TYPE_CHECKING:
    from torch import Tensor

SURE = 0.5  # confidence from which a class is an answer
_AT_ONCE = 10**8  # pairs of classes in memory at a time


class RankedImages(BootstrapGrades):
    """The grades of confidences [n, classes] by the classes that are in each image, bool [n, classes]."""

    def __init__(self, confidences: NDArray[np.floating[Any]], present: NDArray[np.bool_]) -> None:
        self._confidences, self._present, self.n_images = confidences.astype(np.float32), present, len(present)
        self.classes = np.flatnonzero(present.any(0)).tolist()
        self.class_scores = self._average_precisions(np.ones((1, len(present))))[0]
        self.score = float(self.class_scores.mean()) if self.classes else 0.0

    def _average_precisions(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the average precision [draws, classes] of each class in some image. Images count `weights` [draws, n]
        times; NaN if no image of a class counts."""
        columns = np.empty((len(weights), len(self.classes)))
        for at, label in enumerate(self.classes):
            # The mean, over the class's images, of the share of right images among all that are ranked as high.
            order = np.argsort(-self._confidences[:, label], kind="stable")
            ordered, right = weights[:, order], self._present[order, label]
            hits = np.cumsum(ordered * right, 1)
            precision = hits / np.maximum(np.cumsum(ordered, 1), 1e-12)
            with np.errstate(invalid="ignore"):
                columns[:, at] = (precision * ordered * right).sum(1) / hits[:, -1]
        return columns

    def scores_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean over the classes that count in a draw."""
        precisions = self._average_precisions(weights)
        is_finite = np.isfinite(precisions)
        with np.errstate(invalid="ignore"):
            return np.asarray(np.where(is_finite, precisions, 0.0).sum(1) / is_finite.sum(1), np.float64)

    @cached_property
    def per_image(self) -> NDArray[np.float32]:  # type: ignore[override]
        """The mean, over the classes in an image, of the share of right classes among all that are ranked as high. For
        an image without any, 1 less the confidence in its surest class."""
        share = np.empty(self._confidences.shape)
        at_once = max(1, _AT_ONCE // self._confidences.shape[1] ** 2)
        for start in range(0, len(share), at_once):
            part = slice(start, start + at_once)
            confidences, present = self._confidences[part], self._present[part]
            as_high = confidences[:, None, :] >= confidences[:, :, None]  # [n, class, other class]
            share[part] = (as_high & present[:, None, :]).sum(2) / as_high.sum(2)
        n_of = self._present.sum(1)
        ranked = (share * self._present).sum(1) / np.maximum(n_of, 1)
        return np.asarray(np.where(n_of > 0, ranked, 1 - self._confidences.max(1)), np.float32)


class MultiLabel(Task):
    """The task of images that can show any number of classes."""

    name = "multilabel"
    metric = "mAP"
    reads_boxes = True

    def wanted_logits(self, targets: NDArray[Any], classes: int) -> NDArray[np.float64]:
        """Return a half for each class that is in the image, otherwise minus a half."""
        return np.asarray(find_classes(targets, classes) - 0.5, np.float64)

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the binary cross entropy, the mean over classes."""
        present = torch.zeros_like(outputs)
        labels = targets[..., 0].long()
        present.scatter_reduce_(1, labels.clamp(min=0), (labels >= 0).to(outputs), "amax")
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, present * (1 - smoothing) + smoothing / 2)

    def answers(self, outputs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the confidence in each class [n, classes]."""
        return np.asarray(scipy.special.expit(outputs), np.float32)

    def tell(self, outputs: NDArray[np.float32], names: Sequence[str]) -> list[list[Answer]]:
        """Return the classes of which the network is sure, the surest first."""
        return [[Answer(names[int(label)], float(each[label])) for label in np.argsort(-each) if each[label] >= SURE]
                for each in self.answers(outputs)]

    def card(self, classes: int) -> CardText:
        """Describe the logits; a class is an answer if its logit is positive."""
        return CardText(f"float32 [n, {classes}], a logit for each class: positive if it is in the image", "",
                        "print([[classes[at] for at, logit in enumerate(each) if logit >= 0] for each in logits])")

    def grade(self, answers: NDArray[Any], targets: NDArray[Any]) -> RankedImages:
        """Grade by mean average precision."""
        return RankedImages(answers, find_classes(targets, answers.shape[1]))

    def agreement(self, wanted: NDArray[Any], got: NDArray[Any]) -> dict[str, float]:
        """Sum the smaller confidence over images, as a share of the sum of the larger. Half the rest counts as lost. A
        class agrees if every confidence in it is 0."""
        both = np.stack([self.answers(np.asarray(each, np.float32)) for each in (wanted, got)]).astype(float)
        least, most = (np.append(sums, sums.sum()) for sums in (both.min(0).sum(0), both.max(0).sum(0)))
        *of_class, overall = np.divide(least, most, out=np.ones_like(most), where=most != 0).tolist()
        by_class = float(np.mean(of_class))
        return {"agreement": overall, "lost": (1 - overall) / 2, "by_class_agreement": by_class,
                "by_class_lost": (1 - by_class) / 2}

    def class_table(self, grades: Grades, answers: NDArray[Any], targets: NDArray[Any], names: Sequence[str]
                    ) -> tuple[list[str], list[list[str]]]:
        """Return the average precision of each class."""
        counts = find_classes(targets, len(names)).sum(0)
        by_class = sorted(grades.by_class(names).items(), key=lambda item: item[1])
        return ["class", "average precision (%)", "images", ""], [
            [name, f"{100 * score:.2f}", str(counts[list(names).index(name)]), ""] for name, score in by_class]


def find_classes(boxes: NDArray[np.float32], classes: int) -> NDArray[np.bool_]:
    """Find the classes in each image [n, classes] by its boxes [n, most, 5]; a box of class -1 is none."""
    images, places = np.nonzero(boxes[..., 0] >= 0)
    present = np.zeros((len(boxes), classes), bool)
    present[images, boxes[images, places, 0].astype(int)] = True
    return present
