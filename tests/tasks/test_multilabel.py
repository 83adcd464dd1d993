"""Multi-label: classes come from boxes, the score is scikit-learn's, a linear layer is fitted to several classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, label_ranking_average_precision_score

from hwnas.accuracy.proxy import load as load_proxy
from hwnas.data.dataset import Dataset, Split
from hwnas.errors import ConfigError
from hwnas.space.architecture import Architecture
from hwnas.tasks import multilabel
from hwnas.tasks.multilabel import RankedImages, find_classes
from hwnas.tasks.task import load_task

TASK = load_task("multilabel")


def random_boxes(n: int = 60, classes: int = 5) -> np.ndarray:
    rng = np.random.default_rng(1)
    boxes = np.full((n, 4, 5), -1, np.float32)
    boxes[..., 0] = np.where(rng.random((n, 4)) < 0.4, rng.integers(0, classes, (n, 4)), -1)
    return boxes


def test_the_score_is_that_of_scikit_learn() -> None:
    rng, present = np.random.default_rng(0), find_classes(random_boxes(), 5)
    confidences = np.clip(0.3 * present + rng.random(present.shape) * 0.6, 0, 1)
    grades = RankedImages(confidences, present)
    assert grades.score == pytest.approx(average_precision_score(present, confidences.astype(np.float32)))
    has = present.any(1)
    assert grades.per_image[has].mean() == pytest.approx(label_ranking_average_precision_score(
        present[has], confidences[has].astype(np.float32)), abs=1e-6)
    assert grades.per_image[~has] == pytest.approx(1 - confidences[~has].max(1), abs=1e-6)


def test_a_class_that_no_image_has_does_not_count() -> None:
    present = np.zeros((10, 3), bool)
    present[:4, 1] = True
    grades = RankedImages(np.tile([0.9, 0.5, 0.1], (10, 1)), present)
    assert {*grades.by_class("abc")} == {"b"}
    assert np.isfinite(grades.interval()).all()


def test_images_without_any_class_have_a_score() -> None:
    grades = RankedImages(np.full((6, 3), 0.5), np.zeros((6, 3), bool))
    assert (grades.score, grades.by_class("abc")) == (0.0, {})
    assert np.allclose(grades.per_image, 0.5)


def test_a_class_of_one_image_is_missing_in_some_draws() -> None:
    present = np.zeros((8, 2), bool)
    present[3, 0] = True
    low, high = RankedImages(np.random.default_rng(0).random((8, 2)), present).interval()
    assert 0 <= low <= high <= 1


def test_a_class_that_neither_network_sees_agrees() -> None:
    logits = np.array([[2.0, -200.0], [-1.0, -200.0]])
    assert TASK.agreement(logits, logits)["by_class_agreement"] == 1
    assert TASK.agreement(logits[:, 1:], logits[:, 1:])["agreement"] == 1
    assert 0 < TASK.agreement(logits, logits - 1)["by_class_lost"] < 0.25
    assert np.isnan(TASK.agreement(logits, logits * np.nan)["agreement"])


def test_the_loss_is_least_for_the_classes_that_are_there() -> None:
    boxes = torch.full((2, 3, 5), -1.0)
    boxes[0, :2, 0] = torch.tensor([2.0, 0.0])
    wanted = torch.tensor([[9.0, -9, 9], [-9, -9, -9]])
    assert TASK.loss(wanted, boxes, 0.0) < 1e-3
    assert all(TASK.loss(wanted * torch.where(torch.arange(3) == at, -1, 1), boxes, 0.0) > 1 for at in range(3))


def test_logits_are_fitted_to_every_class() -> None:
    boxes = random_boxes()
    wanted = TASK.wanted_logits(boxes, 5)
    assert wanted is not None
    assert TASK.grade(TASK.answers(wanted.astype(np.float32)), boxes).score == 1


def test_the_proxy_judges_by_the_tasks_own_score() -> None:
    rng = np.random.default_rng(0)

    def part(n: int) -> Split:
        """A class is there if its channel is bright."""
        there = rng.random((n, 3)) < 0.5
        images = (there[:, :, None, None] * 120 + rng.integers(0, 60, (n, 3, 16, 16))).astype(np.uint8)
        boxes = np.where(there[:, :, None], np.array([0, 0.2, 0.2, 0.8, 0.8], np.float32), np.float32(-1))
        boxes[:, :, 0] = np.where(there, np.arange(3), -1)
        return Split(images, np.zeros(n, np.int64), boxes)

    data = Dataset("bright", part(320), part(200), part(20), tuple("abc"), 3, 16, (0.4,) * 3, (0.25,) * 3, "f",
                   task="multilabel")
    network = Architecture((("ds_r1_k3_s1_c16",),), 16, 1, 0, "relu", 16, 3, 3)
    assert load_proxy({"min_steps": 40, "max_steps": 40}, data).evaluate(network).value > 0.8
    with pytest.raises(ConfigError, match="do not move boxes"):
        load_proxy({"mixup": 0.2}, data)  # and not the first trial


def test_images_are_ranked_alike_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    confidences, present = rng.random((40, 5)), rng.random((40, 5)) < 0.3
    whole = RankedImages(confidences, present).per_image
    monkeypatch.setattr(multilabel, "_AT_ONCE", 75)  # three images
    assert np.array_equal(RankedImages(confidences, present).per_image, whole)
