"""Bank: the shared weights of a search space, and how an architecture's network is a view of them.

An architecture's network is the one that `networks.build.build` makes, with the leading slice of a shared tensor for
each parameter. Elastic depth (the first blocks of a stage), width and expansion (the first channels), and
squeeze-and-excite share weights, as in Once-for-All (Cai et al., ICLR 2020) and BigNAS (Yu et al., ECCV 2020). Kinds of
block and kernel sizes are branches with weights of their own. Batch norm shares scale and shift; its statistics belong
to one architecture and are measured for it (`hwnas.training.supernet`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hwnas.errors import SpaceError
from hwnas.networks.build import build

if TYPE_CHECKING:
    from hwnas.space.architecture import Architecture
    from hwnas.space.blocks.block import BlockSpec
    from hwnas.space.reading import Value
    from hwnas.space.search_space import SearchSpace

ELASTIC = ("channels", "repeats", "kernel", "se", "width", "head")
_MOST_BYTES = 8 << 30


class Bank(nn.Module):
    """The shared tensors by key; `bank_of` makes those of a space."""

    def __init__(self, shared: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shared = nn.ParameterDict({
            key: nn.Parameter(tensor.detach().clone(memory_format=torch.contiguous_format))
            for key, tensor in shared.items()})

    def forward(self, images: Tensor, architecture: Architecture) -> Tensor:
        """Logits [n, classes] of `architecture` for `images` [n, c, h, w] with the statistics of this batch."""
        skeleton = build(architecture)
        logits: Tensor = functional_call(skeleton, dict(self.slices(skeleton, architecture)), (images,))
        return logits

    def slices(self, network: nn.Module, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
        """Name and shared view of each parameter of `network`, which `build` made of `architecture`."""
        blocks = _blocks(architecture)
        for name, own in network.named_parameters():
            key = _key(name, own.shape, blocks)
            shared = self.shared.get(key)
            if shared is None or any(n > most for n, most in zip(own.shape, shared.shape, strict=True)):
                raise SpaceError(f"architecture {architecture.id} is of another space than the supernet: it has no "
                                 f"weights for {name}.")
            yield name, shared[tuple(slice(n) for n in own.shape)]


def bank_of(space: SearchSpace) -> Bank:
    """Initial weights for `space`, drawn from torch's global generator.

    SpaceError when two choices of the space cannot share a tensor, or when the tensors would take over 8 GiB.
    """
    widest: dict[str, tuple[Tensor, Architecture]] = {}
    for architecture in covering(space):
        for name, tensor in build(architecture).named_parameters():
            key = key_of(name, tensor.shape, architecture)
            if key not in widest or _fits(widest[key], (tensor, architecture), key, space):
                widest[key] = tensor, architecture
    n_bytes = sum(4 * tensor.numel() for tensor, _ in widest.values())
    if n_bytes > _MOST_BYTES:
        raise SpaceError(f"{space.source}: the shared weights would take {n_bytes / 2**30:.0f} GiB. Give a space of "
                         "smaller channels or repeats, or accuracy=proxy.")
    return Bank({key: tensor for key, (tensor, _) in widest.items()})


def key_of(name: str, shape: torch.Size, architecture: Architecture) -> str:
    """Which shared tensor a network's parameter is a slice of."""
    return _key(name, shape, _blocks(architecture))


def _blocks(architecture: Architecture) -> list[tuple[BlockSpec, ...]]:
    return list(architecture.staged_blocks()[1:-1])


def _key(name: str, shape: torch.Size, blocks: list[tuple[BlockSpec, ...]]) -> str:
    """`blocks.I.J.PARAMETER` gains the block's kind and, where its kernel has an extent, the kernel; no dots, which
    torch does not allow in the name of a parameter."""
    kernel = f"/k{shape[-1]}" if len(shape) == 4 and shape[-1] > 1 else ""
    if name.startswith("blocks."):
        _, stage, block, rest = name.split(".", 3)
        name = f"{stage}/{block}/{blocks[int(stage)][int(block)].kind}/{rest}"
    return name.replace(".", "/") + kernel


def _fits(left: tuple[Tensor, Architecture], right: tuple[Tensor, Architecture], key: str, space: SearchSpace) -> bool:
    """Whether `right` holds `left`; SpaceError when neither holds the other."""
    mine, its = left[0].shape, right[0].shape
    if len(mine) == len(its) and all(a <= b for a, b in zip(mine, its, strict=True)):
        return True
    if len(mine) == len(its) and all(a >= b for a, b in zip(mine, its, strict=True)):
        return False
    raise SpaceError(f"{space.source}: cannot share weights: {key} has shape {list(mine)} in {left[1]} and {list(its)} "
                     f"in {right[1]}. Leave one of these choices out, or give accuracy=proxy.")


def covering(space: SearchSpace) -> Iterator[Architecture]:
    """The largest networks that together have every branch of every stage."""
    yield from map(space.decode, covering_settings(space))


def covering_settings(space: SearchSpace) -> Iterator[dict[str, Value]]:
    """The same networks as settings of the space's parameters."""
    stages = space.definition.stages
    branches = [[(op.text, kernel) for op in stage.ops for kernel in (stage.kernels if op.takes_kernel else (0,))]
                for stage in stages]
    for index in range(max(map(len, branches))):
        setting: dict[str, Any] = {}
        for stage, options in enumerate(branches):
            setting[f"stage{stage}.op"], kernel = options[index % len(options)]
            if kernel:
                setting[f"stage{stage}.kernel"] = kernel
        yield extreme(space, {}, max, setting)


def extreme(space: SearchSpace, setting: Mapping[str, Value], pick: Any, fixed: Mapping[str, Value] | None = None
            ) -> dict[str, Value]:
    """`setting` with every elastic parameter at its largest (`pick=max`) or smallest (`min`) value.

    Parameters in `fixed` take its values. Those that are neither elastic nor in `setting` take their first choice.
    """
    params = {}
    for parameter in space.parameters:
        elastic = parameter.name.split(".")[-1] in ELASTIC
        value = pick(parameter.choices) if elastic else setting.get(parameter.name, parameter.choices[0])
        params[parameter.name] = (fixed or {}).get(parameter.name, value)
    return params


def megabytes(bank: nn.Module) -> float:
    """Size of the shared weights in fp32."""
    return math.fsum(4 * tensor.numel() for tensor in bank.parameters()) / 1e6
