"""LatencyModel: predicts whole networks of a space from a table, with intervals calibrated on held-out networks.

Three layers, each fitted on what the one before leaves over:

1. blocks     non-negative regression of in-context block times and whole-network times on physical features;
2. entries    blocks that the table holds keep their own measured deviation from the regression, shrunk by count;
3. networks   a Gaussian process on the log ratio of measured to summed time.

Intervals are conformal: the quantiles of cross-validated log errors, scaled by the process's own uncertainty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hwnas.architecture import Architecture
from hwnas.blocks import BlockSpec
from hwnas.errors import MissingLatency
from hwnas.latency.features import block_features, network_features
from hwnas.latency.process import Process
from hwnas.latency.table import LatencyTable, TimedNetwork

if TYPE_CHECKING:
    from hwnas.space import SearchSpace

FOLDS = 10
RUN_TO_RUN = 0.015  # log standard deviation between two valid runs: the protocol lets the reference stand 3 % higher
SHRINK = 2.0        # observations of a block that weigh as much as the regression's word on it


@dataclass(frozen=True, slots=True)
class Predictions:
    """Latencies of many architectures in ms: `mean` (median of the estimate), 90 % interval, standard deviation."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    std: np.ndarray


def conformal_quantile(residuals: np.ndarray, q: float) -> float:
    """Finite-sample quantile of held-out scores: for q above 1/2 rounded up, below it rounded down."""
    ordered = np.sort(residuals)
    n = len(ordered)
    rank = np.ceil((n + 1) * q) if q >= 0.5 else np.floor((n + 1) * q)
    return float(ordered[int(np.clip(rank - 1, 0, n - 1))])


@dataclass(frozen=True)
class _Fit:
    """One fitted stack of layers, without intervals."""

    weights: np.ndarray
    deviations: dict[str, float]
    process: Process

    def block_ms(self, block: BlockSpec) -> float:
        linear = float(block_features(block) @ self.weights)
        return max(linear, 1e-6) * float(np.exp(self.deviations.get(block.key, 0.0)))

    def log_predict(self, sums: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log latency and its standard deviation from summed block times [n] and process inputs [n, d]."""
        mean, std = self.process.predict(inputs)
        return np.log(sums) + mean, np.sqrt(std**2 + RUN_TO_RUN**2)


class LatencyModel:
    """Latency of a space's architectures on a table's host; `fit` it, then ask `predict` with integer codes."""

    def __init__(self, space: SearchSpace | None, fit: _Fit, overhead_ms: float, residuals: np.ndarray) -> None:
        self.space, self._fit, self._overhead_ms, self.residuals = space, fit, overhead_ms, residuals
        self._segments: dict[str, np.ndarray] = {}

    @classmethod
    def fit(cls, table: LatencyTable, space: SearchSpace) -> LatencyModel:
        """Fit on the table's networks; MissingLatency when it holds too few of this space."""
        networks = _usable(table, space)
        held_out = _cross_validate(networks, FOLDS)
        residuals = (held_out.log_measured - held_out.log_mean) / held_out.log_std
        return cls(space, _fit(networks), 0.0, residuals)

    @staticmethod
    def held_out_error(table: LatencyTable, space: SearchSpace) -> dict[str, float]:
        """Error of networks left out of the fit (10 folds), with the noise of the measurements beside it."""
        return _cross_validate(_usable(table, space), FOLDS).summary()

    def predict(self, codes: np.ndarray) -> Predictions:
        """Latency of the architectures that rows of `codes` [n, parameters] stand for."""
        assert self.space is not None
        segments = self.space.segments(codes)
        sums, features = self._segment_values(segments)
        return self._predictions(sums, features)

    def predict_architectures(self, architectures: Sequence[Architecture]) -> Predictions:
        """The same for architectures of any origin; slower."""
        sums = np.array([sum(self._fit.block_ms(block) for block in one.blocks()) for one in architectures])
        features = np.array([network_features(one.blocks()) for one in architectures])
        return self._predictions(sums, features)

    def _predictions(self, sums: np.ndarray, features: np.ndarray) -> Predictions:
        log_mean, log_std = self._fit.log_predict(sums, process_inputs(sums, features))
        mean = np.exp(log_mean)
        low, high = (mean * np.exp(log_std * conformal_quantile(self.residuals, q)) for q in (0.05, 0.95))
        spread = float(np.std(self.residuals))
        return Predictions(mean, low, high, mean * log_std * spread)

    def _segment_values(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Summed block times [n] and summed features [n, f] by table look-up; unseen segments are filled in first."""
        assert self.space is not None
        if not self._segments:
            width = len(network_features([self.space.reference.blocks()[0]]))
            self._segments = {"known": np.zeros(self.space.n_segments, bool), "ms": np.zeros(self.space.n_segments),
                              "features": np.zeros((self.space.n_segments, width))}
        known = self._segments["known"]
        for segment in np.unique(segments[~known[segments]]):
            blocks = self.space.segment_blocks(int(segment))
            if blocks:
                self._segments["ms"][segment] = sum(self._fit.block_ms(block) for block in blocks)
                self._segments["features"][segment] = network_features(blocks)
            known[segment] = True
        return (self._segments["ms"][segments].sum(axis=1), self._segments["features"][segments].sum(axis=1))


def process_inputs(sums: np.ndarray, features: np.ndarray) -> np.ndarray:
    """What the process sees of a network: log time and the log1p of its features (shares and sizes)."""
    return np.column_stack([np.log(sums), np.log1p(features)])


@dataclass(frozen=True)
class HeldOut:
    """Predictions of networks that the fit had not seen."""

    log_measured: np.ndarray
    log_mean: np.ndarray
    log_std: np.ndarray
    halves: np.ndarray

    def summary(self) -> dict[str, float]:
        """Share within 5 and 10 %, mean absolute error, rank correlation, coverage, widths, and noise beside them."""
        from scipy.stats import kendalltau, spearmanr

        error = np.abs(np.exp(self.log_mean - self.log_measured) - 1)
        scores = (self.log_measured - self.log_mean) / self.log_std
        low, high = self._leave_one_out_intervals(scores)
        noise = np.abs(np.log(self.halves[:, 0] / self.halves[:, 1])) / 2
        inside = (self.log_measured >= low) & (self.log_measured <= high)
        values = {
            "n": len(error), "mean_error": error.mean(), "within_5": (error <= 0.05).mean(),
            "within_10": (error <= 0.10).mean(), "spearman": spearmanr(self.log_mean, self.log_measured).statistic,
            "kendall": kendalltau(self.log_mean, self.log_measured).statistic, "coverage": inside.mean(),
            "median_half_width": float(np.median(np.expm1((high - low) / 2))),
            "noise_mean": np.nanmean(noise), "noise_within_5": np.nanmean(noise <= 0.05)}
        return {name: round(float(value), 5) for name, value in values.items()}

    def _leave_one_out_intervals(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ends = np.array([[conformal_quantile(np.delete(scores, i), q) for q in (0.05, 0.95)]
                         for i in range(len(scores))])
        return (self.log_mean + self.log_std * ends[:, 0], self.log_mean + self.log_std * ends[:, 1])


def _usable(table: LatencyTable, space: SearchSpace) -> list[TimedNetwork]:
    from hwnas.latency.calibrate import LEAST_NETWORKS

    networks = [one for one in table.networks if one.measurement.valid]
    ours = sum(one.space == space.name for one in networks)
    if ours < LEAST_NETWORKS:
        raise MissingLatency(f"{table.path or table.key}: {ours} networks of space {space.name}, at least "
                             f"{LEAST_NETWORKS} are needed. Measure them: python -m hwnas.profile +target=… "
                             f"space={space.name}")
    return networks


def _cross_validate(networks: Sequence[TimedNetwork], folds: int) -> HeldOut:
    order = np.random.default_rng(0).permutation(len(networks))
    mean, std = np.zeros(len(networks)), np.zeros(len(networks))
    for fold in np.array_split(order, min(folds, len(networks))):
        fit = _fit([networks[i] for i in order if i not in set(fold.tolist())])
        held = [networks[i] for i in fold]
        sums = np.array([sum(fit.block_ms(block) for block in one.architecture.blocks()) for one in held])
        features = np.array([network_features(one.architecture.blocks()) for one in held])
        mean[fold], std[fold] = fit.log_predict(sums, process_inputs(sums, features))
    return HeldOut(np.log([one.measurement.latency_ms for one in networks]), mean, std,
                   np.array([one.measurement.halves_ms() for one in networks]))


def _fit(networks: Sequence[TimedNetwork]) -> _Fit:
    features = np.array([network_features(one.architecture.blocks()) for one in networks])
    measured = np.array([one.measurement.latency_ms for one in networks])
    weights = _fit_blocks(networks, features, measured)
    deviations = _deviations(networks, weights)
    fit = _Fit(weights, deviations, Process.empty())
    sums = np.array([sum(fit.block_ms(block) for block in one.architecture.blocks()) for one in networks])
    noise = np.array([one.measurement.std_ms / one.measurement.latency_ms for one in networks])
    return _Fit(weights, deviations, Process.fit(process_inputs(sums, features), np.log(measured / sums), noise))


def _fit_blocks(networks: Sequence[TimedNetwork], features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Non-negative least squares on relative errors: whole networks, and their blocks at a quarter of the weight."""
    from scipy.optimize import nnls

    rows, times, importance = list(features), list(measured), [1.0] * len(measured)
    for one in networks:
        share = 0.25 / max(len(one.block_ms), 1) ** 0.5
        for block, ms in zip(one.architecture.blocks(), one.block_ms, strict=False):
            if ms > 0:
                rows.append(block_features(block))
                times.append(ms + one.other_ms / len(one.block_ms))
                importance.append(share)
    scale = (np.array(importance) / np.array(times))[:, None]
    design = np.array(rows) * scale
    ridge = 0.02 * np.diag(np.sqrt((design**2).mean(axis=0)) + 1e-9)
    solution, _ = nnls(np.vstack([design, ridge]), np.concatenate([importance, np.zeros(len(ridge))]))
    return np.asarray(solution)


def _deviations(networks: Sequence[TimedNetwork], weights: np.ndarray) -> dict[str, float]:
    """Shrunk mean log ratio of a block's in-context time to the regression's, by block key."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in networks:
        for block, ms in zip(one.architecture.blocks(), one.block_ms, strict=False):
            if ms > 0:
                linear = max(float(block_features(block) @ weights), 1e-6)
                found[block.key].append(float(np.log((ms + one.other_ms / len(one.block_ms)) / linear)))
    return {key: sum(values) / (len(values) + SHRINK) for key, values in found.items()}
