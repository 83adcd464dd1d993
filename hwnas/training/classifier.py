"""A classifier that is fitted to the features before it, in place of random weights.

A cut or smaller images change the outputs of pretrained layers, and a new classifier is random. A training needs about
a hundred steps to repair both. Here, one pass over some images sets the batch norms' statistics, and ridge regression
on the features gives the classifier. A network can thus be judged before it is trained, for the price of about ten
steps (docs/decisions/race.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.data.dataset import Dataset, subset
from hwnas.lazy import nn, torch
from hwnas.networks.weights import modules_called
from hwnas.tasks.task import Task, load_task
from hwnas.training.batches import fed
from hwnas.training.place import device_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

IMAGES, IMAGES_A_CLASS = 1024, 4  # a classifier is fitted to at least so many images, if there are so many
MOST_IMAGES, SOME_MORE = 8192, 1.25  # at most so many; a set with up to 1.25 times the chosen number is used whole
BATCH, LEAST_BATCH = 128, 16  # images at once; a smaller last batch has too poor statistics and is left out
RIDGE = 0.1  # the penalty, as a share of the features' mean square
SCALES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)  # factors of the fitted logits that are tried
SMOOTHING = 0.1  # of the labels, in the loss that chooses a scale


def fit_classifier(model: Any, data: Dataset) -> bool:
    """Set the statistics of batch norms, and the classifier by ridge regression on the features before it.

    Weights fitted to one half of the images predict the other half; the loss of this chooses the scale of the logits.
    The old classifier stays if it scores at least as well on that half: it may have been trained on these classes.
    Batch norms are set all the same, and the model is then in eval mode.

    Returns:
        True if a classifier was fitted. Nothing is changed if there is none that is linear, or for a single image.
    """
    layers, task = _find_classifiers(model), load_task(data.task)
    if not layers:
        return False
    images = data.train.take(np.random.default_rng(0).permutation(rows_of(data.train.labels, len(layers[0].weight))))
    wanted_logits = task.wanted_logits(images.targets, len(layers[0].weight))
    if len(images) < 2 or wanted_logits is None:  # one image gives no variance
        return False
    fitted = [_fit_layer(layer, features, images.targets[:len(features)], wanted_logits[:len(features)], task)
              for layer, features in zip(layers, _read_features(model, layers, images.images, data), strict=True)]
    return any(fitted)


def _find_classifiers(model: Any) -> list[Any]:
    """Return the last layer, or each of several whose mean is the answer (RepViT's, DeiT's distilled ones). Empty if
    one of them is neither linear nor a convolution of one pixel."""
    own = model.get_classifier() if hasattr(model, "get_classifier") else None
    layers = [own] if _is_linear(own) else [*map(model.get_submodule, modules_called(model, "classifier"))]
    return layers if all(map(_is_linear, layers)) else []


def _is_linear(layer: Any) -> bool:
    is_of_pixels = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
    return is_of_pixels or isinstance(layer, nn.Linear)


def _fit_layer(layer: Any, features: Tensor, targets: NDArray[Any], target_logits: NDArray[np.float64], task: Task
               ) -> bool:
    """Fit a classifier to its inputs, unless it scores as well as it is. Return whether it was fitted."""
    # Fit to every other image (they are in random order), and predict the rest.
    answers, is_tested = torch.from_numpy(target_logits), torch.arange(len(features)) % 2 == 1
    has_bias = layer.bias is not None
    weight, bias = _solve(features[~is_tested], answers[~is_tested], has_bias)
    logits, tested_targets = features[is_tested] @ weight + bias, targets[is_tested.numpy()]

    def score(outputs: Tensor) -> float:
        return task.grade(task.answers(outputs.cpu().numpy()), tested_targets).score

    with torch.no_grad():
        if score(nn.functional.linear(features[is_tested].to(layer.weight), layer.weight.flatten(1), layer.bias)
                 ) >= score(logits):
            return False
        # Least squares gives small logits; the best scale makes them confident. Then fit to all images.
        scale = min(SCALES, key=lambda scale: float(task.loss(scale * logits, torch.from_numpy(tested_targets),
                                                              SMOOTHING)))
        weight, bias = _solve(features, answers, has_bias)
        layer.weight.copy_((scale * weight.T).reshape(layer.weight.shape))
        if has_bias:
            layer.bias.copy_(scale * bias)
    return True


def rows_of(labels: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """Return the rows of the training images that a classifier of so many classes is fitted to: a stratified subset,
    or all rows if there are few. Of an earlier result all rows are returned, as a subset may be a little larger."""
    n = min(MOST_IMAGES, max(IMAGES, IMAGES_A_CLASS * classes))
    return np.arange(len(labels)) if len(labels) <= SOME_MORE * n else subset(labels, n, 0)


def _read_features(model: Any, layers: Sequence[Any], images: Any, data: Dataset) -> list[Tensor]:
    """Return the inputs of each classifier for images, double [n, features], without the last ones if they are too few
    for a batch. Batch norms take over the statistics of all batches."""
    parts: list[list[Tensor]] = [[] for _ in layers]
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
        norm.train()
    hooks = [layer.register_forward_pre_hook(lambda _, inputs, own=own: own.append(_mean_over_pixels(inputs[0])))
             for layer, own in zip(layers, parts, strict=True)]
    device = str(device_of(model))
    try:
        with torch.no_grad():
            for start in range(0, len(images), BATCH):
                part = np.asarray(images[start:start + BATCH])
                if len(part) >= LEAST_BATCH or not start:
                    model(fed(part, data, device).contiguous(memory_format=torch.channels_last))
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()
    return [*map(torch.cat, parts)]


def _mean_over_pixels(values: Tensor) -> Tensor:
    """Return features [n, channels], double. Of a map that is pooled after its classifier the means are the same."""
    values = values.detach().cpu().double()
    return values.mean((2, 3)) if values.ndim == 4 else values


def _solve(features: Tensor, answers: Tensor, has_bias: bool = True) -> tuple[Tensor, Tensor]:
    """Return weights [features, classes] and bias [classes] of the ridge regression of `answers` [n, classes]. The bias
    is zero if it has none."""
    mean, centre = (values.mean(0) * has_bias for values in (features, answers))
    rows = features - mean
    size = float(rows.square().mean()) or 1.0
    # The primal and the dual form have the same solution. Take the smaller matrix: [n, n], or [features, features].
    few = len(rows) <= rows.shape[1]
    gram = rows @ rows.T if few else rows.T @ rows
    gram.diagonal().add_(RIDGE * size * len(rows))
    weight = (rows.T @ torch.linalg.solve(gram, answers - centre) if few else
              torch.linalg.solve(gram, rows.T @ (answers - centre)))
    return weight, centre - mean @ weight
