"""Cuts by depth of timm's networks: the first blocks of each stage, no last stages, a narrower head.

A stage's first block halves the map and widens it; those behind it refine. What is left of a pretrained network keeps
its weights, so that a fine-tuned cut is what any narrower network has to beat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError
from hwnas.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = LazyModule("torch")

_TEXT = re.compile(r"([1-9]{1,16})(?:h([1-9]\d{0,4}))?")
_LEAST_STAGES = 5  # of a network whose last three can be left out


@dataclass(frozen=True, slots=True)
class Cut:
    """The number of first blocks that each stage keeps, for the stages that are kept, and the head's width (0: as it
    was).

    As text: a digit a stage, then the head, such as `1111h640`.
    """

    blocks: tuple[int, ...]
    head: int = 0

    def __str__(self) -> str:
        return "".join(map(str, self.blocks)) + (f"h{self.head}" if self.head else "")

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Inverse of `str`; ValueError for another text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"a cut is a digit from 1 to 9 for each stage and perhaps h and the head's width, not "
                             f"{text[:40]!r}")
        return cls(tuple(map(int, match[1])), int(match[2] or 0))

    def apply(self, model: nn.Module, where: str) -> None:
        """Cut `model` in place; ConfigError where it has no such stages. Kept weights stay.

        A head behind other channels begins anew. A narrower one behind the same channels keeps those whose norm scales
        most.
        """
        network: Any = model
        sizes = stages(model)
        if not sizes or len(self.blocks) > len(sizes) or any(map(int.__gt__, self.blocks, sizes)) \
                or self.head > (_head(network) or 0):
            raise ConfigError(f"{where} cannot be cut to {self}: " + (
                f"its stages have {', '.join(map(str, sizes))} blocks and its head {_head(network) or 'no'} channels."
                if sizes else "it has no stages of blocks, as timm's EfficientNets, MobileNets and MnasNets do."))
        network.blocks = torch.nn.Sequential(*(stage[:kept] for stage, kept in
                                               zip(network.blocks, self.blocks, strict=False)))
        try:
            channels = _channels(network)
        except RuntimeError as error:  # a later block widens its stage, and the next stage reads that width
            raise ConfigError(f"{where} cannot be cut to {self}: the stages left do not fit together "
                              f"({' '.join(str(error).split())[:120]}).") from None
        width = self.head or _head(network)
        if width is None:
            network.classifier = _linear(network.classifier, channels)
            network.num_features = network.head_hidden_size = channels
        elif (width, channels) != (_head(network), network.conv_head.in_channels):
            _set_head(network, channels, width)


def stages(model: nn.Module) -> tuple[int, ...]:
    """Blocks of each stage; () for a network that cannot be cut."""
    blocks = getattr(model, "blocks", None)
    if blocks is None or not all(hasattr(model, name) for name in ("conv_stem", "bn1", "conv_head", "classifier")):
        return ()
    return tuple(len(stage) for stage in blocks) if all(hasattr(stage, "__len__") for stage in blocks) else ()


def obvious(model: nn.Module) -> list[Cut]:
    """The cuts that anybody would try first: one block a stage; then without the last three stages and with half of the
    head; then two blocks a stage there, with two fifths of the head. [] for a network that cannot be cut.

    Cuts whose stages do not fit together are left out.
    """
    sizes, head = stages(model), _head(model) or 0
    cuts = [Cut((1,) * len(sizes))] if sizes else []
    if len(sizes) >= _LEAST_STAGES:
        kept = sizes[:-3]
        cuts += [Cut((1,) * len(kept), head // 2), Cut(tuple(min(2, size) for size in kept), 2 * head // 5)]
    return [cut for cut in dict.fromkeys(cuts) if cut.blocks != sizes and _fits(cut, model)]


def _fits(cut: Cut, model: nn.Module) -> bool:
    try:
        cut.apply(deepcopy(model), "")
    except ConfigError:
        return False
    return True


def _head(network: Any) -> int | None:
    """The head's channels; None for a network without."""
    return getattr(getattr(network, "conv_head", None), "out_channels", None)


def _channels(network: Any) -> int:
    """The channels that the blocks hand on."""
    was_training, conv = network.training, network.conv_stem
    with torch.no_grad():
        network.eval()
        maps = network.blocks(network.bn1(conv(torch.zeros(1, conv.in_channels, 64, 64))))
    network.train(was_training)
    return int(maps.shape[1])


def _set_head(network: Any, channels: int, width: int) -> None:
    """Give the network a head of `width` behind `channels`, and a classifier behind it."""
    old = network.conv_head
    new = torch.nn.Conv2d(channels, width, 1, bias=old.bias is not None)
    norm = next((module for module in (getattr(network, name, None) for name in ("bn2", "norm_head"))
                 if getattr(module, "num_features", None) == old.out_channels), None)
    rows = list(range(width))
    if channels == old.in_channels:
        scale = old.weight.detach().abs().sum((1, 2, 3)) if norm is None else norm.weight.detach().abs()
        rows = sorted(scale.argsort(descending=True, stable=True)[:width].tolist())
        with torch.no_grad():
            new.weight.copy_(old.weight[rows])
            if old.bias is not None and new.bias is not None:
                new.bias.copy_(old.bias[rows])
    if norm is not None:
        _narrow(norm, rows)
        if channels != old.in_channels:
            norm.reset_parameters()
            norm.reset_running_stats()
    network.conv_head, network.classifier = new, _linear(network.classifier, width)
    network.head_hidden_size = width
    network.num_features = width if network.num_features == old.out_channels else channels


def _narrow(norm: Any, rows: Sequence[int]) -> None:
    """Leave a norm the channels `rows`."""
    norm.num_features = len(rows)
    for name in ("weight", "bias"):
        setattr(norm, name, torch.nn.Parameter(getattr(norm, name).detach()[rows]))
    for name in ("running_mean", "running_var"):
        setattr(norm, name, getattr(norm, name)[rows])


def _linear(old: Any, width: int) -> nn.Module:
    return torch.nn.Linear(width, old.out_features, bias=old.bias is not None)
