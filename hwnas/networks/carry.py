"""A network cut from a trained one: what of its weights the cut begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hwnas.lazy import LazyModule
from hwnas.networks.around import select_weights
from hwnas.networks.build import build
from hwnas.networks.tracing import cut_member
from hwnas.space.architecture import Architecture
from hwnas.space.family import Member

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    nn = LazyModule("torch.nn")
    torch = LazyModule("torch")


def cut_network(weights: Mapping[str, Tensor], whole: Architecture, part: Architecture) -> nn.Module:
    """`part` in train mode, with what it keeps of `weights`, the trained state of `whole`; its classifier too, where
    that reads the same channels. All else is random (seed torch first).

    Args:
        weights: the state of the network `whole`, by name.
        whole: the network that is cut; `part` is a part of it.
        part: the network to build.
    """
    if isinstance(part, Member) and isinstance(whole, Member):
        return cut_member(weights, whole, part)
    target = build(part)
    if replace(part, image_size=whole.image_size) == whole:
        target.load_state_dict(dict(weights))
        return target.train()
    with torch.random.fork_rng(devices=[]):
        source: Any = build(whole)
    source.load_state_dict(dict(weights))
    state = target.state_dict()
    with torch.no_grad():
        for name, tensor in select_weights(source.eval(), target).items():
            state[name].copy_(tensor)
    return target.train()
