"""Every task that hwnas has keeps the contract that it asks of others."""

from __future__ import annotations

import numpy as np
import pytest

from hwnas.errors import UnknownName
from hwnas.tasks import load_task
from hwnas.testing import check_task


def test_classification_keeps_the_contract() -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 20)
    outputs = rng.normal(0, 1, (20, 3)).astype(np.float32) + 2 * np.eye(3, dtype=np.float32)[targets]
    check_task(load_task("classification"), outputs, targets, "abc")


def test_detection_keeps_the_contract() -> None:
    rng = np.random.default_rng(0)
    outputs = rng.normal(-5, 0.5, (12, 7, 4, 4)).astype(np.float32)
    targets = np.full((12, 2, 5), -1, np.float32)
    for image in range(10):
        label, row, column = rng.integers(3), *rng.integers(0, 4, 2)
        outputs[image, 4 + label, row, column] = 3
        outputs[image, :4, row, column] = 0
        x, y, reach = (column + 0.5) / 4, (row + 0.5) / 4, np.log(2) * 2 / 4
        targets[image, 0] = [label, x - reach, y - reach, x + reach, y + reach]
    check_task(load_task("detection"), outputs, targets.clip(-1, 1), "abc")


def test_multilabel_keeps_the_contract() -> None:
    rng = np.random.default_rng(0)
    targets = np.full((16, 3, 5), -1, np.float32)
    targets[:14, 0, 0] = rng.integers(0, 4, 14)
    targets[::2, 1, 0] = rng.integers(0, 4, 8)
    outputs = rng.normal(-1, 0.5, (16, 4)).astype(np.float32)
    for image, place in zip(*np.nonzero(targets[..., 0] >= 0), strict=True):
        outputs[image, int(targets[image, place, 0])] += 2
    check_task(load_task("multilabel"), outputs, targets, "abcd")


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(UnknownName, match="classification"):
        load_task("segmentation")
