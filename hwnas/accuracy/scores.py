"""Scores of untrained networks: SynFlow, NASWOT, gradient norm, ZiCo; and one batch that they are computed on."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from hwnas.data.contents import digest
from hwnas.data.dataset import Dataset, cross_entropy, resize, subset
from hwnas.errors import ConfigError, TrainingError
from hwnas.networks.build import activation_layers
from hwnas.space.architecture import Architecture
from hwnas.system.libraries import release_memory
from hwnas.training.loop import no_memory, seeded

if TYPE_CHECKING:
    from torch import Tensor


Score = Callable[[nn.Module, Tensor, Tensor], float]
LEAST_IMAGES = 8  # ZiCo splits them in parts; with fewer, batch norm on maps of 1x1 has nothing to normalise
_PARTS = 4  # number of batches behind ZiCo's means and deviations
_NORMS = (nn.BatchNorm2d, nn.LayerNorm)
_GATES = "SqueezeExcite"


def synflow(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """log Σ |θ ∂R/∂θ|: R is the sum of the logits for an image of ones, with absolute weights (Tanaka et al. 2020).

    Abdelfattah et al. 2021 made a score of networks of it. It is computed in double precision. Batch norms are
    bypassed, as in their code. Activations are bypassed too: ReLU is the identity on positive inputs, and ReLU6 or
    sigmoid gates would saturate and end every gradient.
    """
    del labels
    linear = copy.deepcopy(network).double()
    _bypass(linear)
    for parameter in linear.parameters():
        parameter.data.abs_()
    linear(torch.ones_like(images[:1], dtype=torch.double)).sum().backward()
    total = sum(float(weight.detach().flatten() @ gradient.flatten()) for weight, gradient in _reached_layers(linear))
    return _finite("synflow", math.log(total) if total > 0 else math.nan)


def naswot(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """log |det K| (Mellor et al. 2021, their `hook_logdet`).

    K[i, j] counts the units that images i and j both switch on, or both switch off. A unit is on when its input is
    above 0, also for smooth activations (swish, hard swish) and ReLU6. There is no score when K is singular, for
    example with the same image twice: rounding alone would decide the determinant.
    """
    del labels
    _need(images, "naswot")
    if len(images.flatten(1).unique(dim=0)) < len(images):  # rounding may give equal images different units
        return _finite("naswot", math.nan)
    kernel = torch.zeros(len(images), len(images), dtype=torch.double)

    def watch(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        on = (inputs[0] > 0).flatten(1).float()
        both = on @ on.T
        alone = on.sum(1)
        kernel.add_((on.shape[1] - alone[:, None] - alone + 2 * both).double())

    network = copy.deepcopy(network).train()
    watched = [module for module in network.modules() if isinstance(module, activation_layers())]
    if not watched:
        names = ", ".join(layer.__name__ for layer in activation_layers())
        raise TrainingError(f"naswot: the network has no {names} to watch. Use another score.")
    for module in watched:
        module.register_forward_pre_hook(watch)
    with torch.no_grad():
        network(images)
    return _finite("naswot", _log_determinant(kernel))


def grad_norm(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """log of the loss gradient's Euclidean norm, summed over layers; one batch (Abdelfattah et al. 2021)."""
    _need(images, "grad_norm")
    gradients = _gradients(copy.deepcopy(network), images, labels)
    total = sum(float(gradient.norm()) for gradient in gradients)
    return _finite("grad_norm", math.log(total) if total > 0 else math.nan)


def zico(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Σ over layers of log Σ over weights of mean |g| / std(g), over the batch in four parts (Li et al., ICLR 2023,
    eq. 8). As in their code, weights with constant gradients are left out, and so are layers of such weights alone."""
    _need(images, "zico")
    network = copy.deepcopy(network)
    parts = zip(images.tensor_split(_PARTS), labels.tensor_split(_PARTS), strict=True)
    by_layer = zip(*(_gradients(network, *part) for part in parts), strict=True)
    total, counted = 0.0, 0
    for layer in by_layer:
        gradients = torch.stack(layer)
        spread = gradients.std(0, correction=0)
        moving = spread > 0
        ratio = float((gradients.abs().mean(0)[moving] / spread[moving]).sum(dtype=torch.double))
        if ratio > 0:
            total, counted = total + math.log(ratio), counted + 1
    return _finite("zico", total if counted else math.nan)


SCORE_FUNCTIONS: dict[str, Score] = {"synflow": synflow, "naswot": naswot, "grad_norm": grad_norm, "zico": zico}


def _log_determinant(kernel: Tensor) -> float:
    """log |det K| of a positive semi-definite K in double precision; NaN when K is singular.

    K counts as singular when its least eigenvalue is no larger than the rounding error of its largest, as in numpy's
    `matrix_rank`. The determinant itself cannot decide this: its sign and size depend on the processor.
    """
    eigenvalues = torch.linalg.eigvalsh(kernel)
    if eigenvalues[0] <= len(kernel) * torch.finfo(kernel.dtype).eps * eigenvalues[-1]:
        return math.nan
    sign, value = torch.linalg.slogdet(kernel)
    return float(value) if sign > 0 else math.nan


def _reached_layers(network: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights and their gradients, of the convolutions and linear layers that the backward pass has reached."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear) and module.weight.grad is not None:
            yield module.weight, module.weight.grad


def _gradients(network: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The loss's gradient for each layer's weights. Batch norm uses the batch's own statistics."""
    network.train().zero_grad(set_to_none=True)
    cross_entropy(network(images), labels).backward()
    return [gradient for _, gradient in _reached_layers(network)]


def _bypass(network: nn.Module) -> None:
    """Turn norms (with the activation that timm puts into them), activations and gates into identities."""
    for module in network.modules():
        if isinstance(module, (*_NORMS, *activation_layers())) or type(module).__name__ == _GATES:
            module.forward = _same


def _same(maps: Tensor) -> Tensor:
    return maps


def _need(images: Tensor, score: str) -> None:
    if len(images) < LEAST_IMAGES:
        raise TrainingError(f"{score}: a batch of {len(images)} images tells nothing; it needs {LEAST_IMAGES}.")


def _finite(score: str, value: float) -> float:
    if not math.isfinite(value):
        raise TrainingError(f"{score} is {value} for this network: all images look the same to it, or no gradient "
                            "reaches its weights.")
    return value


_NEXT_SEED = 1_000_003
_CONTROLS = {"params": lambda network: math.log(network.params), "macs": lambda network: math.log(max(network.macs, 1))}


class Scorer:
    """Scores architectures for a data set, on `images` training images without augmentation.

    A score is the mean over `seeds` initial weights. ConfigError when the data set has fewer images.
    """

    def __init__(self, dataset: Dataset, images: int, seeds: int = 1, seed: int = 0, threads: int = 1) -> None:
        if images > len(dataset.train):
            raise ConfigError(f"zero_cost.images={images}, but {dataset.name} has {len(dataset.train)} training "
                              f"images. Set zero_cost.images={len(dataset.train)} or less.")
        self._dataset, self._seeds, self._threads = dataset, seeds, threads
        rows = subset(dataset.train.labels, images, seed)
        # Data sets may be sorted by class, and ZiCo compares parts of the batch.
        self._part = dataset.train.take(np.random.default_rng(seed).permutation(rows)[:images])
        self._sized: dict[int, tuple[Tensor, Tensor]] = {}
        self.fingerprint = digest(dataset.fingerprint, images, seeds, seed)

    def scores(self, architecture: Architecture, names: Sequence[str], seed: int = 0
               ) -> tuple[dict[str, float], dict[str, float]]:
        """Scores by name (of SCORES and CONTROLS), and the seconds of each; TrainingError when there is no score.

        Parameters and MACs are logarithms, like SynFlow and the gradient norm. `seed` decides the initial weights.
        """
        self._check(architecture)
        values = {name: _CONTROLS[name](architecture) for name in names if name in _CONTROLS}
        seconds = dict.fromkeys(values, 0.0)
        for name in names:
            if name not in _CONTROLS:
                start = time.perf_counter()
                values[name] = self._score(architecture, name, seed)
                seconds[name] = time.perf_counter() - start
        return values, seconds

    def _score(self, architecture: Architecture, name: str, seed: int) -> float:
        from hwnas.networks.build import build

        images, labels = self._at(architecture.image_size)
        values = []
        for index in range(self._seeds):
            with (seeded(seed + _NEXT_SEED * index, self._threads),
                  no_memory(f"scoring {len(images)} images ({name})", "Set fewer images, or a smaller image_size.")):
                values.append(SCORE_FUNCTIONS[name](build(architecture), images, labels))
        release_memory()
        return float(np.mean(values))

    def _at(self, image_size: int) -> tuple[Tensor, Tensor]:
        import torch

        if image_size not in self._sized:
            images = self._dataset.normalise(resize(self._part.images, image_size))
            self._sized[image_size] = torch.from_numpy(images), torch.from_numpy(self._part.labels)
        return self._sized[image_size]

    def _check(self, architecture: Architecture) -> None:
        mine = (self._dataset.channels, len(self._dataset.class_names))
        if (architecture.channels, architecture.classes) != mine:
            raise ValueError(f"architecture of {architecture.channels} channels, {architecture.classes} classes, data "
                             f"of {mine[0]} channels, {mine[1]} classes")
