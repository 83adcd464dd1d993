"""Networks by timm's name, and weights from a safetensors file: checked, one line for what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hwnas.errors import ConfigError, DataError
from hwnas.networks.baselines import TIMM

if TYPE_CHECKING:
    from torch import nn

    from hwnas.networks.baselines import Baseline


def build_timm(network: Baseline, channels: int, classes: int, image_size: int) -> nn.Module:
    """The network with random weights; ConfigError when it cannot be built for these images."""
    from hwnas.networks.baselines import check_timm

    check_timm(network.name)
    try:
        return network.build(channels, classes, image_size)
    except Exception as error:  # each network has errors of its own for a size that it cannot take
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{TIMM}{network.name} cannot be built for {channels}×{image_size}×{image_size} images and "
                          f"{classes} classes: {said}. Set another dataset.image_size or model.") from None


def load_weights(model: nn.Module, path: Path, label: str, classes: int) -> None:
    """Put a safetensors file's weights into `model`; DataError when it is torn, or of another network or classes."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{label} cannot be read ({' '.join(str(error).split())[:120]}): it is torn or no safetensors "
                        "file. Give a whole one.") from None
    own = model.state_dict()
    missing = [name for name in own if name not in tensors] + [name for name in tensors if name not in own]
    if missing:
        raise DataError(f"{label} is of another network: {missing[0]!r} is in only one of them ({len(missing)} such). "
                        "Give the weights of this network.")
    other = [name for name in own if own[name].shape != tensors[name].shape]
    if other and all(_is_head(own[name].shape, tensors[name].shape, classes) for name in other):
        raise DataError(f"{label} knows {tensors[other[0]].shape[0]} classes, the data set has {classes}. Give weights "
                        "that were trained on these classes.")
    if other:
        raise DataError(f"{label} is of another network: {other[0]!r} has shape {list(tensors[other[0]].shape)} there, "
                        f"{list(own[other[0]].shape)} here ({len(other)} such). Give the weights of this network.")
    model.load_state_dict(tensors)


def _is_head(own: tuple[int, ...], given: tuple[int, ...], classes: int) -> bool:
    """Whether two shapes differ in the number of classes only."""
    return len(own) == len(given) and own[0] == classes and tuple(own[1:]) == tuple(given[1:])
