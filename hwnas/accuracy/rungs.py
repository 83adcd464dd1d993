"""Rungs of a training: what the top one will show, told from those below, and who need not train so far.

Everything is learnt from the search's own networks. Accuracies are compared as logits, in which the steps from 90 to
91 % and from 50 to 52 % are about alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.estimator import Earlier
from hwnas.stats.intervals import log_odds
from hwnas.stats.ranking import kendall_tau

Array = NDArray[np.float64]
NEAREST = 4  # times eta: the networks of similar cost that a network has to be among the best of


@dataclass(frozen=True, slots=True)
class Forecast:
    """Top-1 at the top rung: `std` is that of networks about the prediction, on the same validation images."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Halving:
    """When to stop: see `hopeless`. `n_rungs` of a whole curve."""

    n_rungs: int
    eta: int = 3
    quantile: float = 0.9
    min_history: int = 8


def hopeless(curve: Sequence[float], costs: Sequence[float], earlier: Sequence[Earlier], rule: Halving,
             told: Callable[[Forecast], Forecast] = lambda found: found) -> Forecast | None:
    """What a network would have reached if it need not train on after the rungs in `curve`; None if it must.

    It must while another training can put it on the front: its forecast's `rule.quantile` is not below every network
    that costs no more and was trained to the top. It must as well when it is among the best 1/eta of the networks of
    nearest cost at this rung: the rule of asynchronous successive halving (Li et al., MLSys 2020) in the form that
    stops or goes on at once and never waits (Klein et al., arXiv 2003.10865), here for a front. `told` makes of a
    forecast what is held against the others' values, which may be more than their curves' ends.
    """
    if not 0 < len(curve) < rule.n_rungs or among_best(curve, costs, earlier, rule.eta):
        return None
    found = forecast(curve, earlier, rule)
    return found if found is not None and dominated(told(found), costs, earlier, rule) else None


def forecast(curve: Sequence[float], earlier: Sequence[Earlier], rule: Halving) -> Forecast | None:
    """The top rung from the last one in `curve`, rung by rung; None while `min_history` networks do not show each step.

    Each step learns from all networks that reached it, so the better fate of those that were let on does not bias it
    (regressions in sequence over monotone missing data; Little and Rubin 2019, chapter 7).
    """
    mean, variance = float(log_odds(curve[-1])), 0.0
    for rung in range(len(curve), rule.n_rungs):
        pairs = np.array([one.curve[rung - 1:rung + 1] for one in earlier if len(one.curve) > rung], float)
        if len(pairs) < rule.min_history:
            return None
        step = _Step.fit(log_odds(pairs[:, 0]), log_odds(pairs[:, 1]))
        mean, variance = step(mean, variance)
    top1 = 1 / (1 + math.exp(-mean))
    return Forecast(top1, math.sqrt(variance) * top1 * (1 - top1))


def dominated(found: Forecast, costs: Sequence[float], earlier: Sequence[Earlier], rule: Halving) -> bool:
    """Whether a network trained to the top costs no more and is better than the forecast with `rule.quantile`."""
    z = NormalDist().inv_cdf(rule.quantile)
    return any(one.value - found.mean > z * math.hypot(found.std, one.std) for one in earlier
               if len(one.curve) == rule.n_rungs and not one.stopped
               and all(theirs <= ours for theirs, ours in zip(one.costs, costs, strict=True)))


def among_best(curve: Sequence[float], costs: Sequence[float], earlier: Sequence[Earlier], eta: int) -> bool:
    """Whether fewer than 1/eta of the `NEAREST * eta` networks of nearest log cost were better at this rung."""
    at = [(math.dist(_logs(one.costs), _logs(costs)), one.curve[len(curve) - 1])
          for one in earlier if len(one.curve) >= len(curve)]
    near = [value for _, value in sorted(at)[:NEAREST * eta]]
    return sum(value > curve[-1] for value in near) < max(1, (len(near) + 1) // eta)


def _logs(costs: Sequence[float]) -> list[float]:
    return [math.log(max(cost, 1e-12)) for cost in costs]


@dataclass(frozen=True, slots=True)
class _Step:
    """A line from one rung's logits to the next's, with what it was learnt from."""

    slope: float
    at: tuple[float, float]
    residual_std: float
    n: int
    centre: float
    spread: float

    @classmethod
    def fit(cls, lower: Array, upper: Array) -> _Step:
        """Sen's slope, the one that leaves no Kendall correlation between `lower` and what is left of `upper` (JASA
        63, 1968), drawn to 0 as the measured Kendall tau fails to stand out of chance (James-Stein's factor): a rung
        that does not rank says nothing of the next."""
        n = len(lower)
        slope = _kept(lower, upper) * _sen(lower, upper)
        at = float(np.median(lower)), float(np.median(upper))
        left = upper - at[1] - slope * (lower - at[0])
        std = float(np.sqrt((left**2).sum() / max(1, n - 2)))
        return cls(slope, at, std, n, float(lower.mean()), float(((lower - lower.mean())**2).sum()))

    def __call__(self, mean: float, variance: float) -> tuple[float, float]:
        """Mean and variance of a new network's next rung, its place among those seen counted."""
        away = (mean - self.centre)**2 / self.spread if self.slope and self.spread else 0.0
        own = self.residual_std**2 * (1 + 1 / self.n + away)
        return self.at[1] + self.slope * (mean - self.at[0]), self.slope**2 * variance + own


def _sen(lower: Array, upper: Array) -> float:
    from scipy.stats import theilslopes

    return float(theilslopes(upper, lower).slope) if np.ptp(lower) else 0.0


def _kept(lower: Array, upper: Array) -> float:
    """1 less the share of tau squared that chance alone would give (Kendall's variance for no correlation)."""
    if not np.ptp(lower) or not np.ptp(upper):
        return 0.0
    n, tau = len(lower), float(kendall_tau(lower, upper))
    chance = 2 * (2 * n + 5) / (9 * n * (n - 1))
    return max(0.0, 1 - chance / tau**2) if tau > 0 else 0.0
