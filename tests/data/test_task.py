"""Task: loss, answers and score of classification."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hwnas.data.dataset import Task

TASK = Task(("cat", "dog", "owl"))
LOGITS = np.array([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 5.0], [4.0, 0.0, 0.0]], np.float32)


def test_answers_are_the_largest_logits_and_the_score_is_the_share_that_is_right() -> None:
    assert TASK.answers(LOGITS).tolist() == [0, 1, 2, 0]
    assert TASK.score(LOGITS, np.array([0, 1, 0, 0])) == 0.75
    assert TASK.metric == "top-1"


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_cross_entropy_against_classes_or_shares(smoothing: float) -> None:
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    shares = torch.full((1, 3), smoothing / 3)
    shares[0, 1] += 1 - smoothing
    expected = -(shares * torch.log(torch.tensor([[0.2, 0.6, 0.2]]))).sum()
    assert TASK.loss(logits, torch.tensor([1]), smoothing).item() == pytest.approx(expected.item(), rel=1e-6)
    assert TASK.loss(logits, shares, 0.0).item() == pytest.approx(expected.item(), rel=1e-6)
