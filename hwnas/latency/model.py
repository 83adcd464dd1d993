"""LatencyModel: predicts whole networks of a space from a table, with intervals calibrated on held-out networks.

Latency is a sum of physical costs, none of which can be negative: non-negative least squares on relative errors,
fitted on whole networks (blocks timed alone do not add up, see docs/decisions/latency-model.md). A network unlike
those measured gets a wider interval through its leverage; intervals are conformal, from cross-validated errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hwnas.architecture import Architecture
from hwnas.errors import MissingLatency
from hwnas.latency.features import NAMES, network_features
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TimedNetwork

if TYPE_CHECKING:
    from hwnas.space import SearchSpace

FOLDS = 10
RIDGE = 0.1  # shrinkage of each cost, in units of its feature's root mean square
# Log standard deviation between two valid runs that no single calibration sees: the protocol lets the reference stand
# 3 % higher, and one network compiled twice differs by 2 to 4 % (docs/decisions/qdq-recipe.md).
RUN_TO_RUN = 0.02
Z95 = 1.645


@dataclass(frozen=True, slots=True)
class Predictions:
    """Latencies of many architectures in ms, arrays [n]: estimate, 90 % interval, standard deviation."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Fit:
    """Costs of the features, and what is needed to say how far a network lies from those fitted."""

    costs: np.ndarray
    inverse: np.ndarray
    sigma: float

    @classmethod
    def of(cls, features: np.ndarray, measured_ms: np.ndarray) -> Fit:
        """Fit `measured_ms` [n] as `features` [n, f] @ costs, costs >= 0, least relative squares with a small ridge."""
        from scipy.optimize import nnls

        design = features / measured_ms[:, None]
        ridge = RIDGE * (np.sqrt((design**2).mean(axis=0)) + 1e-9)
        rows = np.vstack([design, np.diag(ridge)])
        costs, _ = nnls(rows, np.concatenate([np.ones(len(design)), np.zeros(len(ridge))]), maxiter=50 * len(ridge))
        active = costs > 0
        gram = rows[:, active].T @ rows[:, active]
        inverse = np.zeros((len(costs), len(costs)))
        inverse[np.ix_(active, active)] = np.linalg.inv(gram)
        errors = np.log(np.maximum(design @ costs, 1e-9))
        freedom = max(len(design) - float(np.sum((design @ inverse) * design)), 1.0)
        return cls(costs, inverse, float(np.sqrt((errors**2).sum() / freedom)))

    def predict(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latency in ms [n] and its log standard deviation [n] for `features` [n, f]."""
        mean = np.maximum(features @ self.costs, 1e-6)
        relative = features / mean[:, None]
        leverage = np.einsum("ij,ij->i", relative @ self.inverse, relative)
        return mean, self.sigma * np.sqrt(1 + leverage)


def conformal_quantile(scores: np.ndarray, q: float) -> float:
    """Finite-sample quantile of held-out scores: for q of 1/2 or more rounded up, below it rounded down."""
    ordered, n = np.sort(scores), len(scores)
    rank = np.ceil((n + 1) * q) if q >= 0.5 else np.floor((n + 1) * q)
    return float(ordered[int(np.clip(rank - 1, 0, n - 1))])


def interval_end(scores_end: float | np.ndarray, log_std: np.ndarray) -> np.ndarray:
    """Distance in log units from a prediction to an end of its 90 % interval, for the end's score (signed)."""
    return np.asarray(np.sign(scores_end) * np.sqrt((scores_end * log_std) ** 2 + (Z95 * RUN_TO_RUN) ** 2))


class LatencyModel:
    """Latency of a space's architectures on a table's host: `fit` it, then ask `predict` with integer codes."""

    def __init__(self, space: SearchSpace, fit: Fit, scores: np.ndarray) -> None:
        self.space, self._fit = space, fit
        self._ends = tuple(conformal_quantile(scores, q) for q in (0.05, 0.95))
        self._spread = float(np.std(scores))
        self._known = np.zeros(space.n_segments, bool)
        self._features = np.zeros((space.n_segments, len(NAMES)))

    @classmethod
    def fit(cls, table: LatencyTable, space: SearchSpace) -> LatencyModel:
        """Fit on the table's networks; MissingLatency when it holds too few of this space."""
        networks = usable(table, space)
        held_out = cross_validate(networks)
        return cls(space, _fit(networks), held_out.scores)

    @staticmethod
    def held_out_error(table: LatencyTable, space: SearchSpace) -> dict[str, float]:
        """Error on networks left out of the fit (10 folds), with the noise of the measurements beside it."""
        return cross_validate(usable(table, space)).summary()

    def predict(self, codes: np.ndarray) -> Predictions:
        """Latency of the architectures that rows of `codes` [n, parameters] stand for."""
        segments = self.space.segments(codes)
        for segment in np.unique(segments[~self._known[segments]]):
            blocks = self.space.segment_blocks(int(segment))
            if blocks:
                self._features[segment] = network_features(blocks)
            self._known[segment] = True
        features = self._features[segments[:, 0]]
        for column in range(1, segments.shape[1]):
            features = features + self._features[segments[:, column]]
        return self._predictions(features)

    def predict_architectures(self, architectures: Sequence[Architecture]) -> Predictions:
        """The same for architectures of any origin; slower."""
        return self._predictions(np.array([network_features(one.blocks()) for one in architectures]))

    def _predictions(self, features: np.ndarray) -> Predictions:
        mean, log_std = self._fit.predict(features)
        low, high = (mean * np.exp(interval_end(end, log_std)) for end in self._ends)
        return Predictions(mean, low, high, mean * np.hypot(log_std * self._spread, RUN_TO_RUN))


@dataclass(frozen=True)
class HeldOut:
    """Predictions of networks that the fit had not seen, beside what was measured."""

    log_measured: np.ndarray
    log_mean: np.ndarray
    log_std: np.ndarray
    halves_ms: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        """Log errors in units of their own standard deviation."""
        return np.asarray((self.log_measured - self.log_mean) / self.log_std)

    def summary(self) -> dict[str, float]:
        """Share within 5 and 10 %, mean absolute error, rank correlation, coverage, widths, and noise beside them."""
        from scipy.stats import kendalltau, spearmanr

        error = np.abs(np.exp(self.log_mean - self.log_measured) - 1)
        scores = self.scores
        ends = np.array([[conformal_quantile(np.delete(scores, i), q) for q in (0.05, 0.95)]
                         for i in range(len(scores))])
        low, high = (interval_end(ends[:, side], self.log_std) for side in (0, 1))
        errors = self.log_measured - self.log_mean
        inside = (low <= errors) & (errors <= high)
        noise = np.abs(np.log(self.halves_ms[:, 0] / self.halves_ms[:, 1])) / 2
        values = {
            "n": len(error), "mean_error": error.mean(), "within_5": (error <= 0.05).mean(),
            "within_10": (error <= 0.10).mean(), "spearman": spearmanr(self.log_mean, self.log_measured).statistic,
            "kendall": kendalltau(self.log_mean, self.log_measured).statistic, "coverage": inside.mean(),
            "median_half_width": np.median(np.sinh((high - low) / 2)),
            "noise_mean": np.nanmean(noise), "noise_within_5": np.nanmean(noise <= 0.05)}
        return {name: round(float(value), 5) for name, value in values.items()}


def usable(table: LatencyTable, space: SearchSpace) -> list[TimedNetwork]:
    """The table's valid networks; MissingLatency when fewer than LEAST_NETWORKS are of `space`."""
    networks = [one for one in table.networks if one.measurement.valid]
    ours = sum(one.space == space.name for one in networks)
    if ours < LEAST_NETWORKS:
        raise MissingLatency(f"{table.path or table.key}: {ours} networks of space {space.name}; at least "
                             f"{LEAST_NETWORKS} are needed. Measure them: python -m hwnas.profile +target=… "
                             f"space={space.name}")
    return networks


def cross_validate(networks: Sequence[TimedNetwork]) -> HeldOut:
    """Predict each network from a fit on the other folds."""
    features, measured = _data(networks)
    order = np.random.default_rng(0).permutation(len(networks))
    mean, std = np.zeros(len(networks)), np.zeros(len(networks))
    for fold in np.array_split(order, min(FOLDS, len(networks))):
        rest = np.setdiff1d(order, fold)
        mean[fold], std[fold] = Fit.of(features[rest], measured[rest]).predict(features[fold])
    return HeldOut(np.log(measured), np.log(mean), std, np.array([one.measurement.halves_ms() for one in networks]))


def _data(networks: Sequence[TimedNetwork]) -> tuple[np.ndarray, np.ndarray]:
    return (np.array([network_features(one.architecture.blocks()) for one in networks]),
            np.array([one.measurement.latency_ms for one in networks]))


def _fit(networks: Sequence[TimedNetwork]) -> Fit:
    return Fit.of(*_data(networks))
