"""The known-objective sampler of a search, with the facts that a search knows about its networks.

These are costs, predicted latency, the cap, and size figures such as MACs. Zero-cost scores are added on request:
they are predicted for any setting from the scores of a pool of networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from hwnas.accuracy.certificate import judged, label, worthwhile
from hwnas.errors import DataError
from hwnas.samplers.coding import Codes, Settings
from hwnas.samplers.known import KNOWN, LEARNT, Belief, KnownObjectiveSampler, Mix
from hwnas.samplers.model import LEAST, WORST
from hwnas.space.search_space import Figure, SearchSpace, macs, params
from hwnas.stats import spearman
from hwnas.study.objective import CAP_QUANTILE, Objective, Predict, upper_ms

if TYPE_CHECKING:
    import optuna

    from hwnas.cli.progress import Console
    from hwnas.data.dataset import Dataset

Array = NDArray[np.float64]
STOPPED_STD = 0.1  # standard deviation of the top-1 of a stopped training, which is that of an early epoch
LEAST_SCORED = 16  # least number of networks of a pool that must have a score
_FOLDS = 8  # parts of the pool; each is left out once, to say how well scores are predicted
_ALPHAS = tuple(np.logspace(-2, 3, 11))


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
    scores: Callable[[Settings], Array] | None = None  # [n, k], zero-cost scores of networks
    rivals: Sequence[Mapping[str, Any]] = ()


def informed(context: Context | None, seed: int, n_startup_trials: int, worst_quantile: float = WORST,
             mix: Mix | None = None, zero_cost: Sequence[str] = ()) -> KnownObjectiveSampler:
    """The sampler for `context`. Without a context it knows nothing, which is enough to check the options.

    `zero_cost` names the scores that the context must then have.
    """
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
        return np.column_stack([cost.of_latency(latency, objective.terms) if cost.of_latency else next(sums)
                                for cost in objective.minimised])

    counted = [cost for cost in objective.minimised if not cost.of_latency]
    timed = len(counted) < len(objective.minimised)  # if so, the costs already contain latency
    physical = Physical(space, None if timed else latency_ms,
                        [partial(cost.of, None, terms=objective.terms) for cost in counted])

    def features(settings: Settings) -> Array:
        return physical(settings) if scores is None else np.hstack([physical(settings), scores(settings)])

    return KnownObjectiveSampler(
        {parameter.name: CategoricalDistribution(parameter.choices) for parameter in space.parameters},
        roles=(LEARNT, *[KNOWN] * len(objective.minimised)), known=costs if objective.minimised else None,
        features=features, over=None if cap_ms is None else over_ms,
        factor=rewarded if objective.kind == "reward" else None, canonical=canonical, learnt=_top1,
        n_startup_trials=n_startup_trials, worst_quantile=worst_quantile, rivals=context.rivals, mix=mix,
        seed=seed)


def beliefs(study: optuna.Study, context: Context) -> dict[int, Belief]:
    """What the model believes of the top-1 of each evaluated trial, by number, see `KnownObjectiveSampler.beliefs`."""
    return informed(replace(context, scores=None), 0, LEAST).beliefs(study)


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


class Scored:
    """Predicts scores [n, k] of settings by ridge regression on their choices, MACs, parameters and depth.

    `codes` [m, p] and `scores` [m, k] are a pool's; nan means that a network has no score. `spearman` [k] says how
    well left-out settings are ranked. The result depends on the pool alone, so all workers of a search agree.
    DataError when fewer than LEAST_SCORED networks have a score.
    """

    def __init__(self, space: SearchSpace, codes: NDArray[np.int64], scores: Array) -> None:
        self._physical = Physical(space, None)
        self._choices = [len(parameter.choices) for parameter in space.parameters]
        described = self._raw(codes)
        self._middle, width = described.mean(0), described.std(0)
        self._kept = width > 1e-9
        self._width = width[self._kept]
        self._models: list[Any] = []
        self.spearman: list[float] = []
        for column in scores.T:
            known = np.isfinite(column)
            if known.sum() < LEAST_SCORED:
                raise DataError(f"{int(known.sum())} of {len(codes)} networks of space {space.name} have this "
                                f"zero-cost score; {LEAST_SCORED} are needed. Leave it out of "
                                "sampler_options.zero_cost.")
            self._add(self._scale(described[known]), column[known])

    def __call__(self, settings: Settings) -> Array:
        """Scores in the pool's standard deviations [n, k]."""
        inputs = self._scale(self._raw(settings.codes.astype(np.int64)))
        return np.column_stack([model.predict(inputs) for model in self._models])

    def _add(self, inputs: Array, scores: Array) -> None:
        from sklearn.linear_model import RidgeCV
        from sklearn.model_selection import KFold, cross_val_predict

        wanted = (scores - scores.mean()) / max(float(scores.std()), 1e-9)
        model = RidgeCV(_ALPHAS)
        left_out = cross_val_predict(model, inputs, wanted, cv=KFold(_FOLDS, shuffle=True, random_state=0))
        self._models.append(model.fit(inputs, wanted))
        self.spearman.append(float(spearman(left_out, wanted)) if np.ptp(wanted) else 0.0)

    def _raw(self, codes: NDArray[np.int64]) -> Array:
        chosen = [np.eye(size)[codes[:, index]] for index, size in enumerate(self._choices)]
        return np.concatenate([*chosen, self._physical.of(codes)], axis=1)

    def _scale(self, described: Array) -> Array:
        return np.asarray((described - self._middle)[:, self._kept] / self._width)


def scored(dataset: Dataset, space: SearchSpace, names: Sequence[str], threads: int, console: Console) -> Scored:
    """Score the space's pool with `names`, or read the stored scores.

    A note says how long it took, and how well scores of other networks are predicted.
    """
    from hwnas.accuracy.zero_cost import Pool

    pool = Pool(dataset, space, names, threads=threads)
    read_pool = Scored(space, pool.codes, pool.scores(console))
    read = ", ".join(f"{name} {rho:.2f}" for name, rho in zip(names, read_pool.spearman, strict=True))
    console.note(f"sampler: zero-cost scores of {len(pool.codes)} networks in {pool.seconds:.0f} s; rank correlation "
                 f"of those read for others: {read}")
    return read_pool


def certified(names: Sequence[str], certificate: Mapping[str, Any] | None, console: Console) -> list[str]:
    """The scores of `names` that the certificate does not switch off; a note names the others.

    A certificate switches a score off when it judges the score, and the score ranks no better than the controls.
    """
    known = judged(certificate) if certificate is not None else []
    off = [name for name in names if name in known and name not in worthwhile(certificate or {})]
    for name in off:
        console.say(f"note: sampler_options.zero_cost: {name} is left out: the certificate's {label(name)} ranks no "
                    "better than parameters or MACs do.")
    return [name for name in names if name not in off]


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
