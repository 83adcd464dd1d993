"""Parts of networks that can be timed alone: whole blocks, and the fused kernels that they consist of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec

if TYPE_CHECKING:
    from torch import nn

KERNELS = ("dense", "pointwise", "depthwise", "se", "add", "pool_linear")
_JITTER = (0.7, 1.4)  # range of the factor on a sampled kernel's channels


@dataclass(frozen=True, slots=True)
class Kernel:
    """One fused kernel: a convolution with batch norm (and activation), squeeze-and-excite, addition, or the end.

    `size` is the height and width of its input; `hidden` the width of a squeeze-and-excite bottleneck; `activation` is
    empty where none follows. Runtimes fuse an addition into the convolution before it, and int8 needs one to quantise:
    `add` and `se` are timed behind a convolution, less that convolution alone (`before`).
    """

    kind: str
    in_channels: int
    out_channels: int
    size: int
    kernel: int = 1
    stride: int = 1
    hidden: int = 0
    activation: str = ""

    @property
    def key(self) -> str:
        """Its name in files."""
        return (f"kernel:{self.kind}/{self.in_channels}x{self.size}/{self.out_channels}/k{self.kernel}/s{self.stride}"
                f"/h{self.hidden}/{self.activation or 'none'}")

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.in_channels, self.size, self.size

    @property
    def last(self) -> bool:
        """Whether it ends a network."""
        return self.kind == "pool_linear"

    @property
    def features(self) -> np.ndarray:
        """What a forest sees: channels, kernel, size, stride, MACs, parameters, elements moved, activation."""
        out = 1 if self.kind == "pool_linear" else -(-self.size // self.stride)
        if self.kind == "se":
            macs = params = 2 * self.in_channels * self.hidden
        else:
            inputs = 1 if self.kind == "depthwise" else 0 if self.kind == "add" else self.in_channels
            params = inputs * self.out_channels * self.kernel**2
            macs = params * out * out
        moved = self.in_channels * self.size**2 + self.out_channels * out**2
        return np.array([self.in_channels, self.out_channels, self.kernel, self.size, self.stride, self.hidden, macs,
                         params, moved, bool(self.activation)], float)

    def jittered(self, rng: np.random.Generator) -> Kernel:
        """Other channels of the same order, in multiples of 8; inputs that are images or logits stay as they are."""
        inputs = self.in_channels if self.in_channels < 8 else _scaled(self.in_channels, rng)
        if self.kind in ("dense", "pointwise"):
            return replace(self, in_channels=inputs, out_channels=_scaled(self.out_channels, rng))
        if self.kind == "se":
            hidden = max(1, round(self.hidden * inputs / self.in_channels))
            return replace(self, in_channels=inputs, out_channels=inputs, hidden=hidden)
        if self.kind == "pool_linear":
            return replace(self, in_channels=inputs)
        return replace(self, in_channels=inputs, out_channels=inputs)

    @property
    def before(self) -> Kernel | None:
        """The convolution that it is timed behind; None for those that are timed by themselves."""
        if self.kind == "add":
            return Kernel("pointwise", self.in_channels, self.out_channels, self.size)
        if self.kind == "se":
            return Kernel("depthwise", self.in_channels, self.out_channels, self.size, 3, activation="relu")
        return None


CALL = Kernel("pointwise", 8, 8, 1, activation="relu")  # next to no work: what it takes is the cost of a call


@dataclass(frozen=True, slots=True)
class Block:
    """A whole block of a network."""

    spec: BlockSpec

    @property
    def key(self) -> str:
        """Its name in files."""
        return f"block:{self.spec.key}"

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.spec.in_channels, self.spec.size, self.spec.size

    @property
    def last(self) -> bool:
        """Whether it ends a network."""
        return self.spec.kind == "head"


Part = Kernel | Block


@lru_cache(maxsize=100_000)
def kernels(spec: BlockSpec) -> tuple[Kernel, ...]:
    """The fused kernels of a block, in order."""
    found: list[Kernel] = []
    rows = spec.convolutions()
    for index, (role, n_in, n_out, k, size, out) in enumerate(rows):
        if role == "se":
            if rows[index - 1][0] != "se":  # the first of its two layers stands for both
                found.append(Kernel("se", n_in, n_in, spec.out_size, hidden=n_out))
        elif role == "linear":
            found.append(Kernel("pool_linear", n_in, n_out, spec.size))
        else:
            last = spec.kind in ("ds", "ir", "er", "id") and index == len(rows) - 1
            found.append(Kernel(role, n_in, n_out, size, k, max(1, round(size / out)),
                                activation="" if last else spec.activation))
    if spec.skip:
        found.append(Kernel("add", spec.out_channels, spec.out_channels, spec.out_size))
    return tuple(found)


def network_kernels(architecture: Architecture) -> list[Kernel]:
    """All kernels of a network."""
    return [kernel for block in architecture.blocks() for kernel in kernels(block)]


def sampled_kernels(networks: Sequence[Architecture], n: int, seed: int = 0) -> list[Kernel]:
    """`n` different kernels around those of `networks`, every second one with other channels.

    Each kind gets a share in proportion to the square root of how many different ones there are, so that rare kinds
    are learnt too.
    """
    rng = np.random.default_rng(seed)
    pools = {kind: sorted({one for network in networks for one in network_kernels(network) if one.kind == kind},
                          key=lambda one: one.key) for kind in KERNELS}
    pools = {kind: pool for kind, pool in pools.items() if pool}
    weights = np.sqrt([len(pool) for pool in pools.values()])
    ranked: list[tuple[float, tuple[Kernel, ...]]] = []
    for pool, share in zip(pools.values(), weights / weights.sum(), strict=True):
        wanted = max(2, round(share * n))
        chosen: dict[Kernel, None] = {}
        for attempt in range(20 * wanted):
            if len(chosen) == wanted:
                break
            one = pool[int(rng.integers(len(pool)))]
            chosen[one.jittered(rng) if attempt % 2 else one] = None
        # By turns, so that the first of them are of every kind; a difference comes behind what it is taken from.
        ranked += [(rank / wanted, (one,) if one.before is None else (one.before, one))
                   for rank, one in enumerate(chosen)]
    ranked.sort(key=lambda entry: entry[0])
    return list(dict.fromkeys([CALL, *(one for _, some in ranked for one in some)]))[:n]


def build_part(part: Part) -> nn.Module:
    """The part with random weights, in evaluation mode: float32 [n, *input_shape] in."""
    from experiments.latency.peers.modules import block_module, kernel_module

    return (block_module(part.spec) if isinstance(part, Block) else kernel_module(part)).eval()


def to_dict(part: Part) -> dict[str, Any]:
    """Plain values."""
    return asdict(part.spec if isinstance(part, Block) else part)


def _scaled(channels: int, rng: np.random.Generator) -> int:
    low, high = np.log(_JITTER)
    return max(8, round(channels * float(np.exp(rng.uniform(low, high))) / 8) * 8)
