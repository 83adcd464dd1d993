"""KnownObjectiveSampler: an Optuna sampler for studies in which all objectives but one are known before a trial runs.

Latency, model size or price of a network can be looked up; only its accuracy needs a training. The sampler models this
one objective with a Gaussian process, and knows the others exactly. It asks for the setting that is expected to add
most hypervolume.

    import optuna
    from optuna.distributions import CategoricalDistribution, IntDistribution
    from hwnas.samplers.known import KnownObjectiveSampler

    space = {"depth": IntDistribution(1, 8), "width": CategoricalDistribution([16, 32, 64, 128])}

    def cost(settings):                      # known before anything runs; a list of dictionaries in, [n, 1] out
        return [[0.01 * setting["depth"] * setting["width"]] for setting in settings]

    def objective(trial):
        setting = {"depth": trial.suggest_int("depth", 1, 8),
                   "width": trial.suggest_categorical("width", [16, 32, 64, 128])}
        accuracy = 1 - 1 / (1 + setting["depth"] * setting["width"] ** 0.5)      # the expensive part
        return accuracy, cost([setting])[0][0]

    sampler = KnownObjectiveSampler(space, roles=("learnt", "known"), known=cost, seed=0)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    study.optimize(objective, n_trials=30)
    print([trial.values for trial in study.best_trials])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from hwnas.errors import SamplerError
from hwnas.samplers.coding import Codes, Coding
from hwnas.samplers.facts import PROPOSAL, Domain, Function, History, Known, Learnt, Reader, proposals
from hwnas.samplers.model import LEAST, MOST_KNOWN, WORST, Model, Tuner
from hwnas.stats import Z90

Array = NDArray[np.float64]
LEARNT, KNOWN = "learnt", "known"
_NO_TRIAL = create_trial(state=TrialState.WAITING)  # its number is -1
GOOD = 60  # number of evaluated settings from which candidates are bred
_YIELDS, _APART = 4, 8  # attempts to find another setting; number of workers that take different ones at once
NEAR = 0.15  # share of the way from the limit to the cheapest setting that counts as right below the limit
_CLIMBS = 30  # generations that look for a setting there
MUTANTS, CROSSINGS = 500, 250  # candidates bred from evaluated settings
GENERATIONS, CHILDREN, PARENTS = 4, 250, 50  # how the best of them evolve
_WALKS = 8  # a space counts as used up after so many samples without a new setting


@dataclass(frozen=True)
class Proposed:
    """Candidates with their scores, best first."""

    codes: Codes
    scores: Array


@dataclass(frozen=True)
class Belief:
    """What a model believes of a setting's learnt objective without its noise: mean and 90 % interval."""

    mean: float
    low: float
    high: float


class KnownObjectiveSampler(BaseSampler):
    """Models one objective and knows the others; the module's docstring has an example.

    search_space: parameters by name; None: those that every trial had so far.
    roles: `learnt` (once) or `known` for each of the study's objectives; None: the first is learnt.
    known, features, over, factor, canonical: functions of settings, see `facts.Known`.
    learnt: reads the learnt objective's value, and the standard deviation of its noise (0: unknown), from a complete
    trial; None: the recorded value.
    n_startup_trials: number of first trials, which are spread over the range of the known objective; with `over`, the
    last of them lies right below the limit, where the space reaches it.
    worst_quantile: quantile of the values that random settings are expected to reach. Hypervolume is counted from
    there (0: from the worst).
    rivals: settings that anybody would try. Once two of them are on a front of their own, hypervolume is counted from
    no lower than as far below its lowest value as that is below its best.

    Equal seeds give equal proposals with one worker. SamplerError at the first ask when roles, functions and study do
    not fit together; BudgetError when no setting is allowed.
    """

    def __init__(self, search_space: Mapping[str, BaseDistribution] | None = None, *,
                 roles: Sequence[str] | None = None, known: Function | None = None,
                 features: Function | None = None, over: Function | None = None, factor: Function | None = None,
                 canonical: Callable[[Codes], Codes] | None = None, learnt: Learnt | None = None,
                 n_startup_trials: int = 8, worst_quantile: float = WORST, rivals: Sequence[Mapping[str, Any]] = (),
                 seed: int | None = None) -> None:
        self._search_space = dict(search_space) if search_space is not None else None
        self._roles = None if roles is None else tuple(roles)
        if self._roles is not None and (self._roles.count(LEARNT) != 1 or {*self._roles} - {LEARNT, KNOWN}):
            raise ValueError(f"roles must be 'known' but for one 'learnt', got {list(self._roles)}")
        if n_startup_trials < LEAST:
            raise ValueError(f"n_startup_trials must be at least {LEAST}, got {n_startup_trials}")
        self._known = Known(known, features, over, factor, canonical)
        if not 0 <= worst_quantile < 1:
            raise ValueError(f"worst_quantile must lie from 0 to below 1, got {worst_quantile}")
        self._learnt, self._first = learnt, n_startup_trials
        self._worst, self._rivals = worst_quantile, rivals
        self._rng = LazyRandomState(seed)
        self._independent = RandomSampler(seed=seed)
        self._intersection = IntersectionSearchSpace()
        self._tuner = Tuner()
        self._at: tuple[Domain, Reader] | None = None
        self._directions: list[StudyDirection] = []

    def reseed_rng(self) -> None:
        """Take a new random seed."""
        self._rng.rng.seed()
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are sampled together: the search space given, or those that every trial had so far."""
        if self._search_space is not None:
            return dict(self._search_space)
        return dict(self._intersection.calculate(study))

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        """A random value, for a parameter outside the relative search space."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
                        ) -> dict[str, Any]:
        """The setting to try next, as parameters by name; {} for a trial whose parameters are fixed."""
        if not search_space or {*search_space} <= {*trial.system_attrs.get("fixed_params", {})}:
            return {}
        domain, reader = self._domain(study, search_space)
        history = reader.read(study.get_trials(deepcopy=False), trial.number, study.study_name)
        rng = np.random.default_rng(self._rng.rng.randint(0, 2**32, 4, dtype=np.uint32))
        ranked = self._rank(domain, history, study.study_name, rng)
        return domain.coding.decode(_publish(study, trial, ranked))

    def beliefs(self, study: optuna.Study) -> dict[int, Belief]:
        """What the model of the whole study believes of each trial that has a value, by the trial's number.

        It does not matter which sampler asked for the trials. The best of many noisy values is too high on average;
        the best belief is not. {} where there are too few values for a model.
        """
        domain, reader = self._domain(study, self.infer_relative_search_space(study, _NO_TRIAL))
        trials = study.get_trials(deepcopy=False)
        history = reader.read(trials, _NO_TRIAL.number, study.study_name)
        history = replace(history, pending=history.pending[:0])
        codes = {trial.number: row for trial in trials
                 if (row := reader.codes_of(trial, study.study_name)) is not None}
        if len(codes) < LEAST:
            return {}
        model = Model(domain, history, Tuner(), len(history.values), study.study_name, self._worst)
        rows = np.array(list(codes.values()))
        mean, std = model.process.predict(domain.inputs(rows, domain.costs(rows)))
        ends = [reader.sign * model.warp.inverse(mean + z * std) for z in (0.0, -Z90, Z90)]
        return {number: Belief(float(middle), float(min(pair)), float(max(pair)))
                for number, middle, *pair in zip(codes, *ends, strict=True)}

    def _domain(self, study: optuna.Study, search_space: Mapping[str, BaseDistribution]) -> tuple[Domain, Reader]:
        if self._at is None or self._at[0].search_space != search_space or self._directions != study.directions:
            self._directions = study.directions
            roles = self._roles or (LEARNT, *[KNOWN] * (len(study.directions) - 1))
            if len(roles) != len(study.directions):
                raise SamplerError(f"{len(roles)} roles ({', '.join(roles)}) for a study of {len(study.directions)} "
                                   "objectives. Give one role for each.")
            if roles.count(KNOWN) > MOST_KNOWN:
                raise SamplerError(f"{roles.count(KNOWN)} known objectives; at most {MOST_KNOWN} can be searched with.")
            signs = [1.0 if direction == StudyDirection.MINIMIZE else -1.0 for direction in study.directions]
            domain = Domain(search_space, self._known, [sign for sign, role in zip(signs, roles, strict=True)
                                                        if role == KNOWN], self._rivals)
            index = roles.index(LEARNT)
            learnt = self._learnt or (lambda trial: (float(trial.values[index]), 0.0))
            self._at = domain, Reader(domain.coding, learnt, -signs[index], domain.canonical)
        return self._at

    def _rank(self, domain: Domain, history: History, study: str, rng: np.random.Generator) -> Codes:
        """Settings to ask for, the best first, each of them once: workers that collide take later ones."""
        taken = set(_keys(np.concatenate([history.taken, history.pending])))
        asked, known = len(history.codes) + len(history.pending), int((~history.failed).sum())
        if asked >= self._first and known >= LEAST:
            model = Model(domain, history, self._tuner, self._first, study, self._worst)
            proposed = propose(rng, domain.coding, model.good(GOOD),
                               lambda codes: _score_new(domain, model, codes, taken))
            if len(proposed.codes):
                return proposed.codes
        spread = _spread_out(domain, taken, asked, self._first, rng)
        _, first = np.unique(np.nan_to_num(spread, nan=-1.0), axis=0, return_index=True)
        return np.asarray(spread[np.sort(first)])


def _score_new(domain: Domain, model: Model, codes: Codes, taken: set[bytes]) -> tuple[Codes, Array]:
    """The codes that are new and allowed, and the expected gain of each."""
    codes = np.unique(domain.canonical(codes), axis=0)
    codes = _new(codes, taken)
    codes = codes[domain.over(codes) <= 0]
    return codes, model.gains(codes) if len(codes) else np.zeros(0)


def _spread_out(domain: Domain, taken: set[bytes], asked: int, first: int, rng: np.random.Generator) -> Codes:
    """Random settings that are new and allowed, the wanted ones first.

    The known objective's range is cut into `first` parts. Settings near a random place in the `asked`-th part come
    first. In the first part, this place is the cheapest setting: a front ends there, and a model knows least about it.
    In the last part it is right below the limit, if there is one: random settings are seldom so dear.
    If no new setting is found, the result is any random one.
    """
    for _ in range(_WALKS):
        codes = domain.canonical(domain.coding.sample(rng, 256))
        codes = np.concatenate([codes[domain.over(codes) <= 0], domain.sample[rng.permutation(len(domain.sample))]])
        codes = _new(codes, taken)
        if len(codes):
            break
    else:
        return domain.coding.sample(rng, 1)
    costs = domain.costs(codes)
    if not costs.shape[1]:
        return codes
    part = _bit_reversed(first)[asked % first]
    if part == first - 1 and domain.known.over is not None:
        return _below_limit(domain, codes, taken, rng)
    place = (part + rng.random()) / first if part else 0.0
    wanted = np.quantile(domain.sample_costs[:, 0], place)
    return np.asarray(codes[np.argsort(np.abs(costs[:, 0] - wanted), kind="stable")])


def _below_limit(domain: Domain, codes: Codes, taken: set[bytes], rng: np.random.Generator) -> Codes:
    """New allowed settings, those first that are nearest to a random place right below the limit.

    As long as none of `codes` lies there, the nearest ones are changed.
    """
    over = domain.over(codes)
    edge = NEAR * float(domain.over(domain.sample).min())
    wanted = edge * rng.random()
    for _ in range(_CLIMBS):
        order = np.argsort(np.abs(over - wanted), kind="stable")
        codes, over = codes[order], over[order]
        if over[0] >= edge:
            break
        moved = _new(domain.canonical(domain.coding.mutate(np.repeat(codes[:50], 5, axis=0), rng)), taken)
        codes, over = np.concatenate([codes, moved]), np.concatenate([over, domain.over(moved)])
        codes, over = codes[over <= 0], over[over <= 0]
    return np.asarray(codes[np.argsort(np.abs(over - wanted), kind="stable")])


def _bit_reversed(n: int) -> list[int]:
    """0 to n - 1 in the order of van der Corput's sequence: every stretch of it covers the whole range evenly."""
    def inverse(index: int) -> float:
        return float(sum((index >> bit & 1) / 2 ** (bit + 1) for bit in range(index.bit_length())))

    inverses = [inverse(index) for index in range(n)]
    return [int(rank) for rank in np.argsort(np.argsort(inverses))]


def propose(rng: np.random.Generator, coding: Coding, good: Codes, score: Callable[[Codes], tuple[Codes, Array]]
            ) -> Proposed:
    """Candidates by descending score: mutants and crossings of good settings, which then evolve on the score.

    `good` [n, p], n at least 1, are the settings to start from, best first. `score` takes codes and returns those
    that may be asked for (canonical, unseen) with their scores.
    """
    # The first ones are drawn more often.
    drawn = np.minimum((rng.random(MUTANTS) ** 1.5 * len(good)).astype(np.int64), len(good) - 1)
    pool = [coding.mutate(good[drawn], rng), crossed(rng, good, CROSSINGS)]
    proposed = _join(score, np.concatenate(pool), Proposed(np.zeros((0, len(coding.columns))), np.zeros(0)))
    for _ in range(GENERATIONS):
        if not len(proposed.codes):
            break
        parents = proposed.codes[: PARENTS]
        half = CHILDREN // 2
        children = [coding.mutate(parents[rng.integers(0, len(parents), CHILDREN - half)], rng),
                    coding.mutate(crossed(rng, parents, half), rng)]
        proposed = _join(score, np.concatenate(children), proposed)
    return proposed


def crossed(rng: np.random.Generator, parents: Codes, n: int) -> Codes:
    """Uniform crossings [n, p] of random pairs."""
    left, right = (parents[rng.integers(0, len(parents), n)] for _ in range(2))
    return np.where(rng.random(left.shape) < 0.5, left, right)


def _join(score: Callable[[Codes], tuple[Codes, Array]], codes: Codes, before: Proposed) -> Proposed:
    """All of `before` and the new ones of `codes`, best first; equal scores are in the order of their codes."""
    new, scores = score(np.unique(codes, axis=0))
    every, values = np.concatenate([before.codes, new]), np.concatenate([before.scores, scores])
    every, first = np.unique(every, axis=0, return_index=True)
    values = values[first]
    order = np.argsort(-values, kind="stable")
    return Proposed(every[order], values[order])


def _publish(study: optuna.Study, trial: FrozenTrial, ranked: Codes) -> Codes:
    """Publish the first of `ranked` that no other trial has published since the study was read; returns it.

    A setting is published whole before it is used. If several workers publish the same one at once, all see it and
    move on to different ones.
    """
    row = ranked[0]
    for attempt in range(_YIELDS):
        row = ranked[min(attempt and (attempt - 1) * _APART + 1 + trial.number % _APART, len(ranked) - 1)]
        # Optuna gives samplers no public way to write to a running trial.
        study._storage.set_trial_system_attr(trial._trial_id, PROPOSAL, row.tolist())
        if row.tolist() not in proposals(study.get_trials(deepcopy=False), trial.number):
            break
    return np.asarray(row)


def _new(codes: Codes, taken: set[bytes]) -> Codes:
    return np.asarray(codes[[key not in taken for key in _keys(codes)]])


def _keys(codes: Codes) -> list[bytes]:
    rows = np.ascontiguousarray(np.nan_to_num(codes, nan=-1.0))
    return [row.tobytes() for row in rows]
