"""Costs: latency as a sum of physical costs, none of which can be negative, fitted on whole networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hwnas.latency.features import CACHE_STEPS, NAMES, block_features, with_cache_steps
from hwnas.space.blocks import BlockSpec

RIDGE = 1.0  # shrinkage of each cost, in units of its feature's root mean square
RIDGE_WITH_PRIOR = 2.0  # of the physical costs beside a prior: else so many explain few networks without it
PRIOR_RIDGE = 0.01  # of the cost that multiplies what another table says: that one is to be believed


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
        """The costs of what adds up over blocks [n_sums]; those of the cache steps are the network's own."""
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
