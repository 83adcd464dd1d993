"""The known-objective sampler of a search: told networks' predicted latency, the cap, what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from hwnas.objective import CAP_QUANTILE, Objective, Predict, reward, upper_ms
from hwnas.samplers.coding import Codes, Settings
from hwnas.samplers.known import KNOWN, LEARNT, KnownObjectiveSampler

if TYPE_CHECKING:
    from hwnas.space import SearchSpace

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Context:
    """What a search knows of every network before its trials run."""

    space: SearchSpace
    predict: Predict
    objective: Objective
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE


def informed(context: Context | None, seed: int, n_startup_trials: int) -> KnownObjectiveSampler:
    """The sampler for `context`; without one (options are only checked) it knows nothing."""
    if context is None:
        return KnownObjectiveSampler(n_startup_trials=n_startup_trials, seed=seed)
    space, objective, cap_ms = context.space, context.objective, context.cap_ms

    def latency_ms(settings: Settings) -> Array:
        return np.asarray(context.predict(_codes(settings)).mean, float)

    def over_ms(settings: Settings) -> Array:
        return upper_ms(context.predict(_codes(settings)), context.cap_quantile) - float(cap_ms or 0.0)

    def rewarded(settings: Settings) -> Array:
        return np.asarray(reward(1.0, latency_ms(settings), objective.target_ms, objective.reward_kind))

    def canonical(codes: Codes) -> Codes:
        return space.canonical_codes(codes.astype(np.int64)).astype(float)

    pareto = len(objective.directions) > 1
    return KnownObjectiveSampler(
        {parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters},
        roles=(LEARNT, KNOWN) if pareto else (LEARNT,), known=latency_ms if pareto else None,
        features=_Physical(space, None if pareto else latency_ms), over=None if cap_ms is None else over_ms,
        factor=rewarded if objective.kind == "reward" else None, canonical=canonical, learnt=_top1,
        n_startup_trials=n_startup_trials, seed=seed)


class _Physical:
    """MACs, parameters, depth, latency (where it is no objective) and each segment's share of the MACs [n, f]."""

    def __init__(self, space: SearchSpace, latency_ms: Any) -> None:
        self._space, self._latency_ms = space, latency_ms
        self._known = np.zeros(space.n_segments, bool)
        self._rows = np.zeros((space.n_segments, 3))

    def __call__(self, settings: Settings) -> Array:
        segments = self._space.segments(_codes(settings))
        for segment in np.unique(segments[~self._known[segments]]):
            blocks = self._space.segment_blocks(int(segment))
            macs, params = (sum(getattr(block, name) for block in blocks) for name in ("macs", "params"))
            self._rows[segment] = macs, params, len(blocks)
            self._known[segment] = True
        macs, params, depth = np.moveaxis(self._rows[segments], 2, 0)  # [n, segments] each
        total = np.maximum(macs.sum(axis=1), 1.0)
        parts = [np.log(total), np.log(np.maximum(params.sum(axis=1), 1.0)), depth.sum(axis=1)]
        if self._latency_ms is not None:
            parts.append(np.log(self._latency_ms(settings)))
        return np.column_stack([*parts, macs / total[:, None]])


def _codes(settings: Settings) -> NDArray[np.int64]:
    return settings.codes.astype(np.int64)


def _top1(trial: FrozenTrial) -> tuple[float, float] | None:
    value = trial.user_attrs.get("top1_proxy")
    std = trial.user_attrs.get("top1_std")
    return None if value is None else (float(value), float(std) if std is not None else 0.0)
