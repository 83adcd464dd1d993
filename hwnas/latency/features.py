"""Features: the operators that a network becomes in a runtime, their expected costs, and the residual.

The residual is the time that the physical costs do not explain. It is learnt as a Gaussian process over operators,
blocks and whole networks. A network's excess over its costs is a sum: each operator and each block adds a share of its
own cost. The share of an operator has three parts. Like operators are alike in the first, the second is the operator's
own, and the third depends on the operator before. Whole networks of like totals have a further part in common.

The parts of operators and blocks add up, so a prediction is a look-up. The posterior means are the entries of the
latency table, although only whole networks were timed. Additive Gaussian processes: Duvenaud et al., NeurIPS 2011.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from hwnas.lazy import scipy
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


@lru_cache(maxsize=100_000)
def operator_coordinates(operator: Operator) -> np.ndarray:
    """Return its coordinates among operators of its role: sizes in octaves, kernel, stride, empty parts of lanes."""
    stride = operator.size / operator.out_size if operator.out_size else 1.0
    fill = [2.0 * (-channels % width) / width
            for width in _WIDTHS for channels in (operator.in_channels, operator.out_channels)]
    return np.array([np.log2(operator.in_channels), np.log2(operator.out_channels),
                     np.log2(max(operator.out_size, 1)), operator.kernel / 2, stride, *fill])


@lru_cache(maxsize=100_000)
def operators(block: BlockSpec) -> tuple[Operator, ...]:
    """Return the operators of a block, in order."""
    return tuple(Operator("stem" if block.rules.reads_image else role, *shape)
                 for role, *shape in block.convolutions())


def usual_place(block: BlockSpec) -> tuple[BlockSpec, str]:
    """Return the block with the role of the operator before it in most networks: pointwise, or none for a stem."""
    return block, "" if block.rules.reads_image else "pointwise"


def placed(blocks: Sequence[BlockSpec], before: str = "") -> list[tuple[BlockSpec, str]]:
    """Return each block with the role of the operator before it; `before` is the role before the first block."""
    pairs = []
    for block in blocks:
        pairs.append((block, before))
        before = operators(block)[-1].role
    return pairs


ROLES = ("stem", "dense", "pointwise", "depthwise3", "depthwise5", "se", "linear")
QUANTITIES = ("count", "macs", "macs_pad16", "macs_pad64", "macs_pad64_in", "macs_pad64_out", "weights",
              "read", "written", "rows", "pixels")
EXTRAS = ("skip_count", "skip_elements", "pooled_elements", "swish_elements", "hard_swish_elements")
TOTALS = ("weights_pad16", "activations")  # of the whole network, in millions: they have to fit the caches
_FIRST_KINDS = 7  # kinds of block that existed when the first tables were fitted
# Later features are at the end: if no fitted network has them, a fit is the same as without them.
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
    """Return a row [len(NAMES)] of the order of 1: MACs in millions, elements and weights in hundred thousands."""
    row = np.zeros(len(NAMES))
    for operator in operators(block):
        row += operator_features(operator)
        if f"{block.activation}_elements" in _INDEX and operator.role in ("stem", "dense", "depthwise", "pointwise"):
            row[_INDEX[f"{block.activation}_elements"]] += operator.out_channels * operator.out_size**2 * 1e-5
    if block.skip:
        row[_INDEX["skip_count"]] = 1
        row[_INDEX["skip_elements"]] = block.out_channels * block.out_size**2 * 1e-5
    for before, operator in pairwise(operators(block)):
        if operator.role == "se" and before.role != "se":  # it reads the mean of the map before it
            row[_INDEX["pooled_elements"]] += before.out_channels * before.out_size**2 * 1e-5
    row[_INDEX["norm_elements"]] = block.rules.norm_elements(block) * 1e-5
    row[_INDEX[f"{block.kind}_blocks"]] = 1
    row[_INDEX["activations"]] = block.activation_elements * 1e-6
    row.setflags(write=False)
    return row


@lru_cache(maxsize=100_000)
def operator_features(operator: Operator) -> np.ndarray:
    """Return what one operator adds to `block_features`: [len(NAMES)]."""
    role, n_in, n_out, kernel, size, out = operator
    depthwise, taps = role == "depthwise", kernel * kernel * out * out * 1e-6
    # Side of the part of the kernel that ever meets the map and not only its padding: no other weights are read.
    reach = min(kernel, size + (out - 1) * round(size / out))

    def macs(pad_in: int, pad_out: int) -> float:
        return taps * _pad(n_out, pad_out) * (1 if depthwise else _pad(n_in, pad_in))

    values = {"count": 1.0, "macs": macs(1, 1), "macs_pad16": macs(16, 16), "macs_pad64": macs(64, 64),
              "weights": (1 if depthwise else n_in) * n_out * reach**2 * 1e-5,
              "read": n_in * size * size * 1e-5, "written": n_out * out * out * 1e-5,
              "rows": out * 0.1, "pixels": out * out * 1e-3}
    if not depthwise:
        values |= {"macs_pad64_in": macs(64, 1), "macs_pad64_out": macs(1, 64)}
    row = np.zeros(len(NAMES))
    name = ("depthwise3" if kernel <= 3 else "depthwise5") if depthwise else role
    for quantity, value in values.items():
        row[_INDEX[f"{name}_{quantity}"]] = value
    row[_INDEX["weights_pad16"]] = reach**2 * (1 if depthwise else _pad(n_in, 16)) * _pad(n_out, 16) * 1e-6
    return row


RIDGE = 1.0  # shrinkage of each cost, in units of its feature's root mean square
# Beside a prior physical costs add little: on few networks they would explain what the prior's entries explain better.
RIDGE_WITH_PRIOR = 50.0
PRIOR_RIDGE = 0.3  # for each table's entries in a prior: tables with nearly the same entries get like shares


class Prior(Protocol):
    """Models fitted on other tables, whose entries a calibration may start from."""

    names: tuple[str, ...]

    def block_ms(self, blocks: Sequence[BlockSpec]) -> np.ndarray:
        """Return the entries of `blocks` in each table, ms [n, names]."""


class Features:
    """The columns that costs are fitted on: sums over blocks, steps beyond caches, and entries of a prior, if any."""

    def __init__(self, prior: Prior | None = None) -> None:
        self.prior = prior
        self.n_tables = 0 if prior is None else len(prior.names)
        self.n_sums = len(NAMES) + self.n_tables  # length of a block's row

    @property
    def ridge(self) -> np.ndarray:
        """Shrinkage of each column of `design`."""
        n_steps = 2 * len(CACHE_STEPS)
        return np.concatenate([np.full(len(NAMES) + n_steps, RIDGE if self.prior is None else RIDGE_WITH_PRIOR),
                               np.full(self.n_tables, PRIOR_RIDGE)])

    def of_blocks(self, blocks: Sequence[BlockSpec]) -> np.ndarray:
        """Return the rows [n, n_sums] that add up over a network's blocks."""
        rows = np.array([block_features(block) for block in blocks]).reshape(-1, len(NAMES))
        return rows if self.prior is None else np.column_stack([rows, self.prior.block_ms(blocks)])

    def of_networks(self, networks: Sequence[Sequence[BlockSpec]]) -> np.ndarray:
        """Return the sums of each network's rows [n, n_sums]."""
        return np.array([self.of_blocks(blocks).sum(axis=0) for blocks in networks])

    def design(self, sums: np.ndarray) -> np.ndarray:
        """Return the columns that costs multiply, from sums over blocks [n, n_sums]: features, how far weights (and
        weights with activations) are above each cache step, and a prior's entries."""
        weights = sums[:, _INDEX["weights_pad16"]]
        both = weights + sums[:, _INDEX["activations"]]
        steps = [np.maximum(total - step, 0.0) for total in (weights, both) for step in CACHE_STEPS]
        return np.column_stack([sums[:, : len(NAMES)], *steps, sums[:, len(NAMES) :]])

    def additive(self, costs: np.ndarray) -> np.ndarray:
        """Return the costs [n_sums] that add up over blocks, without the cache steps, which are of whole networks."""
        return np.concatenate([costs[: len(NAMES)], costs[len(NAMES) + 2 * len(CACHE_STEPS) :]])


@dataclass(frozen=True)
class Costs:
    """The cost of each of f columns in ms [f], and the inverse [f, f] that gives the leverage of a prediction."""

    values: np.ndarray
    inverse: np.ndarray

    @classmethod
    def fit(cls, design: np.ndarray, measured_ms: np.ndarray, ridge: np.ndarray) -> Costs:
        """Fit `measured_ms` [n] as `design` [n, f] @ values, values >= 0, by least relative squares with a ridge."""
        relative = design / measured_ms[:, None]
        weights = ridge * (np.sqrt((relative**2).mean(axis=0)) + 1e-9)
        # The normal equations give the same minimum as the rows themselves, at a tenth of the time.
        gram = relative.T @ relative + np.diag(weights**2)
        factor = np.linalg.cholesky(gram + 1e-12 * np.trace(gram) * np.eye(len(gram)))
        target = np.linalg.solve(factor, relative.sum(axis=0))
        values, _ = scipy.optimize.nnls(factor.T, target, maxiter=50 * len(weights))
        active = values > 0
        inverse = np.zeros_like(gram)
        inverse[np.ix_(active, active)] = np.linalg.inv(gram[np.ix_(active, active)])
        return cls(values, inverse)

    def latency_ms(self, design: np.ndarray) -> np.ndarray:
        """Return latencies in ms [n] for the rows of `design`."""
        return np.asarray(np.maximum(design @ self.values, 1e-6))


PARTS = ("operators_alike", "operator", "blocks_alike", "block", "operators_after", "networks_alike", "costs", "run",
         "noise")
# Indices in PARTS, by level: the part that like members share, and each one's own (the last level has no own part).
LEVELS = ((0, 1), (2, 3), (4, None))
_NETWORKS, COSTS, RUN = 5, 6, 7
START = np.array([1e-2, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4, 4e-4])  # variances from which tuning starts
# The difference of two hosts in the same runtime and precision: about the geometric mean over pairs of shipped tables.
# For other tables it is a guess, from which tuning may move away.
START_WITH_PRIOR = np.array([1.2e-2, 3e-4, 3e-4, 3e-4, 1.2e-2, 2e-4, 6e-3, 5e-5, 1e-4])
HOLD = 0.02  # weak pull of the variances (on a log scale) towards START
HOLD_WITH_PRIOR = 5.0  # a strong pull: few networks say little about variances
_LENGTHS, _LENGTH_NETWORK = (2.0, 1.5, 2.0), 1.0  # length scales of likeness: by level; of networks
_MOST_TUNED = 400  # networks on which the variances are tuned
_ITERATIONS = 40


def alike(left: np.ndarray, right: np.ndarray, length: float) -> np.ndarray:
    """Return the squared-exponential similarity [n, m] of the rows of `left` [n, d] and `right` [m, d]."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.asarray(np.exp(np.maximum(squares, 0) * (-0.5 / length**2)))


def totals(blocks: Sequence[BlockSpec]) -> np.ndarray:
    """Return the sums over a network's blocks by which whole networks are compared: [len(KINDS) + 5]."""
    return np.asarray(sum(map(_totals_of, blocks), np.zeros(len(KINDS) + 5)))


@lru_cache(maxsize=100_000)
def _totals_of(block: BlockSpec) -> np.ndarray:
    row = np.zeros(len(KINDS) + 5)
    row[block.rank] = 0.25
    row[-5:] = (0.25, 0.25 * (block.se > 0), block.params, block.macs, block.activation_elements)
    return row


def position(sums: np.ndarray) -> np.ndarray:
    """Return the positions [n, t] of networks from their `totals` [n, t]: parameters, MACs and activations as logs."""
    return np.column_stack([sums[:, :-3], np.log(np.maximum(sums[:, -3:], 1.0))])


@dataclass
class Group:
    """Operators of one role, or blocks of one family, that occur in the fitted networks."""

    coordinates: np.ndarray  # [members, d]
    index: dict[Hashable, int]  # row of each member
    shares: np.ndarray  # [networks, members]: the member's cost as a share of the network's


@dataclass
class GroupMember:
    """One operator or block: its group, its coordinates there, and its own cost in ms."""

    item: Hashable
    group: str
    coordinates: np.ndarray
    cost_ms: float


def members(block: BlockSpec, before: str, block_ms: float, operator_ms: Sequence[float]) -> list[list[GroupMember]]:
    """Return the members of a block at each level; `before` is the role of the operator before the block."""
    # Blocks of one family differ in sizes only: channels and size in octaves, and stride.
    family = f"{block.kind}/k{block.kernel}/e{block.expansion:g}/se{block.se:g}/{block.skip}/{block.activation}"
    sizes = [np.log2(block.in_channels), np.log2(block.out_channels), np.log2(block.size), block.stride]
    levels: list[list[GroupMember]] = [[], [GroupMember(block, family, np.array(sizes), block_ms)], []]
    for operator, ms in zip(operators(block), operator_ms, strict=True):
        coordinates = operator_coordinates(operator)
        levels[0].append(GroupMember(operator, operator.role, coordinates, ms))
        levels[2].append(GroupMember((operator, before), f"{operator.role} after {before}", coordinates, ms))
        before = operator.role
    return levels


def group_members(networks: Sequence[Sequence[tuple[GroupMember, float]]]) -> dict[str, Group]:
    """Group the members of networks by their groups' names. A network lists members with their shares of its cost."""
    coordinates: dict[str, dict[Hashable, np.ndarray]] = {}
    for network in networks:
        for member, _ in network:
            coordinates.setdefault(member.group, {}).setdefault(member.item, member.coordinates)
    groups = {name: Group(np.array([*items.values()]), {item: column for column, item in enumerate(items)},
                          np.zeros((len(networks), len(items)))) for name, items in coordinates.items()}
    for row, network in enumerate(networks):
        for member, share in network:
            group = groups[member.group]
            group.shares[row, group.index[member.item]] += share
    return groups


@dataclass
class Residual:
    """A fitted Gaussian process with `variances` of PARTS. K is the covariance of the fitted networks, noise included,
    and r their excess over their costs."""

    variances: np.ndarray
    groups: list[dict[str, Group]]  # by level
    positions: np.ndarray
    runs: np.ndarray  # [networks]
    weights: np.ndarray  # [networks]: K^-1 r
    inverse: np.ndarray  # K^-1

    def excess(self, level: int, group: str, wanted: Sequence[GroupMember]) -> tuple[np.ndarray, np.ndarray]:
        """Return mean [n] and variance [n] of the excess of `wanted` members of one group, as shares of their own cost.

        For a group that is in no fitted network the mean is 0 and the variance the prior's.
        """
        near, same = (0.0 if index is None else float(self.variances[index]) for index in LEVELS[level])
        prior = np.full(len(wanted), near + same)
        fitted = self.groups[level].get(group)
        if fitted is None:
            return np.zeros(len(wanted)), prior
        # Covariance of the wanted members with fitted members, then with fitted networks by their shares.
        kernel = near * alike(np.array([member.coordinates for member in wanted]), fitted.coordinates, _LENGTHS[level])
        for row, member in enumerate(wanted):
            column = fitted.index.get(member.item)
            if column is not None:
                kernel[row, column] += same
        joint = kernel @ fitted.shares.T
        explained = np.einsum("ij,ij->i", joint @ self.inverse, joint)
        return joint @ self.weights, np.maximum(prior - explained, 0.0)

    def common(self, positions: np.ndarray) -> np.ndarray:
        """Return the mean excess [n] that networks at `positions` [n, p] share with like fitted networks."""
        here, there = positions.astype(np.float32), self.positions.astype(np.float32)
        kernel = alike(here, there, _LENGTH_NETWORK)
        return np.asarray(self.variances[_NETWORKS] * (kernel @ self.weights.astype(np.float32)), float)

    def of_runs(self, runs: np.ndarray) -> np.ndarray:
        """Return the mean excess [n] of each run (wave) of `runs` [n]; 0 for a run without fitted networks."""
        paces = centre_runs(self.runs, self.runs).T @ self.weights
        return np.asarray(self.variances[RUN] * (centre_runs(runs, self.runs) @ paces))


def kernels(groups: list[dict[str, Group]], positions: np.ndarray, costs: np.ndarray,
            runs: np.ndarray) -> list[np.ndarray]:
    """Return the covariance [n, n] of the networks' excess for each part but the noise, at variance 1."""
    n = len(positions)
    terms = []
    for level, level_groups in enumerate(groups):
        near, same = np.zeros((n, n)), np.zeros((n, n))
        for group in level_groups.values():
            near += group.shares @ alike(group.coordinates, group.coordinates, _LENGTHS[level]) @ group.shares.T
            same += group.shares @ group.shares.T
        terms += [near, same][: 2 if LEVELS[level][1] is not None else 1]
    terms.append(alike(positions, positions, _LENGTH_NETWORK))
    terms.append(costs @ costs.T)
    terms.append(centre_runs(runs, runs) @ centre_runs(runs, runs).T)
    return terms


def centre_runs(runs: np.ndarray, fitted_runs: np.ndarray) -> np.ndarray:
    """Return [n, different fitted runs]: 1 in the column of a network's run, less that run's share of fitted networks.

    A network of another run has 0 in all columns. They are centred so that an excess of all runs is learnt by the other
    parts, which predictions of new networks use.
    """
    columns = np.unique(fitted_runs)
    share = (fitted_runs[:, None] == columns).mean(axis=0)
    member = runs[:, None] == columns
    return np.where(member.any(axis=1, keepdims=True), member - share, 0.0)


def tune_variances(parts: Sequence[np.ndarray], excess: np.ndarray, start: np.ndarray = START, hold: float = HOLD
                   ) -> np.ndarray:
    """Return the parts' variances of the largest marginal likelihood; of many networks a sample is used.

    `hold` pulls their logarithms towards the logarithms of `start`."""
    if len(excess) > _MOST_TUNED:
        sampled = np.sort(np.random.default_rng(0).permutation(len(excess))[:_MOST_TUNED])
        parts, excess = [part[np.ix_(sampled, sampled)] for part in parts], excess[sampled]
    logs = np.log(start)
    result = scipy.optimize.minimize(_loss, logs, args=(parts, excess, logs, hold), jac=True, method="L-BFGS-B",
                                     bounds=[(low - 9, low + 6) for low in logs], options={"maxiter": _ITERATIONS})
    return np.asarray(np.exp(result.x))


def _loss(logs: np.ndarray, parts: Sequence[np.ndarray], excess: np.ndarray, start: np.ndarray, hold: float
          ) -> tuple[float, np.ndarray]:
    """Return the negative log marginal likelihood (Rasmussen & Williams, 5.9) with the pull of `hold`; its gradient."""
    values = np.exp(logs)
    inverse, log_det = invert(covariance(values, parts))
    weights = inverse @ excess
    slope = np.outer(weights, weights) - inverse
    gradient = [-0.5 * value * float(np.vdot(slope, part)) for value, part in zip(values, parts, strict=False)]
    gradient.append(-0.5 * values[-1] * float(np.trace(slope)))
    away = logs - start
    return (0.5 * float(excess @ weights) + 0.5 * log_det + hold * float(away @ away),
            np.array(gradient) + 2 * hold * away)


def covariance(variances: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the covariance of the measured networks' excess, with the noise."""
    total = sum(value * part for value, part in zip(variances, parts, strict=False))
    return np.asarray(total + variances[-1] * np.eye(len(parts[0])))


def invert(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the inverse of a covariance and the logarithm of its determinant."""
    factor = scipy.linalg.cho_factor(matrix, lower=True)
    return np.asarray(scipy.linalg.cho_solve(factor, np.eye(len(matrix)))), 2 * float(np.log(np.diag(factor[0])).sum())

