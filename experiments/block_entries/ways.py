"""Three ways from measurements to whole networks: profiled blocks summed, added to the fit, or left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hwnas.latency import model as fitting
from hwnas.latency.features import COSTS, NAMES, RIDGE, Costs, block_features, fitted, kernels, position, totals
from hwnas.latency.model import Fit, Timed
from hwnas.latency.table import TimedNetwork
from hwnas.space.blocks.block import BlockSpec

_LEAST_MS = 1e-4  # clocks of profilers count whole microseconds: a block of 0 is not to be divided by


@dataclass(frozen=True)
class Profiled:
    """A network's blocks with what each took inside it (ms, scaled to its unprofiled wall time)."""

    blocks: Sequence[BlockSpec]
    block_ms: np.ndarray
    other_ms: float

    @classmethod
    def of(cls, network: TimedNetwork, quiet_ms: float) -> Profiled:
        """At the speed at which the reference takes `quiet_ms`, as whole networks are fitted."""
        speed = quiet_ms / network.measurement.quiet_ms
        return cls(network.architecture.blocks(), np.maximum(np.array(network.block_ms) * speed, _LEAST_MS),
                   network.other_ms * speed)

    @property
    def total_ms(self) -> float:
        """The whole network."""
        return float(self.block_ms.sum() + self.other_ms)


def profile_sums(profiled: Sequence[Profiled], timed: Timed, wanted: Sequence[Sequence[BlockSpec]],
                 ) -> tuple[np.ndarray, np.ndarray]:
    """Sums of mean entries (features for blocks never profiled) and the mean time that no block owns.

    Second: the same on a log-log line fitted on the whole networks of `timed`.
    """
    times: dict[BlockSpec, list[float]] = {}
    for one in profiled:
        for block, ms in zip(one.blocks, one.block_ms, strict=True):
            times.setdefault(block, []).append(float(ms))
    entries = {block: float(np.mean(some)) for block, some in times.items()}
    features = np.array([block_features(block) for block in entries])
    costs = Costs.fit(features, np.array(list(entries.values())), np.full(len(NAMES), RIDGE))
    other = float(np.mean([one.other_ms for one in profiled]))

    def sums(networks: Sequence[Sequence[BlockSpec]]) -> np.ndarray:
        for block in {block for blocks in networks for block in blocks if block not in entries}:
            entries[block] = float(costs.latency_ms(block_features(block)[None, :])[0])
        return np.array([sum(entries[block] for block in blocks) + other for blocks in networks])

    slope, start = np.polyfit(np.log(sums(timed.blocks)), np.log(timed.measured_ms), 1)
    plain = sums(wanted)
    return plain, np.exp(start + slope * np.log(plain))


def whole_networks(timed: Timed, variances: np.ndarray, wanted: Sequence[Sequence[BlockSpec]]) -> np.ndarray:
    """As hwnas does."""
    return Fit.of(timed, None, variances).networks(wanted)[0]


def with_profiles(profiled: Sequence[Profiled], timed: Timed, variances: np.ndarray, weight: float,
                  wanted: Sequence[Sequence[BlockSpec]]) -> np.ndarray:
    """Costs and residual fitted on whole networks and on blocks as networks of one, each with `weight`.

    A weight below 1 divides the squared error of the costs, and multiplies the residual's noise.
    """
    times: dict[BlockSpec, list[float]] = {}
    for one in profiled:
        for block, ms in zip(one.blocks, one.block_ms, strict=True):
            times.setdefault(block, []).append(float(ms))
    every = Timed([*timed.blocks, *((block,) for block in times)],
                  np.concatenate([timed.measured_ms, [np.mean(some) for some in times.values()]]),
                  np.concatenate([timed.runs, np.full(len(times), timed.runs.mean())]))
    weights = np.concatenate([np.ones(len(timed.measured_ms)), np.full(len(times), weight)])
    return _weighted(every, weights, variances).networks(wanted)[0]


def _weighted(timed: Timed, weights: np.ndarray, variances: np.ndarray) -> Fit:
    """`Fit.of` with a weight for each network."""
    features = fitting.Features()
    design = features.design(features.of_networks(timed.blocks))
    root = np.sqrt(weights)
    # A row of weight w is one whose relative error counts sqrt(w): nnls sees rows times that and a target of the same.
    costs = _weighted_costs(design, timed.measured_ms, root, features.ridge)
    base = costs.latency_ms(design)
    shares = fitting._Shares(features, costs).of(timed.blocks, base)
    positions = position(np.array([totals(blocks) for blocks in timed.blocks]))
    scale = np.sqrt(((design / base[:, None]) ** 2).mean(axis=0)) + 1e-9
    linear = design / base[:, None] / scale / np.sqrt(design.shape[1])
    parts = kernels(shares, positions, linear, timed.runs)
    noise = np.diag(1 / weights - 1)  # beside the noise that every network has
    residual = fitted(shares, positions, timed.runs, [*parts, noise], timed.measured_ms / base - 1,
                      np.concatenate([variances[:-1], variances[-1:], variances[-1:]]))
    residual.variances = variances
    correction = variances[COSTS] * (linear.T @ residual.weights) / scale / np.sqrt(design.shape[1])
    return Fit(features, costs, costs.values + correction, residual)


def _weighted_costs(design: np.ndarray, measured_ms: np.ndarray, root: np.ndarray, ridge: np.ndarray) -> Costs:
    from scipy.optimize import nnls

    relative = design / measured_ms[:, None] * root[:, None]
    shrink = ridge * (np.sqrt((relative**2).mean(axis=0)) + 1e-9)
    gram = relative.T @ relative + np.diag(shrink**2)
    factor = np.linalg.cholesky(gram + 1e-12 * np.trace(gram) * np.eye(len(gram)))
    values, _ = nnls(factor.T, np.linalg.solve(factor, relative.T @ root), maxiter=50 * len(shrink))
    return Costs(values, np.zeros_like(gram))
