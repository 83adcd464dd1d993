"""Mean average precision of detected objects, by pycocotools, with paired intervals over the images.

The metric is COCO's (Lin et al., Microsoft COCO, ECCV 2014). It is average precision over recalls 0, .01, … 1, averaged
over overlaps of .50, .55, … .95 and over classes.
"""

from __future__ import annotations

import contextlib
import io
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import pycocotools
from hwnas.tasks.task import BootstrapGrades

_SIDE = 1000.0  # of the square that boxes are in for pycocotools; overlaps do not depend on it
RECALLS = np.linspace(0, 1, 101)


class BoxGrades(BootstrapGrades):
    """The grades of objects [n, most, 6] (class, confidence, box) by the right ones [n, most, 5] (class, box).
    `overlap` is the only overlap that counts; None means COCO's ten. `curves` has the precision of each class at each
    of RECALLS, at the least overlap."""

    def __init__(self, objects: NDArray[np.float32], targets: NDArray[np.float32],
                 overlap: float | None = None) -> None:
        self.n_images, self._overlap = len(targets), overlap
        confidences = np.where(objects[..., 0] >= 0, objects[..., 1], 0.0)
        self._quiet = 1 - confidences.max(axis=1, initial=0.0)  # of each image, if nothing is there
        self.classes = [int(each) for each in np.unique(targets[..., 0]) if each >= 0]
        self._results = self._evaluate(objects, targets)
        precision = self._results.eval["precision"][..., 0, 0]  # [overlaps, recalls, classes]
        self.class_scores = precision.mean((0, 1))
        self.score = float(self.class_scores.mean())
        self.score_50 = float(precision[0].mean())
        self.curves = dict(zip(self.classes, precision[0].T, strict=True))

    def _evaluate(self, objects: NDArray[np.float32], targets: NDArray[np.float32]) -> Any:
        """Return pycocotools' evaluation."""
        # 1. Right objects and detections in COCO's form: left, top, width, height.
        images, places = np.nonzero(targets[..., 0] >= 0)
        right = targets[images, places]
        sides = _SIDE * (right[:, 3:] - right[:, 1:3])
        annotations = [{"id": at + 1, "image_id": int(image), "category_id": int(label), "iscrowd": 0,
                        "bbox": [*(_SIDE * corner).tolist(), *side.tolist()], "area": float(side.prod())}
                       for at, (image, label, corner, side) in enumerate(
                           zip(images, right[:, 0], right[:, 1:3], sides, strict=True))]
        images, places = np.nonzero(np.isin(objects[..., 0], self.classes))
        detections = objects[images, places]
        rows = np.column_stack([
            images, _SIDE * detections[:, 2:4], _SIDE * (detections[:, 4:] - detections[:, 2:4]), detections[:, 1],
            detections[:, 0]]).astype(np.float64)
        # 2. Evaluate objects of all sizes together; pycocotools prints, and refuses an empty list of detections.
        with contextlib.redirect_stdout(io.StringIO()):
            truth = pycocotools.coco.COCO()
            truth.dataset = {"images": [{"id": each} for each in range(self.n_images)], "annotations": annotations,
                             "categories": [{"id": each} for each in self.classes]}
            truth.createIndex()
            results = pycocotools.cocoeval.COCOeval(
                truth, truth.loadRes(rows) if len(rows) else pycocotools.coco.COCO(), "bbox")
            results.params.imgIds, results.params.catIds = list(range(self.n_images)), self.classes
            results.params.areaRng, results.params.areaRngLbl = [[0, 1e10]], ["all"]
            results.params.maxDets = [100]
            if self._overlap is not None:
                results.params.iouThrs = np.array([self._overlap])
            if not len(rows):
                results.cocoDt.dataset = {**truth.dataset, "annotations": []}
                results.cocoDt.createIndex()
            results.evaluate()
            results.accumulate()
        return results

    @cached_property
    def _matches(self) -> list[tuple[NDArray[np.bool_], NDArray[np.intp], NDArray[np.float64]]]:
        """For each class: whether its detections, by falling confidence, match [overlaps, k], their images [k], and the
        number of objects in each image [n]."""
        by_class = []
        for at in range(len(self.classes)):
            entries = self._results.evalImgs[at * self.n_images:(at + 1) * self.n_images]
            image_entries = [(image, entry) for image, entry in enumerate(entries) if entry is not None]
            confidence = np.concatenate([entry["dtScores"] for _, entry in image_entries])
            images = np.concatenate([np.full(len(entry["dtScores"]), image) for image, entry in image_entries])
            matched = np.concatenate([entry["dtMatches"] for _, entry in image_entries], 1) > 0
            n_of = np.zeros(self.n_images)
            for image, entry in image_entries:
                n_of[image] = len(entry["gtIds"])
            order = np.argsort(-confidence, kind="mergesort")
            by_class.append((matched[:, order], images[order].astype(np.intp), n_of))
        return by_class

    def scores_of(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean average precision of each draw."""
        of_draws = np.full(len(weights), np.nan)
        for draw, own in enumerate(weights):
            if scores := [_average_precision(matched, own[images], float(own @ n_of))
                          for matched, images, n_of in self._matches if own @ n_of]:
                of_draws[draw] = np.mean(scores)
        return of_draws

    @cached_property
    def per_image(self) -> NDArray[np.float32]:  # type: ignore[override]
        """The score of each image alone, the mean over its own classes. For an image without objects, 1 less the
        confidence of its surest detection."""
        total, n_of = np.zeros(self.n_images), np.zeros(self.n_images)
        for matched, images, objects in self._matches:
            order = np.argsort(images, kind="stable")
            parts = np.split(order, np.searchsorted(images[order], np.arange(1, self.n_images)))
            for image, own in enumerate(parts):
                if objects[image]:
                    total[image] += _average_precision(matched[:, own], np.ones(len(own)), objects[image])
                    n_of[image] += 1
        return np.where(n_of > 0, total / np.maximum(n_of, 1), self._quiet).astype(np.float32)


def _average_precision(matched: NDArray[np.bool_], weights: NDArray[np.float64], n_objects: float) -> float:
    """Return pycocotools' average precision of detections, by falling confidence, that count `weights` [k] times."""
    right = np.cumsum(matched * weights, 1)
    precision = right / np.maximum(np.cumsum(weights), 1e-12)
    precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]  # the best at this recall or a higher one
    recall, scores = right / n_objects, []
    for own, reached in zip(precision, recall, strict=True):
        at = np.searchsorted(reached, RECALLS, side="left")
        scores.append(np.where(at < len(own), own[np.minimum(at, len(own) - 1)], 0.0).mean() if len(own) else 0.0)
    return float(np.mean(scores))
