"""bf16 in a training, for the layers that it speeds up.

On a CPU, autocast alone takes up to twice as long as fp32 for a network of depthwise convolutions: oneDNN has only slow
kernels for their gradients in bf16. So grouped convolutions stay in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_GROUPS = 6  # position of the argument `groups` of conv2d


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
