"""BlockSpec: one unit that a runtime executes and a latency table times. BlockKind: the rules of one kind of block.

All convolutions pad symmetrically with (stride - 1 + kernel - 1) // 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwnas.lazy import nn

ACTIVATIONS = ("relu", "relu6", "swish", "hard_swish", "gelu")
ATTENTION = "attention"  # a role: products of each pixel (token) with all others, without weights
Convolutions = tuple[tuple[str, int, int, int, int, int], ...]


def round_to_divisor(channels: float, divisor: int = 8) -> int:
    """Round to a multiple of `divisor`, not below `divisor` nor below 90 % of `channels` (MobileNetV2's rule)."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class BlockKind:
    """The rules of one kind of block. Other code asks them and does not depend on names of kinds.

    Table keys and arch-def strings start with `name`. `words` are its names in search spaces. The flags say which
    settings the kind has; arch-def strings and codes leave out the others.
    """

    name: str
    words: tuple[str, ...] = ()  # (): not for stages (stem, head)
    expands: bool = False  # has an inner width, `e`
    takes_se: bool = False  # may have squeeze-and-excite
    takes_kernel: bool = True  # False: the kind fixes the kernel
    vanishes: bool = False  # does nothing if the shape stays the same; so it is never repeated and has no residual
    adds_input: bool = True  # the default without `skip` or `noskip`, if the shapes allow it
    activations: int = 1  # number of activations in one block
    reads_image: bool = False  # is the first block
    ends: bool = False  # is the last block: it pools and classifies
    in_timm: bool = True  # timm's EfficientNet can build it
    fp32_roles: tuple[str, ...] = ("se",)  # roles of operators that stay fp32 in an int8 file
    file_bytes: tuple[float, float] = (0.0, 0.0)  # in an fp32 and an int8 file, beside convolutions and residual

    def convolutions(self, block: BlockSpec) -> Convolutions:
        """Return `BlockSpec.convolutions`: one convolution, unless the kind overrides this."""
        role = "dense" if block.kernel > 1 else "pointwise"
        return ((role, block.in_channels, block.out_channels, block.kernel, block.size, block.out_size),)

    def build(self, block: BlockSpec) -> nn.Module:
        """Build the block in torch with timm's layers."""
        raise NotImplementedError

    def norm_elements(self, block: BlockSpec) -> int:
        """Return how many elements norms read, without norms that runtimes fold into a convolution (batch norms)."""
        return 0

    def norm_params(self, block: BlockSpec) -> int:
        """Return the number of trainable parameters beside weights: batch norms, biases of gates and classifier."""
        return sum(n_out if role in ("se", "linear") else 2 * n_out
                   for role, _, n_out, *_ in self.convolutions(block) if role != ATTENTION)


class TracedBlock(BlockKind):
    """`traced`: the operators that were recorded when a network ran once; see `hwnas.networks.traced`."""

    name = "traced"
    takes_kernel, in_timm = False, False

    def convolutions(self, block: BlockSpec) -> Convolutions:
        return block.operators


KINDS: dict[str, BlockKind] = {}  # filled by the table in `hwnas.space.blocks`


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block in its place in a network.

    `size` is the height and width of its input. With `skip` it adds its input to its output.
    `classes` is set on `head` only (1x1 convolution to `out_channels`, global pooling, linear layer). A head with
    `kernel == 0` has no convolution, and then `out_channels == in_channels`.
    `se` is the width of squeeze-and-excite as a share of the input channels.
    `operators` of a block of the kind `traced` are its `convolutions`; () for all other kinds.
    """

    kind: str
    in_channels: int
    out_channels: int
    size: int
    kernel: int = 3
    stride: int = 1
    expansion: float = 1.0
    se: float = 0.0
    skip: bool = False
    activation: str = "relu"
    classes: int = 0
    operators: Convolutions = ()

    @property
    def rules(self) -> BlockKind:
        """The rules of its kind. Raises ValueError for a kind that is not in the table."""
        if self.kind not in KINDS:
            raise ValueError(f"unknown block kind {self.kind!r}")
        return KINDS[self.kind]

    @property
    def rank(self) -> int:
        """The index of its kind in the table, to sort blocks by."""
        return list(KINDS).index(self.kind)

    @property
    def key(self) -> str:
        """The name in tables, caches and errors, e.g. `ir/24x56x56/40/s2/k5/e3/se0.25/relu`."""
        parts = [self.kind, f"{self.in_channels}x{self.size}x{self.size}", str(self.out_channels)]
        parts += [f"s{self.stride}", f"k{self.kernel}"]
        if self.rules.expands:
            parts.append(f"e{self.expansion:g}")
        if self.se:
            parts.append(f"se{self.se:g}")
        if self.skip:
            parts.append("skip")
        if self.classes:
            parts.append(f"classes{self.classes}")
        parts += ["_".join(map(str, operator)) for operator in self.operators]
        return "/".join([*parts, self.activation])

    @property
    def out_size(self) -> int:
        """The height and width of the output (1 after the head's pooling)."""
        return 1 if self.rules.ends else -(-self.size // self.stride)

    @property
    def mid_channels(self) -> int:
        """The channels between expansion and projection (the input channels if the kind does not expand)."""
        return round_to_divisor(self.in_channels * self.expansion) if self.rules.expands else self.in_channels

    @property
    def se_ratio(self) -> float:
        """The width of squeeze-and-excite as a share of the inner channels; `se` is a share of the input channels."""
        return self.se / (self.expansion if self.rules.expands else 1.0)

    @property
    def se_channels(self) -> int:
        """The width of the squeeze-and-excite bottleneck (0: none)."""
        return round(self.mid_channels * self.se_ratio) if self.se else 0

    def convolutions(self) -> Convolutions:
        """Return its convolutions in order: (role, in, out, kernel, input size, output size).

        Roles: `dense` (k > 1), `pointwise`, `depthwise`, `se` (on 1x1 maps), `linear`; `attention` if traced.
        """
        return self.rules.convolutions(self)

    @property
    def weights(self) -> int:
        """The number of weights of its convolutions."""
        return sum(weights_of(role, n_in, n_out, kernel) for role, n_in, n_out, kernel, *_ in self.convolutions())

    @property
    def macs(self) -> int:
        """The multiply-accumulates of one image."""
        # Attention multiplies all pairs of pixels twice: queries with keys, and the result with values.
        return sum(2 * n_out * out**4 if role == ATTENTION else weights_of(role, n_in, n_out, kernel) * out * out
                   for role, n_in, n_out, kernel, _, out in self.convolutions())

    @property
    def params(self) -> int:
        """The number of trainable parameters: convolutions, norms, biases."""
        return self.weights + self.rules.norm_params(self)

    @property
    def activation_elements(self) -> int:
        """The elements that its operators read and write. Times the size of an element, these are the bytes moved."""
        total = 2 * self.rules.norm_elements(self)
        for _, n_in, n_out, _, size, out in self.convolutions():
            total += n_in * size * size + n_out * out * out
        return total + (2 * self.out_channels * self.out_size**2 if self.skip else 0)


def weights_of(role: str, n_in: int, n_out: int, kernel: int) -> int:
    """Return the weights of one convolution. A depthwise one reads a single channel for each output channel."""
    if role == ATTENTION:
        return 0
    return (1 if role == "depthwise" else n_in) * n_out * kernel * kernel
