"""The known-objective sampler of a search: told networks' costs, predicted latency, the cap, what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from hwnas.samplers.coding import Codes, Settings
from hwnas.samplers.known import KNOWN, LEARNT, KnownObjectiveSampler
from hwnas.samplers.model import WORST
from hwnas.samplers.proposals import Mix
from hwnas.study.objective import CAP_QUANTILE, Objective, Predict, upper_ms

if TYPE_CHECKING:
    from hwnas.space.blocks import BlockSpec
    from hwnas.space.search_space import SearchSpace

Array = NDArray[np.float64]
STOPPED_STD = 0.1  # of the top-1 of a training that was ended early as hopeless: it is that of an early epoch
Figure = Callable[["tuple[BlockSpec, ...]"], float]


@dataclass(frozen=True)
class Context:
    """What a search knows of every network before its trials run."""

    space: SearchSpace
    predict: Predict
    objective: Objective
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE
    scores: Callable[[Settings], Array] | None = None  # [n, k], zero-cost scores of networks


def informed(context: Context | None, seed: int, n_startup_trials: int, worst_quantile: float = WORST,
             mix: Mix | None = None, zero_cost: Sequence[str] = ()) -> KnownObjectiveSampler:
    """The sampler for `context`; without one (options are only checked) it knows nothing. `zero_cost` names the scores
    that the context must then tell."""
    if context is None:
        return KnownObjectiveSampler(n_startup_trials=n_startup_trials, worst_quantile=worst_quantile, seed=seed)
    space, objective, cap_ms, scores = context.space, context.objective, context.cap_ms, context.scores
    if zero_cost and scores is None:
        raise ValueError("zero_cost scores are wanted, and the context has none")

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
        return np.column_stack([one.of_latency(latency, objective.terms) if one.of_latency else next(sums)
                                for one in objective.minimised])

    counted = [one for one in objective.minimised if not one.of_latency]
    timed = len(counted) < len(objective.minimised)  # then latency is among the costs already
    physical = Physical(space, None if timed else latency_ms,
                        [partial(one.of, None, terms=objective.terms) for one in counted])

    def features(settings: Settings) -> Array:
        return physical(settings) if scores is None else np.hstack([physical(settings), scores(settings)])

    return KnownObjectiveSampler(
        {parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters},
        roles=(LEARNT, *[KNOWN] * len(objective.minimised)), known=costs if objective.minimised else None,
        features=features, over=None if cap_ms is None else over_ms,
        factor=rewarded if objective.kind == "reward" else None, canonical=canonical, learnt=_top1,
        n_startup_trials=n_startup_trials, worst_quantile=worst_quantile, mix=mix, seed=seed)


class Physical:
    """MACs, parameters, depth, latency (where no objective tells it) and each segment's share of the MACs [n, f]."""

    def __init__(self, space: SearchSpace, latency_ms: Any, more: Sequence[Figure] = ()) -> None:
        self._space, self._latency_ms = space, latency_ms
        self._figures: list[Figure] = [lambda blocks: sum(block.macs for block in blocks),
                                       lambda blocks: sum(block.params for block in blocks), len, *more]
        self._known = np.zeros(space.n_segments, bool)
        self._rows = np.zeros((space.n_segments, len(self._figures)))

    def __call__(self, settings: Settings) -> Array:
        found = self.of(_codes(settings))
        if self._latency_ms is None:
            return found
        return np.insert(found, 3, np.log(self._latency_ms(settings)), axis=1)

    def of(self, codes: NDArray[np.int64]) -> Array:
        """What is known without a latency model."""
        macs, params, depth = self._parts(codes)[:3]
        total = np.maximum(macs.sum(axis=1), 1.0)
        return np.column_stack([np.log(total), np.log(np.maximum(params.sum(axis=1), 1.0)), depth.sum(axis=1),
                                macs / total[:, None]])

    def sums(self, settings: Settings) -> Array:
        """What `more` says of networks, summed over their segments [len(more), n]."""
        return np.asarray(self._parts(_codes(settings))[3:].sum(axis=2))

    def _parts(self, codes: NDArray[np.int64]) -> Array:
        """Each figure of each segment [figures, n, segments]."""
        segments = self._space.segments(codes)
        for segment in np.unique(segments[~self._known[segments]]):
            blocks = self._space.segment_blocks(int(segment))
            self._rows[segment] = [figure(blocks) for figure in self._figures]
            self._known[segment] = True
        return np.moveaxis(self._rows[segments], 2, 0)


def _codes(settings: Settings) -> NDArray[np.int64]:
    return settings.codes.astype(np.int64)


def _top1(trial: FrozenTrial) -> tuple[float, float] | None:
    value = trial.user_attrs.get("top1_proxy")
    std = trial.user_attrs.get("top1_std")
    if value is None:
        return None
    early = trial.user_attrs.get("stopped") and not trial.user_attrs.get("extrapolated")
    stopped = STOPPED_STD if early else 0.0
    return float(value), max(float(std) if std is not None else 0.0, stopped)
