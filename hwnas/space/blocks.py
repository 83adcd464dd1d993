"""BlockSpec: one unit that a runtime executes and a latency table times.

Kinds follow timm's arch-def strings: `cn` convolution + BN + activation, `ds` depthwise-separable,
`ir` inverted residual, `er` fused ("edge") inverted residual, `id` the strided 1x1 convolution + BN that stands
for identity where the shape changes; `stem` and `head` close the network. All convolutions pad symmetrically
with (stride - 1 + kernel - 1) // 2.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("stem", "cn", "ds", "ir", "er", "id", "head")
ACTIVATIONS = ("relu", "relu6", "swish", "hard_swish")


def round_to_divisor(channels: float, divisor: int = 8, round_limit: float = 0.9) -> int:
    """Nearest multiple of `divisor`, never below `divisor` nor below 90 % of `channels` (MobileNetV2's rule)."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < round_limit * channels else rounded


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block in its place: `size` is the height and width of its input, `skip` whether it adds its input.

    `classes` is set on `head` only (1x1 convolution to `out_channels`, global pooling, linear layer);
    a head with `out_channels == in_channels` and `kernel == 0` has no convolution.
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

    @property
    def key(self) -> str:
        """Name in tables, caches and errors, e.g. `ir/24x56x56/40/s2/k5/e3/se0.25/relu`."""
        parts = [self.kind, f"{self.in_channels}x{self.size}x{self.size}", str(self.out_channels)]
        parts += [f"s{self.stride}", f"k{self.kernel}"]
        if self.kind in ("ir", "er"):
            parts.append(f"e{self.expansion:g}")
        if self.se:
            parts.append(f"se{self.se:g}")
        if self.skip:
            parts.append("skip")
        if self.classes:
            parts.append(f"classes{self.classes}")
        return "/".join([*parts, self.activation])

    @property
    def out_size(self) -> int:
        """Height and width of the output (1 after the head's pooling)."""
        return 1 if self.kind == "head" else -(-self.size // self.stride)

    @property
    def mid_channels(self) -> int:
        """Channels between expansion and projection (input channels where nothing expands)."""
        if self.kind in ("ir", "er"):
            return round_to_divisor(self.in_channels * self.expansion)
        return self.in_channels

    @property
    def se_channels(self) -> int:
        """Width of the squeeze-and-excite bottleneck, from the block's input as timm counts it (0: none)."""
        if not self.se:
            return 0
        return round(self.mid_channels * (self.se / (self.expansion if self.kind in ("ir", "er") else 1.0)))

    def convolutions(self) -> tuple[tuple[str, int, int, int, int, int], ...]:
        """Its convolutions in order: (role, in, out, kernel, input size, output size).

        Roles: `dense` (k > 1), `pointwise`, `depthwise`, `se` (on 1x1 maps), `linear`.
        """
        i, o, m, s, t, k = (
            self.in_channels, self.out_channels, self.mid_channels, self.size, self.out_size, self.kernel)
        squeeze: tuple[tuple[str, int, int, int, int, int], ...] = ()
        if self.se:
            squeeze = (("se", m, self.se_channels, 1, 1, 1), ("se", self.se_channels, m, 1, 1, 1))
        match self.kind:
            case "stem" | "cn":
                return (("dense" if k > 1 else "pointwise", i, o, k, s, t),)
            case "id":
                return (("pointwise", i, o, 1, s, t),)
            case "ds":
                return (("depthwise", i, i, k, s, t), *squeeze, ("pointwise", i, o, 1, t, t))
            case "ir":
                return (("pointwise", i, m, 1, s, s), ("depthwise", m, m, k, s, t), *squeeze,
                        ("pointwise", m, o, 1, t, t))
            case "er":
                return (("dense", i, m, k, s, t), *squeeze, ("pointwise", m, o, 1, t, t))
            case "head":
                conv = (("pointwise", i, o, 1, s, s),) if k else ()
                return (*conv, ("linear", o, self.classes, 1, 1, 1))
        raise ValueError(f"unknown block kind {self.kind!r}")

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image."""
        return sum(
            (n_in if role != "depthwise" else 1) * n_out * kernel * kernel * out * out
            for role, n_in, n_out, kernel, _, out in self.convolutions())

    @property
    def params(self) -> int:
        """Trainable parameters: convolutions, batch norms, biases of squeeze-and-excite and classifier."""
        total = 0
        for role, n_in, n_out, kernel, _, _ in self.convolutions():
            total += (n_in if role != "depthwise" else 1) * n_out * kernel * kernel
            total += n_out if role in ("se", "linear") else 2 * n_out
        return total

    @property
    def activation_elements(self) -> int:
        """Elements read and written by its convolutions: times the element size, the bytes it moves."""
        total = 0
        for _, n_in, n_out, _, size, out in self.convolutions():
            total += n_in * size * size + n_out * out * out
        return total + (2 * self.out_channels * self.out_size**2 if self.skip else 0)
