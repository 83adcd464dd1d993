"""Held-out error: what a fit's predictions of networks it had not seen are worth, and the intervals they give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hwnas.latency.costs import Prior
from hwnas.latency.fit import Fit, Timed
from hwnas.stats.intervals import conformal_quantile

FOLDS = 10
Z95 = 1.645
LEAST_OF_ORIGIN = 40  # networks chosen one way (random, front), from which their errors have quantiles of their own


def interval_scores(scores: np.ndarray, origins: np.ndarray) -> tuple[float, float]:
    """Ends of a 90 % interval in units of standard deviation, wide enough for each origin of LEAST_OF_ORIGIN networks.

    A search goes where its front lies: an interval that covers nine of ten over all networks may cover fewer there.
    """
    names = [name for name in np.unique(origins) if (origins == name).sum() >= LEAST_OF_ORIGIN]
    groups = [scores[origins == name] for name in names] or [scores]
    return (min(conformal_quantile(group, 0.05) for group in groups),
            max(conformal_quantile(group, 0.95) for group in groups))


def interval_end(scores_end: float | np.ndarray, log_std: np.ndarray, run_to_run: float) -> np.ndarray:
    """Distance in log units from a prediction to an end of its 90 % interval, for the end's score (signed).

    `run_to_run`: log standard deviation between two runs, which no single calibration sees.
    """
    return np.asarray(np.sign(scores_end) * np.sqrt((scores_end * log_std) ** 2 + (Z95 * run_to_run) ** 2))


@dataclass(frozen=True)
class HeldOut:
    """Predictions of networks that the fit had not seen, beside what was measured."""

    log_measured: np.ndarray
    log_mean: np.ndarray
    log_std: np.ndarray
    halves_ms: np.ndarray
    origins: np.ndarray
    run_to_run: float

    @property
    def scores(self) -> np.ndarray:
        """Log errors in units of their own standard deviation."""
        return np.asarray((self.log_measured - self.log_mean) / self.log_std)

    def summary(self) -> dict[str, float]:
        """Share within 5 and 10 %, mean absolute error, rank correlation, coverage, widths, and noise beside them."""
        from scipy.stats import kendalltau, spearmanr

        error = np.abs(np.exp(self.log_mean - self.log_measured) - 1)
        scores = self.scores
        ends = np.array([interval_scores(np.delete(scores, i), np.delete(self.origins, i)) for i in range(len(scores))])
        low, high = (interval_end(ends[:, side], self.log_std, self.run_to_run) for side in (0, 1))
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


def cross_validate(timed: Timed, halves_ms: np.ndarray, origins: np.ndarray, variances: np.ndarray,
                   run_to_run: float, *, prior: Prior | None = None, folds: int = FOLDS) -> HeldOut:
    """Predict each network from a fit on the other folds, at the pace of the wave that it was measured in.

    What a wave adds to all its networks alike is known from its other ones, as a later run knows it from anchors.
    """
    n = len(timed.measured_ms)
    order = np.random.default_rng(0).permutation(n)
    mean, std = np.zeros(n), np.zeros(n)
    for fold in np.array_split(order, min(folds, n)):
        fit = Fit.of(timed[np.setdiff1d(order, fold)], prior, variances)
        mean[fold], std[fold] = fit.networks(timed[fold].blocks)
        mean[fold] *= 1 + fit.residual.of_runs(timed.runs[fold])
    return HeldOut(np.log(timed.measured_ms), np.log(mean), std, halves_ms, origins, run_to_run)
