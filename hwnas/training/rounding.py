"""Coarser numbers in a training: bf16 for the layers that it speeds up, and int8's rounding for a network that would
lose by it.

On a CPU, autocast alone takes up to twice as long as fp32 for a network of depthwise convolutions: oneDNN has only slow
kernels for their gradients in bf16. So grouped convolutions stay in fp32.

The rounding of int8 follows Jacob et al., Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference (CVPR 2018). But the range of an activation is that of the batch, so that a state has
nothing beside weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hwnas.networks.qdq import largest_weight

_GROUPS = 6  # position of the argument `groups` of conv2d
_LINEAR = (functional.linear,)
_ROUNDED = (functional.conv2d, *_LINEAR)


@contextlib.contextmanager
def mixed_precision(kind: str) -> Iterator[None]:
    """Compute in bf16 inside the block, on a device of this kind (`cpu`, `cuda`), except in layers that it slows."""
    with torch.autocast(kind, torch.bfloat16), _GroupsInFp32() if kind == "cpu" else contextlib.nullcontext():
        yield


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) else value


class _GroupsInFp32(TorchFunctionMode):
    """A context in which grouped convolutions compute in fp32."""

    def __torch_function__(self, function: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `function`, one of torch's: in fp32 if it is a grouped convolution."""
        named = kwargs or {}
        if function is functional.conv2d and (args[_GROUPS] if len(args) > _GROUPS else named.get("groups", 1)) > 1:
            with torch.autocast("cpu", enabled=False):
                return function(*map(_as_fp32, args), **{name: _as_fp32(value) for name, value in named.items()})
        return function(*args, **named)


class Rounding(TorchFunctionMode):
    """A context in which convolutions and linear layers compute as in an int8 file.

    Weights are rounded for each output channel, inputs by the range of the batch. Gradients pass straight through.
    Convolutions of maps of one pixel are not rounded: they are taken for gates of squeeze-and-excite, which are fp32 in
    the file. Rounding for each output channel gives the same result before and after a batch norm is folded.

    Args:
        narrow: True if the file's weights have 7 bits, as on CPUs whose sums of products saturate.
    """

    def __init__(self, narrow: bool = False) -> None:
        super().__init__()
        self._largest = largest_weight(narrow)

    def __torch_function__(self, function: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `function`, one of torch's, with rounded tensors if it is that of a layer."""
        if function in _ROUNDED and (function in _LINEAR or args[0].shape[2:] != (1, 1)):
            args = (_round_map(args[0]), _round_weight(args[1], self._largest), *args[2:])
        return function(*args, **(kwargs or {}))


def _round_map(values: Tensor) -> Tensor:
    """Round to uint8 with a zero point, by the minimum and maximum of the tensor."""
    values = values.float()
    with torch.no_grad():
        low, high = torch.aminmax(values)
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = ((high - low) / 255).clamp_min(1e-12)
        zero_point = (-low / scale).round().to(torch.int32)
    rounded: Tensor = torch.fake_quantize_per_tensor_affine(values, scale, zero_point, 0, 255)
    return rounded


def _round_weight(weight: Tensor, largest: int) -> Tensor:
    """Round to whole numbers from -`largest` to `largest`, by the largest magnitude of each output channel."""
    with torch.no_grad():
        scale = (weight.abs().flatten(1).amax(1) / largest).clamp_min(1e-12)
        zeros = torch.zeros(len(scale), dtype=torch.int32, device=scale.device)
    rounded: Tensor = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -largest, largest)
    return rounded
