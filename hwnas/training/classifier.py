"""A classifier that is fitted to the layers before it, in place of one that knows nothing.

A cut or smaller images change what pretrained layers answer, and a new classifier knows nothing: the first hundred
steps of a training go into these two. One pass over some images sets the batch norms' statistics, and ridge regression
on the features gives the classifier. So a network is judged before it is trained, for the price of about ten steps
(docs/decisions/race.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.data.dataset import Dataset, subset
from hwnas.lazy import nn, torch
from hwnas.tasks.task import load_task
from hwnas.training.batches import fed
from hwnas.training.place import device_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

IMAGES, IMAGES_A_CLASS = 1024, 4  # that a classifier is fitted to, at least, if there are so many
MOST_IMAGES, SOME_MORE = 8192, 1.25  # at most; times as many
BATCH, LEAST_BATCH = 128, 16  # images at once; of fewer than the second, batch norms learn too little
RIDGE = 0.1  # of the features' mean square
SCALES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)  # of logits in place of those that the layer is fitted to
SMOOTHING = 0.1  # of the labels, where a scale is chosen


def fit_classifier(model: Any, data: Dataset) -> bool:
    """Set the statistics of batch norms, and the classifier by ridge regression on what stands before it.

    Half of the images choose the scale of the logits, by the loss of what the other half predicts. The classifier stays
    as it was if it answers this half better, as one may that was trained on these classes before. The model is in eval
    mode afterwards.

    Returns:
        Whether the classifier was fitted. One that is no linear layer is left alone.
    """
    layer, task = (model.get_classifier() if hasattr(model, "get_classifier") else None), load_task(data.task)
    if not isinstance(layer, nn.Linear) or layer.bias is None:
        return False
    images = data.train.take(np.random.default_rng(0).permutation(rows_of(data.train.labels, layer.out_features)))
    if len(images) < 2:  # a batch norm knows nothing of one
        return False
    features = _read_features(model, layer, images.images, data)
    targets = images.targets[:len(features)]
    if (given := task.wanted_logits(targets, layer.out_features)) is None:
        return False
    wanted, held = torch.from_numpy(given), torch.arange(len(features)) % 2 == 1  # the images are in no order
    weight, bias = _solve(features[~held], wanted[~held])
    logits, right = features[held] @ weight + bias, targets[held.numpy()]

    def score(outputs: Tensor) -> float:
        return task.grade(task.answers(outputs.cpu().numpy()), right).score

    with torch.no_grad():
        if score(layer(features[held].to(layer.weight))) >= score(logits):
            return False
        scale = min(SCALES, key=lambda scale: float(task.loss(scale * logits, torch.from_numpy(right), SMOOTHING)))
        weight, bias = _solve(features, wanted)
        layer.weight.copy_(scale * weight.T)
        layer.bias.copy_(scale * bias)
    return True


def rows_of(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return the training images that a classifier of so many classes is fitted to, of all these. Of those it returns
    all, as a subset has some more."""
    n = min(MOST_IMAGES, max(IMAGES, IMAGES_A_CLASS * classes))
    return np.arange(len(labels)) if len(labels) <= SOME_MORE * n else subset(labels, n, 0)


def _read_features(model: Any, layer: nn.Linear, images: Any, data: Dataset) -> Tensor:
    """Return what stands before the classifier for images in batches, double [n, features]: of the last few images
    nothing, if they make no batch. Batch norms take over the statistics of all of these batches."""
    parts: list[Tensor] = []
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
        norm.train()
    hook = layer.register_forward_pre_hook(lambda _, inputs: parts.append(inputs[0].detach().cpu().double()))
    device = str(device_of(model))
    try:
        with torch.no_grad():
            for start in range(0, len(images), BATCH):
                part = np.asarray(images[start:start + BATCH])
                if len(part) >= LEAST_BATCH or not start:
                    model(fed(part, data, device).contiguous(memory_format=torch.channels_last))
    finally:
        hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
    return torch.cat(parts)


def _solve(features: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [features, classes] and bias [classes] of the ridge regression of `answers` [n, classes]."""
    mean, centre = features.mean(0), answers.mean(0)
    rows = features - mean
    size = float(rows.square().mean()) or 1.0
    few = len(rows) <= rows.shape[1]  # the same answer by the smaller of two matrices, of images or of features
    gram = rows @ rows.T if few else rows.T @ rows
    gram.diagonal().add_(RIDGE * size * len(rows))
    weight = (rows.T @ torch.linalg.solve(gram, answers - centre) if few else
              torch.linalg.solve(gram, rows.T @ (answers - centre)))
    return weight, centre - mean @ weight
