"""An architecture's network with the supernet's weights, its batch norm measured anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hwnas.errors import DataError
from hwnas.networks.build import build
from hwnas.networks.shared_weights import Bank
from hwnas.training.checkpoint import KEY, Checkpoint

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.data.dataset import Dataset, Images
    from hwnas.space.architecture import Architecture

_BATCH = 128


def inherit(bank: Bank, architecture: Architecture, images: Images, dataset: Dataset) -> nn.Module:
    """The network in eval mode with copies of the shared weights and the batch norm statistics of `images`.

    Sub-networks see other statistics than the supernet did: without this they score near chance (Yu and Huang, 2019).
    """
    network = build(architecture)
    copy_weights(bank, architecture, network)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    recalibrate(network, images, dataset)
    return network.eval()


@torch.no_grad()
def copy_weights(bank: Bank, architecture: Architecture, network: nn.Module) -> None:
    """Put the shared weights into `network`, which `build` made of `architecture`; SpaceError where it has others."""
    own = dict(network.named_parameters())
    for name, shared in bank.slices(network, architecture):
        own[name].copy_(shared)


@torch.no_grad()
def recalibrate(network: nn.Module, images: Images, dataset: Dataset) -> None:
    """Set every batch norm's statistics to the mean over `images` uint8 [n, c, h, w]; weights stay.

    A last batch of one image is left out: maps of one pixel have no variance there.
    """
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [module.momentum for module in norms]
    for module in norms:
        module.reset_running_stats()
        module.momentum = None  # the plain mean over batches
    network.train()
    for start in range(0, max(1, len(images) - 1), _BATCH):
        part = dataset.normalise(np.asarray(images[start:start + _BATCH]))
        network(torch.from_numpy(part).contiguous(memory_format=torch.channels_last))
    for module, momentum in zip(norms, momenta, strict=True):
        module.momentum = momentum


def bank_in(checkpoint: Checkpoint) -> Bank:
    """The weights of a trained supernet: the average where there is one."""
    tensors = checkpoint.average or checkpoint.model
    return Bank({name.removeprefix("shared."): tensor for name, tensor in tensors.items()}).requires_grad_(False)


def load_inherited(network: nn.Module, architecture: Architecture, path: Path) -> bool:
    """Put the weights of the supernet at `path` into `network`; False where that file is no supernet.

    StudyError for a torn one, DataError for one of other classes or channels, SpaceError for one of another space.
    """
    if not is_supernet(path):
        return False
    found = Checkpoint.load(path)
    assert found is not None
    for what, its, wanted in (("classes", len(found.identity["classes"]), architecture.classes),
                              ("channels", found.identity["channels"], architecture.channels)):
        if its != wanted:
            raise DataError(f"weights {path}: the supernet knows {its} {what}, the architecture has {wanted}. Give one "
                            "that was trained on this data.")
    copy_weights(bank_in(found), architecture, network)
    return True


def is_supernet(path: Path) -> bool:
    """Whether the file's header is a supernet's; False for what is no safetensors file."""
    return bool(_identity(path))


def note_other_split(path: Path, dataset: Dataset, console: Console) -> None:
    """Say so where the supernet at `path` learnt from another split of `dataset`: it may have seen the test images."""
    its = _identity(path)
    same = (its.get("dataset"), its.get("image_size")) == (dataset.name, dataset.image_size)
    if same and its.get("dataset.fingerprint") != dataset.fingerprint:
        console.say(f"note: the supernet {path} was trained on other images or another split of {dataset.name} "
                    f"({its.get('dataset.fingerprint')}, here {dataset.fingerprint}): test images may be among those "
                    "that it learnt from. Give the seed of its search as split_seed.")


def _identity(path: Path) -> dict[str, Any]:
    """What the supernet at `path` was trained on; empty for another file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(KEY, "null"))
    except (OSError, SafetensorError, ValueError):
        return {}
    found = about.get("identity") if isinstance(about, dict) else None
    return found if isinstance(found, dict) and "space" in found else {}
