"""BlockSpec: one unit that a runtime executes and a latency table times. BlockKind: what all of one kind share.

All convolutions pad symmetrically with (stride - 1 + kernel - 1) // 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwnas.lazy import nn

ACTIVATIONS = ("relu", "relu6", "swish", "hard_swish", "gelu")
ATTENTION = "attention"  # a role: every pixel, or token, weighs all others
Convolutions = tuple[tuple[str, int, int, int, int, int], ...]


def round_to_divisor(channels: float, divisor: int = 8) -> int:
    """Nearest multiple of `divisor`, never below `divisor` nor below 90 % of `channels` (MobileNetV2's rule)."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


class BlockKind:
    """Everything that is said of one kind of block. Callers ask here and know no kind by name.

    `name` opens its table keys and arch-def strings. `words`: what search spaces call it. The flags say which settings
    the kind has; arch-def strings and codes leave out the others.
    """

    name: str
    words: tuple[str, ...] = ()  # none: not for stages (stem, head)
    expands: bool = False  # has an inner width, `e`
    takes_se: bool = False  # may have squeeze-and-excite
    takes_kernel: bool = True  # False: the kernel belongs to the kind
    vanishes: bool = False  # is nothing where it changes no shape, so that it is never repeated and has no residual
    adds_input: bool = True  # where nothing is said (`skip`, `noskip`) and the shapes allow it
    activations: int = 1  # of them in one block
    reads_image: bool = False
    ends: bool = False  # pools and answers
    in_timm: bool = True  # timm's EfficientNet has it, too
    fp32_roles: tuple[str, ...] = ("se",)  # operators that stay fp32 in an int8 file
    file_bytes: tuple[float, float] = (0.0, 0.0)  # of an fp32 and an int8 file, beside convolutions and residual

    def convolutions(self, block: BlockSpec) -> Convolutions:
        """See `BlockSpec.convolutions`: one, unless the kind says otherwise."""
        role = "dense" if block.kernel > 1 else "pointwise"
        return ((role, block.in_channels, block.out_channels, block.kernel, block.size, block.out_size),)

    def build(self, block: BlockSpec) -> nn.Module:
        """The block in torch with timm's layers."""
        raise NotImplementedError

    def norm_elements(self, block: BlockSpec) -> int:
        """Elements that norms read which no runtime can fold into a convolution, as layer norms."""
        return 0

    def norm_params(self, block: BlockSpec) -> int:
        """Trainable parameters that are no weights: batch norms, biases of squeeze-and-excite and classifier."""
        return sum(n_out if role in ("se", "linear") else 2 * n_out
                   for role, _, n_out, *_ in self.convolutions(block) if role != ATTENTION)


class TracedBlock(BlockKind):
    """`traced`: the operators that were met when a network ran once; see `hwnas.networks.traced`."""

    name = "traced"
    takes_kernel, in_timm = False, False

    def convolutions(self, block: BlockSpec) -> Convolutions:
        return block.operators


KINDS: dict[str, BlockKind] = {}  # filled by the table in `hwnas.space.blocks`


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block in its place: `size` is the height and width of its input, `skip` whether it adds its input.

    `classes` is set on `head` only (1x1 convolution to `out_channels`, global pooling, linear layer);
    a head with `out_channels == in_channels` and `kernel == 0` has no convolution.

    `se`: the width of squeeze-and-excite as a share of what the block reads.

    `operators`: what a block of the kind `traced` runs, as `convolutions` gives it; () for all others.
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
        """The rules of its kind; ValueError for a kind that is not in the table."""
        if self.kind not in KINDS:
            raise ValueError(f"unknown block kind {self.kind!r}")
        return KINDS[self.kind]

    @property
    def rank(self) -> int:
        """Place of its kind in the table, for an order of blocks."""
        return list(KINDS).index(self.kind)

    @property
    def key(self) -> str:
        """Name in tables, caches and errors, e.g. `ir/24x56x56/40/s2/k5/e3/se0.25/relu`."""
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
        """Height and width of the output (1 after the head's pooling)."""
        return 1 if self.rules.ends else -(-self.size // self.stride)

    @property
    def mid_channels(self) -> int:
        """Channels between expansion and projection (input channels where nothing expands)."""
        return round_to_divisor(self.in_channels * self.expansion) if self.rules.expands else self.in_channels

    @property
    def se_ratio(self) -> float:
        """Width of squeeze-and-excite as a share of the inner channels; timm counts it from the block's input."""
        return self.se / (self.expansion if self.rules.expands else 1.0)

    @property
    def se_channels(self) -> int:
        """Width of the squeeze-and-excite bottleneck (0: none)."""
        return round(self.mid_channels * self.se_ratio) if self.se else 0

    def convolutions(self) -> Convolutions:
        """Its convolutions in order: (role, in, out, kernel, input size, output size).

        Roles: `dense` (k > 1), `pointwise`, `depthwise`, `se` (on 1x1 maps), `linear`.
        """
        return self.rules.convolutions(self)

    @property
    def weights(self) -> int:
        """Weights of its convolutions."""
        return sum(weights_of(role, n_in, n_out, kernel) for role, n_in, n_out, kernel, *_ in self.convolutions())

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image."""
        return sum(2 * n_out * out**4 if role == ATTENTION else weights_of(role, n_in, n_out, kernel) * out * out
                   for role, n_in, n_out, kernel, _, out in self.convolutions())

    @property
    def params(self) -> int:
        """Trainable parameters: convolutions, norms, biases."""
        return self.weights + self.rules.norm_params(self)

    @property
    def activation_elements(self) -> int:
        """Elements read and written by its convolutions and norms: times the element size, the bytes it moves."""
        total = 2 * self.rules.norm_elements(self)
        for _, n_in, n_out, _, size, out in self.convolutions():
            total += n_in * size * size + n_out * out * out
        return total + (2 * self.out_channels * self.out_size**2 if self.skip else 0)


def weights_of(role: str, n_in: int, n_out: int, kernel: int) -> int:
    """Weights of one convolution: a depthwise one reads one channel for each that it writes."""
    if role == ATTENTION:
        return 0
    return (1 if role == "depthwise" else n_in) * n_out * kernel * kernel
