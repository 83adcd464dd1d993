"""An architecture's network with the supernet's weights, its batch norm measured anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from hwnas.network import build
from hwnas.supernet.bank import Bank

if TYPE_CHECKING:
    from hwnas.accuracy.dataset import Dataset, Images
    from hwnas.architecture import Architecture

_BATCH = 128


def inherit(bank: Bank, architecture: Architecture, images: Images, dataset: Dataset) -> nn.Module:
    """The network in eval mode with copies of the shared weights and the batch norm statistics of `images`.

    Sub-networks see other statistics than the supernet did: without this they score near chance (Yu and Huang, 2019).
    """
    network = build(architecture)
    with torch.no_grad():
        own = dict(network.named_parameters())
        for name, shared in bank.slices(network, architecture):
            own[name].copy_(shared)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    recalibrate(network, images, dataset)
    return network.eval()


@torch.no_grad()
def recalibrate(network: nn.Module, images: Images, dataset: Dataset) -> None:
    """Set every batch norm's statistics to the mean over `images` uint8 [n, c, h, w]; weights stay."""
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [module.momentum for module in norms]
    for module in norms:
        module.reset_running_stats()
        module.momentum = None  # the plain mean over batches
    network.train()
    for start in range(0, len(images), _BATCH):
        part = dataset.normalise(np.asarray(images[start:start + _BATCH]))
        network(torch.from_numpy(part).contiguous(memory_format=torch.channels_last))
    for module, momentum in zip(norms, momenta, strict=True):
        module.momentum = momentum
