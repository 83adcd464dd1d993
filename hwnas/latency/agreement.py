"""Agreement of predicted and measured latency: error, coverage, rank correlation, and kinds of block that stand out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec
from hwnas.stats import draws, kendall_tau, percentiles, spearman, wilson

NOISE_POINTS = 0.02  # how far below a lower noise ceiling a figure may lie
BOOTSTRAP = 1000


@dataclass(frozen=True)
class Compared:
    """Networks predicted and measured. `halves_ms` [n, 2] are two independent halves of each measurement.

    `converged` [n] marks the measurements that met the protocol's interval: only they tell the noise.
    """

    predicted_ms: np.ndarray
    low_ms: np.ndarray
    high_ms: np.ndarray
    measured_ms: np.ndarray
    halves_ms: np.ndarray
    converged: np.ndarray

    def __len__(self) -> int:
        return len(self.measured_ms)

    def __getitem__(self, chosen: np.ndarray) -> Compared:
        return Compared(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @property
    def error(self) -> np.ndarray:
        """Signed: above 0 where the network is faster than predicted."""
        return np.asarray(self.predicted_ms / self.measured_ms - 1)

    @property
    def inside(self) -> np.ndarray:
        """Whether the measured time lies in the predicted interval."""
        return np.asarray((self.low_ms <= self.measured_ms) & (self.measured_ms <= self.high_ms))


@dataclass(frozen=True, slots=True)
class Mark:
    """A figure, what is asked of it, and what is asked where the noise ceiling lies lower."""

    name: str
    title: str
    low: float | None = None
    high: float | None = None
    ceiling: str = ""


MARKS = (Mark("within_5", "within 5 %", 0.90, ceiling="ceiling_within_5"),
         Mark("within_10", "within 10 %", 0.985, ceiling="ceiling_within_10"),
         Mark("spearman", "Spearman", 0.99, ceiling="ceiling_spearman"),
         Mark("coverage", "coverage of the 90 % interval", 0.85, 0.95),
         Mark("median_half_width", "median half-width", high=0.08))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a mark is met; `by_ceiling`: only at the noise ceiling less two points."""

    mark: Mark
    value: float | None
    ceiling: float | None
    met: bool
    by_ceiling: bool


def summary(comparison: Compared) -> dict[str, Any]:
    """The headline figures and the noise ceilings."""
    error = np.abs(comparison.error)
    return {"n": len(comparison), "within_5": _mean(error <= 0.05), "within_10": _mean(error <= 0.10),
            "mean_error": _mean(error), "bias": _plain(np.median(comparison.error)) if len(comparison) else None,
            "spearman": rank_correlation(comparison.predicted_ms, comparison.measured_ms, "spearman"),
            "kendall": rank_correlation(comparison.predicted_ms, comparison.measured_ms, "kendall"),
            "coverage": _mean(comparison.inside), "median_half_width": _median_half_width(comparison),
            **ceilings(comparison)}


def ceilings(comparison: Compared) -> dict[str, Any]:
    """Figures that a perfect predictor would reach. Two halves of one measurement differ by twice the noise of the
    whole."""
    halves = comparison.halves_ms[comparison.converged & np.isfinite(comparison.halves_ms).all(axis=1)]
    noise = np.abs(np.log(halves[:, 0] / halves[:, 1])) / 2
    return {"ceiling_within_5": _mean(noise <= 0.05), "ceiling_within_10": _mean(noise <= 0.10),
            "ceiling_mean": _mean(noise), "ceiling_spearman": rank_correlation(halves[:, 0], halves[:, 1], "spearman"),
            "n_ceiling": len(halves)}


def intervals(comparison: Compared, seed: int = 0) -> dict[str, list[float] | None]:
    """90 % intervals of the figures, because they rest on few networks: Wilson's for shares, resampling for the others.

    (Resampling a share of 100 % gives 100 to 100 %, which a few dozen networks cannot show.)
    """
    n, error = len(comparison), np.abs(comparison.error)
    shares = {"within_5": error <= 0.05, "within_10": error <= 0.10, "coverage": comparison.inside}
    values: dict[str, list[float] | None] = {
        name: _ends(wilson(int(hits.sum()), n, 0.9)) if n else None for name, hits in shares.items()}
    values["mean_error"] = values["spearman"] = None
    if n > 2:
        rows = draws(n, seed, BOOTSTRAP)
        values["mean_error"] = _ends(percentiles(error[rows].mean(axis=1), 0.9))
        few = rows[:300]
        values["spearman"] = _ends(percentiles(
            spearman(comparison.predicted_ms[few], comparison.measured_ms[few]), 0.9))
    return values


def quartiles(comparison: Compared) -> list[dict[str, Any]]:
    """Errors and coverage in each quarter of the measured latencies, fastest first."""
    rows = []
    for part in np.array_split(np.argsort(comparison.measured_ms, kind="stable"), 4):
        if len(part):
            quarter = comparison[part]
            error = np.abs(quarter.error)
            rows.append({"n": len(part), "from_ms": _plain(quarter.measured_ms[0]),
                         "to_ms": _plain(quarter.measured_ms[-1]),
                         **{f"error_p{q}": _plain(np.quantile(error, q / 100)) for q in (50, 90, 95)},
                         "error_max": _plain(error.max()), "bias": _plain(np.median(quarter.error)),
                         "coverage": _mean(quarter.inside), "within_5": _mean(error <= 0.05)})
    return rows


def verdicts(figures: Mapping[str, Any]) -> list[Verdict]:
    """Compare a `summary` with the marks. Where a noise ceiling lies below its mark, the ceiling less two points
    counts."""
    results = []
    for mark in MARKS:
        value, ceiling = figures.get(mark.name), figures.get(mark.ceiling)
        met = value is not None and (mark.low is None or value >= mark.low) and (
            mark.high is None or value <= mark.high)
        lower = ceiling is not None and mark.low is not None and ceiling < mark.low
        by_ceiling = not met and value is not None and lower and bool(value >= float(ceiling or 0) - NOISE_POINTS)
        results.append(Verdict(mark, value, ceiling, met or by_ceiling, by_ceiling))
    return results


def rank_correlation(first: np.ndarray, second: np.ndarray, kind: str) -> float | None:
    """Spearman's rho or Kendall's tau-b; None for fewer than three networks or where one side is constant."""
    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return _plain((spearman if kind == "spearman" else kendall_tau)(first, second))


def _median_half_width(comparison: Compared) -> float | None:
    """Half of the predicted interval, as a share of the prediction."""
    if not len(comparison):
        return None
    return _plain(np.median((comparison.high_ms - comparison.low_ms) / 2 / comparison.predicted_ms))


def _ends(interval: tuple[float, float]) -> list[float] | None:
    return [_plain(end) for end in interval] if np.isfinite(interval).all() else None


def _mean(values: np.ndarray) -> float | None:
    return _plain(np.mean(values)) if len(values) else None


def _plain(value: Any) -> float:
    return round(float(value), 6)


WORST_SHARE, LEAST_WORST = 0.1, 5
CHANCE = 0.05  # largest probability, by chance alone, at which a kind is still reported


@dataclass(frozen=True, slots=True)
class KindShare:
    """How often the worst networks have a kind of block at a place, against all networks that were measured.

    `mean_error` is signed (above 0: predicted too slow), over all networks that have the kind. `chance` is the
    probability that as many of the worst have it when the worst are drawn by lot.
    """

    place: str
    kind: str
    n_worst: int
    n_all: int
    lift: float
    mean_error: float
    mean_error_without: float | None
    chance: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def worst(errors: np.ndarray) -> np.ndarray:
    """Indices of the tenth of the networks with the largest errors, largest first; at least five of them."""
    n = min(len(errors), max(LEAST_WORST, round(WORST_SHARE * len(errors))))
    return np.argsort(-np.abs(errors), kind="stable")[:n]


def kind_of(block: BlockSpec) -> str:
    """Kind, kernel, stride and squeeze-and-excite, e.g. `ir k5 s2 se`."""
    return " ".join([block.kind, f"k{block.kernel}", f"s{block.stride}", *(["se"] if block.se else [])])


def kinds_of(architecture: Architecture) -> set[tuple[str, str]]:
    """(place, kind) of all its blocks but stem and head; each counts at its stage and as `any stage`."""
    kinds = set()
    for index, blocks in enumerate(architecture.staged_blocks()[1:-1]):
        for block in blocks:
            kinds |= {(f"stage {index + 1}", kind_of(block)), ("any stage", kind_of(block))}
    return kinds


def shared_kinds(architectures: Sequence[Architecture], errors: np.ndarray) -> list[KindShare]:
    """Kinds that are too frequent among the worst to be chance, most striking first. `errors` [n] are signed."""
    if len(architectures) < 2 * LEAST_WORST:
        return []
    chosen = worst(errors)
    kinds = [kinds_of(architecture) for architecture in architectures]
    shares = []
    for place, kind in sorted(set().union(*kinds)):
        has = np.array([(place, kind) in own for own in kinds])
        share = _share(place, kind, has, chosen, errors)
        if share.lift > 1 and share.n_worst >= 3 and share.chance <= CHANCE:
            shares.append(share)
    return sorted(shares, key=lambda share: (share.chance, share.place, share.kind))


def _share(place: str, kind: str, has: np.ndarray, chosen: np.ndarray, errors: np.ndarray) -> KindShare:
    from scipy.stats import hypergeom

    n, n_all, n_worst = len(has), int(has.sum()), int(has[chosen].sum())
    return KindShare(place, kind, n_worst, n_all, (n_worst / len(chosen)) / (n_all / n), float(errors[has].mean()),
                     float(errors[~has].mean()) if n_all < n else None,
                     float(hypergeom.sf(n_worst - 1, n, n_all, len(chosen))))


def finite(value: float) -> float | None:
    """`value` to six decimals; None where it is infinite or NaN, which JSON cannot hold."""
    return round(float(value), 6) if math.isfinite(value) else None
