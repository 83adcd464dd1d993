"""Features: the operators that a network becomes in a runtime, and what each is expected to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from hwnas.space.blocks.block import KINDS, BlockSpec

_WIDTHS = (16, 32, 64)  # channels of a vector register or a matrix tile's row in fp32, bf16 and int8


class Operator(NamedTuple):
    """One convolution or matrix product: equal ones run the same kernel on the same shapes."""

    role: str
    in_channels: int
    out_channels: int
    kernel: int
    size: int
    out_size: int

    @property
    def features(self) -> np.ndarray:
        """Its own physical features, in the order of `features.NAMES`."""
        return _features(self)

    @property
    def coordinates(self) -> np.ndarray:
        """Where it lies among operators of its role: sizes in octaves, kernel, stride, how full its last lanes are."""
        return _coordinates(self)


@lru_cache(maxsize=100_000)
def _features(operator: Operator) -> np.ndarray:
    return operator_features(*operator)


@lru_cache(maxsize=100_000)
def _coordinates(operator: Operator) -> np.ndarray:
    stride = operator.size / operator.out_size if operator.out_size else 1.0
    fill = [2.0 * (-channels % width) / width
            for width in _WIDTHS for channels in (operator.in_channels, operator.out_channels)]
    return np.array([np.log2(operator.in_channels), np.log2(operator.out_channels),
                     np.log2(max(operator.out_size, 1)), operator.kernel / 2, stride, *fill])


@lru_cache(maxsize=100_000)
def operators(block: BlockSpec) -> tuple[Operator, ...]:
    """The operators of a block, in order."""
    return tuple(Operator("stem" if block.rules.reads_image else role, *shape)
                 for role, *shape in block.convolutions())


def usual_place(block: BlockSpec) -> tuple[BlockSpec, str]:
    """The block after the operator role that precedes it in most networks: a pointwise convolution."""
    return block, "" if block.rules.reads_image else "pointwise"


def placed(blocks: Sequence[BlockSpec], before: str = "") -> list[tuple[BlockSpec, str]]:
    """Each block with the role of the operator before it; `before` is that of the first."""
    pairs = []
    for block in blocks:
        pairs.append((block, before))
        before = operators(block)[-1].role
    return pairs


@lru_cache(maxsize=100_000)
def block_family(block: BlockSpec) -> str:
    """Blocks of one family differ in sizes only."""
    return f"{block.kind}/k{block.kernel}/e{block.expansion:g}/se{block.se:g}/{block.skip}/{block.activation}"


@lru_cache(maxsize=100_000)
def block_coordinates(block: BlockSpec) -> np.ndarray:
    """Where a block lies in its family: channels and size in octaves, stride."""
    return np.array([np.log2(block.in_channels), np.log2(block.out_channels), np.log2(block.size), block.stride])


ROLES = ("stem", "dense", "pointwise", "depthwise3", "depthwise5", "se", "linear")
QUANTITIES = ("count", "macs", "macs_pad16", "macs_pad64", "macs_pad64_in", "macs_pad64_out", "weights",
              "read", "written", "rows", "pixels")
EXTRAS = ("skip_count", "skip_elements", "pooled_elements", "swish_elements", "hard_swish_elements")
TOTALS = ("weights_pad16", "activations")  # of the whole network, in millions: what has to fit the caches
_FIRST_KINDS = 7  # kinds of block that there were when the first tables were fitted
# What came later stands at the end: where no fitted network has it, a fit is the same as without it.
LATER = ("gelu_elements", "norm_elements", *(f"{kind}_blocks" for kind in tuple(KINDS)[_FIRST_KINDS:]))
NAMES = (*(f"{role}_{quantity}" for role in ROLES for quantity in QUANTITIES), *EXTRAS,
         *(f"{kind}_blocks" for kind in tuple(KINDS)[:_FIRST_KINDS]), *TOTALS, *LATER)
# Beyond a cache every further byte costs more; which size matters is left to the fit.
CACHE_STEPS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
_INDEX = {name: index for index, name in enumerate(NAMES)}


def _pad(channels: int, width: int) -> int:
    return -(-channels // width) * width


@lru_cache(maxsize=100_000)
def block_features(block: BlockSpec) -> np.ndarray:
    """[len(NAMES)], scaled to the order of 1: MACs in millions, elements and weights in hundred thousands."""
    row = np.zeros(len(NAMES))
    for role, n_in, n_out, kernel, size, out in block.convolutions():
        row += operator_features("stem" if block.rules.reads_image else role, n_in, n_out, kernel, size, out)
        if f"{block.activation}_elements" in _INDEX and role in ("dense", "depthwise", "pointwise"):
            row[_INDEX[f"{block.activation}_elements"]] += n_out * out * out * 1e-5
    if block.skip:
        row[_INDEX["skip_count"]] = 1
        row[_INDEX["skip_elements"]] = block.out_channels * block.out_size**2 * 1e-5
    if block.se:
        row[_INDEX["pooled_elements"]] = block.mid_channels * block.out_size**2 * 1e-5
    row[_INDEX["norm_elements"]] = block.rules.norm_elements(block) * 1e-5
    row[_INDEX[f"{block.kind}_blocks"]] = 1
    row[_INDEX["activations"]] = block.activation_elements * 1e-6
    row.setflags(write=False)
    return row


def operator_features(role: str, n_in: int, n_out: int, kernel: int, size: int, out: int) -> np.ndarray:
    """What one convolution adds to `block_features`: [len(NAMES)]."""
    row = np.zeros(len(NAMES))
    name = ("depthwise3" if kernel <= 3 else "depthwise5") if role == "depthwise" else role
    for quantity, value in _quantities(role == "depthwise", n_in, n_out, kernel, size, out).items():
        row[_INDEX[f"{name}_{quantity}"]] = value
    inputs = 1 if role == "depthwise" else _pad(n_in, 16)
    row[_INDEX["weights_pad16"]] = kernel * kernel * inputs * _pad(n_out, 16) * 1e-6
    return row


def with_cache_steps(features: np.ndarray) -> np.ndarray:
    """Sums of block features [n, len(NAMES)], and how far weights (and activations) pass each cache step."""
    weights = features[:, _INDEX["weights_pad16"]]
    both = weights + features[:, _INDEX["activations"]]
    steps = [np.maximum(total - step, 0.0) for total in (weights, both) for step in CACHE_STEPS]
    return np.column_stack([features, *steps])


def columns_that_count(design: np.ndarray) -> int:
    """Columns of `with_cache_steps` [n, f], without those of LATER that are 0 in all rows."""
    first = len(NAMES) - len(LATER)
    return int(design.shape[1]) - int((~design[:, first : len(NAMES)].any(axis=0)).sum())


def _quantities(depthwise: bool, n_in: int, n_out: int, kernel: int, size: int, out: int) -> dict[str, float]:
    taps = kernel * kernel * out * out * 1e-6

    def macs(pad_in: int, pad_out: int) -> float:
        return taps * _pad(n_out, pad_out) * (1 if depthwise else _pad(n_in, pad_in))

    values = {"count": 1.0, "macs": macs(1, 1), "macs_pad16": macs(16, 16), "macs_pad64": macs(64, 64),
              "weights": (1 if depthwise else n_in) * n_out * kernel * kernel * 1e-5,
              "read": n_in * size * size * 1e-5, "written": n_out * out * out * 1e-5,
              "rows": out * 0.1, "pixels": out * out * 1e-3}
    if not depthwise:
        values |= {"macs_pad64_in": macs(64, 1), "macs_pad64_out": macs(1, 64)}
    return values


RIDGE = 1.0  # shrinkage of each cost, in units of its feature's root mean square
RIDGE_WITH_PRIOR = 2.0  # of the physical costs beside a prior: with less they explain few networks without it
PRIOR_RIDGE = 0.01  # of the prior's cost: what another table says is to be believed


class Prior(Protocol):
    """A model fitted on another table, whose entries a calibration may start from."""

    def block_ms(self, blocks: Sequence[BlockSpec]) -> tuple[np.ndarray, np.ndarray]:
        """Entries of `blocks` there, ms [n], and their standard deviations."""


class Features:
    """What costs are fitted on: sums over blocks, the steps beyond caches, and a prior's entries where there is one."""

    def __init__(self, prior: Prior | None = None) -> None:
        self.prior = prior
        self._known: dict[BlockSpec, np.ndarray] = {}

    @property
    def n_sums(self) -> int:
        """Length of a block's row."""
        return len(NAMES) + (self.prior is not None)

    @property
    def ridge(self) -> np.ndarray:
        """Shrinkage of each column of `design`."""
        n_steps = 2 * len(CACHE_STEPS)
        return np.concatenate([np.full(len(NAMES) + n_steps, RIDGE if self.prior is None else RIDGE_WITH_PRIOR),
                               np.full(self.n_sums - len(NAMES), PRIOR_RIDGE)])

    def of_blocks(self, blocks: Sequence[BlockSpec]) -> np.ndarray:
        """Rows [n, n_sums] that add up over a network's blocks."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._known]
        if new:
            rows = np.array([block_features(block) for block in new])
            if self.prior is not None:
                rows = np.column_stack([rows, self.prior.block_ms(new)[0]])
            self._known.update(zip(new, rows, strict=True))
        return np.array([self._known[block] for block in blocks]).reshape(-1, self.n_sums)

    def of_networks(self, networks: Sequence[Sequence[BlockSpec]]) -> np.ndarray:
        """Sums of each network's rows [n, n_sums]."""
        return np.array([self.of_blocks(blocks).sum(axis=0) for blocks in networks])

    def design(self, sums: np.ndarray) -> np.ndarray:
        """The columns that costs multiply, from sums over blocks."""
        return np.column_stack([with_cache_steps(sums[:, : len(NAMES)]), sums[:, len(NAMES) :]])

    def additive(self, costs: np.ndarray) -> np.ndarray:
        """Costs [n_sums] of what adds up over blocks. The costs of the cache steps belong to whole networks."""
        return np.concatenate([costs[: len(NAMES)], costs[len(NAMES) + 2 * len(CACHE_STEPS) :]])


@dataclass(frozen=True)
class Costs:
    """Cost of each column in ms, and what is needed to say how far a network lies from those fitted."""

    values: np.ndarray
    inverse: np.ndarray

    @classmethod
    def fit(cls, design: np.ndarray, measured_ms: np.ndarray, ridge: np.ndarray) -> Costs:
        """Fit `measured_ms` [n] as `design` [n, f] @ values, values >= 0, least relative squares with a small ridge."""
        from scipy.optimize import nnls

        relative = design / measured_ms[:, None]
        weights = ridge * (np.sqrt((relative**2).mean(axis=0)) + 1e-9)
        # The normal equations give the same minimum as the rows themselves, at a tenth of the time.
        gram = relative.T @ relative + np.diag(weights**2)
        factor = np.linalg.cholesky(gram + 1e-12 * np.trace(gram) * np.eye(len(gram)))
        target = np.linalg.solve(factor, relative.sum(axis=0))
        values, _ = nnls(factor.T, target, maxiter=50 * len(weights))
        active = values > 0
        inverse = np.zeros_like(gram)
        inverse[np.ix_(active, active)] = np.linalg.inv(gram[np.ix_(active, active)])
        return cls(values, inverse)

    def latency_ms(self, design: np.ndarray) -> np.ndarray:
        """[n] for rows of `design`."""
        return np.asarray(np.maximum(design @ self.values, 1e-6))

    def leverage(self, design: np.ndarray, latency_ms: np.ndarray) -> np.ndarray:
        """How much of the fit's variance a row's prediction has [n]: large far from what was fitted."""
        relative = design / latency_ms[:, None]
        return np.asarray(np.einsum("ij,ij->i", relative @ self.inverse, relative))
