"""The known-objective sampler of a search, with the facts that a search knows about its networks.

These are costs, predicted latency, the cap, and size figures such as MACs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from hwnas.samplers.coding import Codes, Settings
from hwnas.samplers.known import KNOWN, LEARNT, Belief, KnownObjectiveSampler
from hwnas.samplers.model import LEAST, WORST
from hwnas.space.search_space import Figure, SearchSpace, macs, params
from hwnas.study.objective import CAP_QUANTILE, Objective, Predict, upper_ms

if TYPE_CHECKING:
    import optuna


Array = NDArray[np.float64]
STOPPED_STD = 0.1  # standard deviation of the top-1 of a stopped training, which is that of an early epoch


@dataclass(frozen=True)
class Context:
    """The facts that a search knows about every network before its trials run.

    `rivals`: parameters of networks that anybody would try, and that its front must beat.
    """

    space: SearchSpace
    predict: Predict
    objective: Objective
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE
    rivals: Sequence[Mapping[str, Any]] = ()


def informed(context: Context | None, seed: int, n_startup_trials: int, worst_quantile: float = WORST
             ) -> KnownObjectiveSampler:
    """The sampler for `context`. Without a context it knows nothing, which is enough to check the options."""
    if context is None:
        return KnownObjectiveSampler(n_startup_trials=n_startup_trials, worst_quantile=worst_quantile, seed=seed)
    space, objective, cap_ms = context.space, context.objective, context.cap_ms

    def latency_ms(settings: Settings) -> Array:
        return np.asarray(context.predict(_codes(settings)).mean, float)

    def over_ms(settings: Settings) -> Array:
        return upper_ms(context.predict(_codes(settings)), context.cap_quantile) - float(cap_ms or 0.0)

    def rewarded(settings: Settings) -> Array:
        return np.asarray(objective.rewards(1.0, latency_ms(settings)))

    def canonical(codes: Codes) -> Codes:
        return space.canonical_codes(codes.astype(np.int64)).astype(float)

    def costs(settings: Settings) -> Array:
        latency, sums = latency_ms(settings), iter(physical.sums(settings) if counted else ())
        return np.column_stack([cost.of_latency(latency, objective.terms) if cost.of_latency else next(sums)
                                for cost in objective.minimised])

    counted = [cost for cost in objective.minimised if not cost.of_latency]
    timed = len(counted) < len(objective.minimised)  # if so, the costs already contain latency
    physical = Physical(space, None if timed else latency_ms,
                        [partial(cost.of, None, terms=objective.terms) for cost in counted])

    return KnownObjectiveSampler(
        {parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters},
        roles=(LEARNT, *[KNOWN] * len(objective.minimised)), known=costs if objective.minimised else None,
        features=physical, over=None if cap_ms is None else over_ms,
        factor=rewarded if objective.kind == "reward" else None, canonical=canonical, learnt=_top1,
        n_startup_trials=n_startup_trials, worst_quantile=worst_quantile, rivals=context.rivals, seed=seed)


def beliefs(study: optuna.Study, context: Context) -> dict[int, Belief]:
    """What the model believes of the top-1 of each evaluated trial, by number, see `KnownObjectiveSampler.beliefs`."""
    return informed(context, 0, LEAST).beliefs(study)


class Physical:
    """MACs, parameters, depth, latency (if no objective contains it) and each segment's share of the MACs [n, f]."""

    def __init__(self, space: SearchSpace, latency_ms: Any, more: Sequence[Figure] = ()) -> None:
        self._space, self._latency_ms = space, latency_ms
        self._figures: tuple[Figure, ...] = (macs, params, len, *more)

    def __call__(self, settings: Settings) -> Array:
        features = self.of(_codes(settings))
        if self._latency_ms is None:
            return features
        return np.insert(features, 3, np.log(self._latency_ms(settings)), axis=1)

    def of(self, codes: NDArray[np.int64]) -> Array:
        """The features that need no latency model [n, f]."""
        products, weights, depth = self._parts(codes)[:3]
        total = np.maximum(products.sum(axis=1), 1.0)
        return np.column_stack([np.log(total), np.log(np.maximum(weights.sum(axis=1), 1.0)), depth.sum(axis=1),
                                products / total[:, None]])

    def sums(self, settings: Settings) -> Array:
        """The figures `more` of networks, summed over their segments [len(more), n]."""
        return np.asarray(self._parts(_codes(settings))[3:].sum(axis=2))

    def _parts(self, codes: NDArray[np.int64]) -> Array:
        """Each figure of each segment [figures, n, segments]."""
        return np.moveaxis(self._space.parts(codes, *self._figures), 2, 0)


def _codes(settings: Settings) -> NDArray[np.int64]:
    return settings.codes.astype(np.int64)


def _top1(trial: FrozenTrial) -> tuple[float, float] | None:
    value = trial.user_attrs.get("top1_proxy")
    std = trial.user_attrs.get("top1_std")
    if value is None:
        return None
    stopped = STOPPED_STD if trial.user_attrs.get("stopped") else 0.0
    return float(value), max(float(std) if std is not None else 0.0, stopped)
