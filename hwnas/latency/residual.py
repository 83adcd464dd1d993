"""Residual: what the physical costs leave over, learnt as a Gaussian process over operators, blocks and whole networks.

A network's excess over its costs is a sum. Its operators and blocks each add a share of their own cost. That share has
three parts: like operators are alike in the first, the second is the operator's own, the third depends on the operator
before. Whole networks of like totals have a further part in common.

The part of operators and blocks adds up, so that prediction is a look-up. The posterior means are the entries of the
latency table, though only whole networks were timed. Additive Gaussian processes: Duvenaud et al., NeurIPS 2011.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hwnas.latency.features import block_coordinates, block_family, operators
from hwnas.space.blocks.block import KINDS, BlockSpec

PARTS = ("operators_alike", "operator", "blocks_alike", "block", "operators_after", "networks_alike", "costs", "run",
         "noise")
# Variances of what is alike and of what each has of its own, by level: operators, blocks, operators after another.
LEVELS = ((0, 1), (2, 3), (4, None))
_NETWORKS, COSTS, RUN = 5, 6, 7
START = np.array([1e-2, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4, 4e-4])  # variances where tuning starts
_HOLD = 0.02  # weak pull of the variances (on a log scale) towards START
_LENGTH_OPERATOR, _LENGTH_BLOCK, _LENGTH_NETWORK = 2.0, 1.5, 1.0
_MOST_TUNED = 400  # networks that the variances are chosen on
_ITERATIONS = 40


def alike(left: np.ndarray, right: np.ndarray, length: float) -> np.ndarray:
    """Squared-exponential similarity [n, m] of rows."""
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
    return np.asarray(np.exp(np.maximum(squares, 0) * (-0.5 / length**2)))


def totals(blocks: Sequence[BlockSpec]) -> np.ndarray:
    """What adds up over a network's blocks, and by which whole networks are compared: [len(KINDS) + 5]."""
    row = np.zeros(len(KINDS) + 5)
    for block in blocks:
        row += _totals_of(block)
    return row


@lru_cache(maxsize=100_000)
def _totals_of(block: BlockSpec) -> np.ndarray:
    row = np.zeros(len(KINDS) + 5)
    row[block.rank] = 0.25
    row[-5:] = (0.25, 0.25 * (block.se > 0), block.params, block.macs, block.activation_elements)
    return row


def position(sums: np.ndarray) -> np.ndarray:
    """Where networks lie, from sums of `totals` [n, t]: large totals on a log scale."""
    return np.column_stack([sums[:, :-3], np.log(np.maximum(sums[:, -3:], 1.0))])


@dataclass
class Group:
    """Operators of one role, or blocks of one family, as met in the fitted networks."""

    coordinates: np.ndarray
    index: dict[Hashable, int]
    shares: np.ndarray  # [networks, members]: the member's cost as a share of the network's


@dataclass
class Member:
    """One operator or block: its group, where it lies there, what it costs by itself (ms)."""

    item: Hashable
    group: str
    coordinates: np.ndarray
    cost_ms: float


def members(block: BlockSpec, before: str, block_ms: float, operator_ms: Sequence[float]) -> list[list[Member]]:
    """Members of a block at each level; `before` is the role of the operator that comes before it."""
    levels: list[list[Member]] = [[], [Member(block, block_family(block), block_coordinates(block), block_ms)], []]
    for operator, ms in zip(operators(block), operator_ms, strict=True):
        levels[0].append(Member(operator, operator.role, operator.coordinates, ms))
        levels[2].append(Member((operator, before), f"{operator.role} after {before}", operator.coordinates, ms))
        before = operator.role
    return levels


def group_members(networks: Sequence[Sequence[tuple[Member, float]]]) -> dict[str, Group]:
    """Groups of what networks consist of; each network lists its members with their shares of its cost."""
    groups: dict[str, Group] = {}
    where: dict[str, list[tuple[int, int, float]]] = {}
    coordinates: dict[str, list[np.ndarray]] = {}
    for row, network in enumerate(networks):
        for member, share in network:
            group = groups.get(member.group)
            if group is None:
                group = groups[member.group] = Group(np.empty(0), {}, np.empty(0))
                coordinates[member.group], where[member.group] = [], []
            column = group.index.setdefault(member.item, len(group.index))
            if column == len(coordinates[member.group]):
                coordinates[member.group].append(member.coordinates)
            where[member.group].append((row, column, share))
    for name, group in groups.items():
        group.coordinates = np.array(coordinates[name])
        group.shares = np.zeros((len(networks), len(group.index)))
        rows, columns, shares = zip(*where[name], strict=True)
        np.add.at(group.shares, (np.array(rows), np.array(columns)), np.array(shares))
    return groups


@dataclass
class Residual:
    """A fitted process. `variances` are those of PARTS; `excess` etc. answer for members and networks."""

    variances: np.ndarray
    groups: list[dict[str, Group]]  # by level
    positions: np.ndarray
    runs: np.ndarray  # [networks]
    weights: np.ndarray  # [networks]: K^-1 r
    inverse: np.ndarray  # K^-1

    def excess(self, level: int, group: str, wanted: Sequence[Member]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of the excess of members of one group, as shares of their own cost: [n], [n].

        For a group that was never met the mean is 0 and the variance the prior's.
        """
        near, same = (0.0 if index is None else float(self.variances[index]) for index in LEVELS[level])
        prior = np.full(len(wanted), near + same)
        met = self.groups[level].get(group)
        if met is None:
            return np.zeros(len(wanted)), prior
        kernel = near * alike(np.array([member.coordinates for member in wanted]), met.coordinates, _lengths(level))
        for row, member in enumerate(wanted):
            column = met.index.get(member.item)
            if column is not None:
                kernel[row, column] += same
        joint = kernel @ met.shares.T
        known = np.einsum("ij,ij->i", joint @ self.inverse, joint)
        return joint @ self.weights, np.maximum(prior - known, 0.0)

    def common(self, positions: np.ndarray) -> np.ndarray:
        """Mean excess that whole networks have in common with those fitted near `positions` [n, p]."""
        here, there = positions.astype(np.float32), self.positions.astype(np.float32)
        kernel = alike(here, there, _LENGTH_NETWORK)
        return np.asarray(self.variances[_NETWORKS] * (kernel @ self.weights.astype(np.float32)), float)


    def of_runs(self, runs: np.ndarray) -> np.ndarray:
        """Mean excess of runs (waves) that fitted networks were measured in; 0 for others [n]."""
        paces = centre_runs(self.runs, self.runs).T @ self.weights
        return np.asarray(self.variances[RUN] * (centre_runs(runs, self.runs) @ paces))


def _lengths(level: int) -> float:
    return (_LENGTH_OPERATOR, _LENGTH_BLOCK, _LENGTH_OPERATOR)[level]


def kernels(groups: list[dict[str, Group]], positions: np.ndarray, costs: np.ndarray,
            runs: np.ndarray) -> list[np.ndarray]:
    """Covariance of the networks' excess for each part but the noise, at variance 1: [n, n] each."""
    n = len(positions)
    terms = []
    for level, level_groups in enumerate(groups):
        near, same = np.zeros((n, n)), np.zeros((n, n))
        for group in level_groups.values():
            near += group.shares @ alike(group.coordinates, group.coordinates, _lengths(level)) @ group.shares.T
            same += group.shares @ group.shares.T
        terms += [near, same][: 2 if LEVELS[level][1] is not None else 1]
    terms.append(alike(positions, positions, _LENGTH_NETWORK))
    terms.append(costs @ costs.T)
    terms.append(centre_runs(runs, runs) @ centre_runs(runs, runs).T)
    return terms


def centre_runs(runs: np.ndarray, fitted_runs: np.ndarray) -> np.ndarray:
    """[n, different runs]: 1 in the column of its run, less that run's share of the fitted networks.

    The columns are centred so that what all runs have in common stays with the networks, where predictions look for it.
    """
    known = np.unique(fitted_runs)
    share = (fitted_runs[:, None] == known).mean(axis=0)
    member = runs[:, None] == known
    return np.where(member.any(axis=1, keepdims=True), member - share, 0.0)


def tune_variances(parts: Sequence[np.ndarray], excess: np.ndarray, seed: int = 0) -> np.ndarray:
    """The parts' variances of largest marginal likelihood (on a sample of the networks where there are many)."""
    from scipy.optimize import minimize

    if len(excess) > _MOST_TUNED:
        kept = np.sort(np.random.default_rng(seed).permutation(len(excess))[:_MOST_TUNED])
        parts, excess = [part[np.ix_(kept, kept)] for part in parts], excess[kept]
    start = np.log(START)
    result = minimize(_loss, start, args=(parts, excess), jac=True, method="L-BFGS-B",
                      bounds=[(low - 9, low + 6) for low in start], options={"maxiter": _ITERATIONS})
    return np.asarray(np.exp(result.x))


def _loss(logs: np.ndarray, parts: Sequence[np.ndarray], excess: np.ndarray) -> tuple[float, np.ndarray]:
    """Negative log marginal likelihood with its gradient in the log variances (Rasmussen & Williams, 5.9)."""
    values = np.exp(logs)
    inverse, log_det = _inverse(covariance(values, parts))
    weights = inverse @ excess
    slope = np.outer(weights, weights) - inverse
    gradient = [-0.5 * value * float(np.vdot(slope, part)) for value, part in zip(values, parts, strict=False)]
    gradient.append(-0.5 * values[-1] * float(np.trace(slope)))
    away = logs - np.log(START)
    return (0.5 * float(excess @ weights) + 0.5 * log_det + _HOLD * float(away @ away),
            np.array(gradient) + 2 * _HOLD * away)


def covariance(variances: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Covariance of the measured networks' excess, noise included."""
    total = sum(value * part for value, part in zip(variances, parts, strict=False))
    return np.asarray(total + variances[-1] * np.eye(len(parts[0])))


def _inverse(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    from scipy.linalg import cho_factor, cho_solve

    factor = cho_factor(matrix, lower=True)
    return np.asarray(cho_solve(factor, np.eye(len(matrix)))), 2 * float(np.log(np.diag(factor[0])).sum())


def fitted(groups: list[dict[str, Group]], positions: np.ndarray, runs: np.ndarray, parts: Sequence[np.ndarray],
           excess: np.ndarray, variances: np.ndarray) -> Residual:
    """The process given the networks' measured excess [n]."""
    inverse, _ = _inverse(covariance(variances, parts))
    return Residual(variances, groups, positions, runs, inverse @ excess, inverse)
