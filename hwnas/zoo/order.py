"""The order in which networks are timed: the pairs that may add most to the front are next.

A pair is a network in a deployment. Its published top-1 is known. A Gaussian process predicts its log latency from
known facts of the network and from all timed pairs. The gain of a pair is the hypervolume of top-1 and log latency that
it is expected to add, as in the sampler (`hwnas.samplers.model`). Speed is learnt here, and top-1 is the known cost.
The variances of the process suit the latencies in PyTorch that timm publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hwnas.lazy import scipy
from hwnas.samplers.model import PLACES, Front
from hwnas.space.search_space import spread

Array = NDArray[np.float64]
Places = NDArray[np.intp]
# Variances of log latencies: linear in the features, overall and by deployment; smooth in them; by family; by family in
# a deployment; by network; of a measurement. LENGTH: distance at which features differ, in standard deviations.
LINEAR, DEPLOYMENT, SMOOTH, FAMILY, BOTH, NETWORK, NOISE, LENGTH = 9.0, 0.3, 0.08, 0.06, 0.02, 0.02, 0.005, 1.5
BESIDE = 0.5  # cost of a pair whose network is in the wave already, because it is exported once
ENOUGH = 2e-5  # share of the hypervolume that a wave's best pair must be expected to add
MOST_LOOKED_AT = 300  # pairs of highest gain, from which a wave is chosen


@dataclass(frozen=True)
class CandidatePairs:
    """All pairs of network and deployment; arrays [n].

    Attributes:
        top1: Published, in per cent.
        features: Logarithms [n, k] of known facts of the network, first of all its MACs.
        family, network, deployment: Whole numbers that name them.
        front: Whole numbers; only pairs with the same number compete.
    """

    top1: Array
    features: Array
    family: Places
    network: Places
    deployment: Places
    front: Places

    @cached_property
    def scaled(self) -> Array:
        """Features with mean 0 and standard deviation 1."""
        scaled: Array = (self.features - self.features.mean(0)) / np.maximum(self.features.std(0), 1e-9)
        return scaled

    def covariance(self, left: Places, right: Places) -> Array:
        """Return the covariances [left, right] of log latencies, without the noise of measurements."""
        x, y = self.scaled[left], self.scaled[right]
        inner = x @ y.T
        line, squares = 1 + inner / x.shape[1], (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * inner
        family, network, deployment = (np.equal.outer(of[left], of[right]) for of in (
            self.family, self.network, self.deployment))
        covariance: Array = (LINEAR * line + SMOOTH * np.exp(-0.5 * squares / LENGTH**2) + FAMILY * family
                             + NETWORK * network + deployment * (DEPLOYMENT * line + BOTH * family))
        return covariance

    def predict(self, timed: Places, log_ms: Array, at: Places) -> tuple[Array, Array]:
        """Return means and standard deviations of log latencies of the pairs `at`, with the noise of measurements."""
        # The posterior of a Gaussian process; `own` is each pair's variance before any is timed.
        factor = scipy.linalg.cholesky(self.covariance(timed, timed) + NOISE * np.eye(len(timed)), lower=True)
        half = scipy.linalg.solve_triangular(factor, self.covariance(timed, at), lower=True)
        mean = float(log_ms.mean())
        own = (LINEAR + DEPLOYMENT) * (1 + (self.scaled[at]**2).mean(1)) + SMOOTH + FAMILY + BOTH + NETWORK + NOISE
        return (mean + half.T @ scipy.linalg.solve_triangular(factor, log_ms - mean, lower=True),
                np.sqrt(np.maximum(own - (half**2).sum(0), NOISE)))


def choose_opening(pairs: CandidatePairs, waiting: Places, n: int) -> list[int]:
    """Choose `n` networks to start with, from the pairs `waiting`. Their MACs are spread, and each has the highest
    top-1 of the networks that cost about as much."""
    networks, first = np.unique(pairs.network[waiting], return_index=True)
    top1 = pairs.top1[waiting[first]]
    return spread(pairs.features[waiting[first], 0], min(n, len(networks)) or 1,
                  lambda part: int(networks[part[np.argmax(top1[part])]]) if len(part) else None)


def choose_wave(pairs: CandidatePairs, timed: Places, log_ms: Array, waiting: Places, n: int,
                cap_ms: float | None = None) -> Sequence[int]:
    """Choose the pairs to time next, at most `n`; none if no pair is expected to add much.

    Each chosen pair counts as timed, at its predicted latency, when the next one is chosen.

    Args:
        pairs: All pairs.
        timed: Pairs with a latency; at least one.
        log_ms: Their log latencies.
        waiting: Pairs that may be timed.
        cap_ms: Slower pairs have no gain.
    """
    first, least, slowest, lowest = len(timed), 0.0, 0.0, float(pairs.top1.min()) - 1.0
    while len(waiting) and len(timed) < first + n:
        mean, std = pairs.predict(timed, log_ms, waiting)
        if len(timed) == first:
            # The corner that hypervolume is measured from, and the least gain that is worth a wave.
            slowest = float(np.log(cap_ms) if cap_ms else max(log_ms.max(), mean.max()))
            least = ENOUGH * (slowest - float(min(log_ms.min(), mean.min()))) * (float(pairs.top1.max()) - lowest)
        # Front minimises costs and maximises values, so top-1 is a negated cost and speed is the value.
        gains, values = np.zeros(len(waiting)), std[:, None] * PLACES - mean[:, None]
        for front in np.unique(pairs.front[waiting]):
            own, reached = pairs.front[waiting] == front, pairs.front[timed] == front
            gains[own] = Front(-log_ms[reached], -pairs.top1[timed[reached], None], -slowest, np.array([-lowest])
                               ).expected_gain(-pairs.top1[waiting[own], None], values[own])
        beside = np.isin(pairs.network[waiting], pairs.network[timed[first:]])
        best = int(np.argmax(gains / np.where(beside, BESIDE, 1.0)))
        if gains[best] <= max(least, 0.0):
            break
        timed, log_ms = np.append(timed, waiting[best]), np.append(log_ms, mean[best])
        # To save time, only the most promising pairs are looked at again.
        waiting = np.delete(waiting, best)[np.argsort(-np.delete(gains, best), kind="stable")][:MOST_LOOKED_AT]
    return [int(each) for each in timed[first:]]
