"""The known-objective sampler of a search, with the facts that a search knows about its networks.

These are costs, predicted latency, the cap, and size figures such as MACs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from hwnas.samplers.domain import Codes
from hwnas.samplers.known import Belief, KnownFunctions, KnownObjectiveSampler
from hwnas.samplers.model import LEAST
from hwnas.space.search_space import Figure, SearchSpace, macs, params
from hwnas.study.objective import CAP_QUANTILE, Objective, Predict, upper_ms

if TYPE_CHECKING:
    import optuna

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Context:
    """The facts that a search knows about every network before its trials run."""

    space: SearchSpace
    predict: Predict
    objective: Objective
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE


def informed(context: Context, seed: int, n_startup_trials: int) -> KnownObjectiveSampler:
    """Return the sampler for `context`."""
    facts, objective = NetworkFunctions(context), context.objective
    functions = KnownFunctions(
        facts.costs if objective.minimised else None, facts.features,
        over=None if context.cap_ms is None else facts.over_ms,
        factor=facts.rewards if objective.kind == "reward" else None, canonical=context.space.canonical_codes)
    return KnownObjectiveSampler(
        {parameter.name: CategoricalDistribution(parameter.choices) for parameter in context.space.parameters},
        functions, learnt=_read_top1, n_startup_trials=n_startup_trials, seed=seed)


def beliefs(study: optuna.Study, context: Context) -> dict[int, Belief]:
    """Return the model's belief about each evaluated trial's top-1, by number: `KnownObjectiveSampler.beliefs`."""
    return informed(context, 0, LEAST).beliefs(study)


class NetworkFunctions:
    """The figures that a search knows of networks, by their codes."""

    def __init__(self, context: Context) -> None:
        self.context, costs = context, context.objective.minimised
        # Costs are either a function of the latency, or sums over the blocks of a network.
        summed = [cost for cost in costs if not cost.of_latency]
        self._latency_is_a_cost = len(summed) < len(costs)
        self._figures: tuple[Figure, ...] = (macs, params, len, *(
            partial(cost.of, None, terms=context.objective.terms) for cost in summed))

    def costs(self, codes: Codes) -> Array:
        """Return the costs that the search minimises [n, k]."""
        objective, latency_ms = self.context.objective, self.context.predict(codes).mean
        sums = iter(self._parts(codes)[3:].sum(axis=2) if self._figures[3:] else ())
        return np.column_stack([cost.of_latency(latency_ms, objective.terms) if cost.of_latency else next(sums)
                                for cost in objective.minimised])

    def features(self, codes: Codes) -> Array:
        """Return MACs, parameters, depth, latency (if no cost contains it) and segments' shares of the MACs [n, f]."""
        products, weights, depth = self._parts(codes)[:3]
        total = np.maximum(products.sum(axis=1), 1.0)
        features = [np.log(total), np.log(np.maximum(weights.sum(axis=1), 1.0)), depth.sum(axis=1)]
        if not self._latency_is_a_cost:
            features.append(np.log(self.context.predict(codes).mean))
        return np.column_stack([*features, products / total[:, None]])

    def over_ms(self, codes: Codes) -> Array:
        """Return how far the upper quantile of the predicted latency is above the cap, in ms [n]."""
        return upper_ms(self.context.predict(codes), self.context.cap_quantile) - float(self.context.cap_ms or 0.0)

    def rewards(self, codes: Codes) -> Array:
        """Return the reward of a network whose top-1 is 1 [n]."""
        return np.asarray(self.context.objective.reward(1.0, self.context.predict(codes).mean))

    def _parts(self, codes: Codes) -> Array:
        """Return each figure of each segment [figures, n, segments]."""
        return np.moveaxis(self.context.space.parts(codes, *self._figures), 2, 0)


def _read_top1(trial: FrozenTrial) -> tuple[float, float] | None:
    top1, std = trial.user_attrs.get("top1_proxy"), trial.user_attrs.get("top1_std")
    return None if top1 is None else (float(top1), float(std or 0.0))
