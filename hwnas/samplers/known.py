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
from hwnas.samplers.coding import Codes
from hwnas.samplers.domain import Domain, Function, KnownFunctions
from hwnas.samplers.history import PROPOSAL, History, ReadValue, list_proposals, read_history
from hwnas.samplers.model import LEAST, MOST_KNOWN, WORST, Model, Tuner
from hwnas.stats import Z90

Array = NDArray[np.float64]
LEARNT, KNOWN = "learnt", "known"
_NO_TRIAL = create_trial(state=TrialState.WAITING)  # its number is -1
GOOD = 60  # number of evaluated settings from which candidates are bred
PUBLISH_ATTEMPTS = 4  # of a worker whose setting another one has published
WORKERS_APART = 8  # number of workers that take different settings after a collision
NEAR = 0.15  # share of the way from the limit to the cheapest setting that counts as right below the limit
CLIMBS = 30  # generations that look for a setting there
MUTANTS, CROSSINGS = 500, 250  # candidates bred from evaluated settings
GENERATIONS, CHILDREN, PARENTS = 4, 250, 50  # how the best of them evolve
RANDOM_ROUNDS = 8  # a space counts as used up after so many samples without a new setting


@dataclass(frozen=True)
class Belief:
    """What a model believes of a setting's learnt objective without its noise: mean and 90 % interval."""

    mean: float
    low: float
    high: float


class KnownObjectiveSampler(BaseSampler):
    """Models one objective and knows the others; the module's docstring has an example.

    Equal seeds give equal proposals with one worker. The first ask raises a SamplerError if roles, functions and study
    do not fit together, and a BudgetError if no setting is allowed.

    Args:
        search_space: Parameters by name; None: those that every trial had so far.
        roles: `learnt` (once) or `known` for each of the study's objectives; None: the first is learnt.
        known, features, over, factor, canonical: Functions of settings, see `KnownFunctions`; `known` computes the
            known objectives.
        learnt: Reads the learnt objective's value, and the standard deviation of its noise (0: unknown), from a
            complete trial; None: the recorded value.
        n_startup_trials: Number of first trials, which are spread over the range of the known objective. With `over`,
            the last of them is right below the limit, if the space reaches it.
        worst_quantile: Quantile of the values that random settings are expected to reach. Hypervolume is counted from
            there (0: from the worst).
        rivals: Settings that anybody would try. Once two of them are on a front of their own, hypervolume is counted
            from no lower than as far below its lowest value as that is below its best.
        seed: Of all random numbers; None: a random one.

    Raises:
        ValueError: An option breaks its rule.
    """

    def __init__(self, search_space: Mapping[str, BaseDistribution] | None = None, *,
                 roles: Sequence[str] | None = None, known: Function | None = None,
                 features: Function | None = None, over: Function | None = None, factor: Function | None = None,
                 canonical: Callable[[Codes], Codes] | None = None, learnt: ReadValue | None = None,
                 n_startup_trials: int = 8, worst_quantile: float = WORST, rivals: Sequence[Mapping[str, Any]] = (),
                 seed: int | None = None) -> None:
        if roles is not None and ([*roles].count(LEARNT) != 1 or {*roles} - {LEARNT, KNOWN}):
            raise ValueError(f"roles must be 'known' but for one 'learnt', got {list(roles)}")
        if n_startup_trials < LEAST:
            raise ValueError(f"n_startup_trials must be at least {LEAST}, got {n_startup_trials}")
        if not 0 <= worst_quantile < 1:
            raise ValueError(f"worst_quantile must be from 0 to below 1, got {worst_quantile}")
        self._search_space = None if search_space is None else dict(search_space)
        self._roles = None if roles is None else tuple(roles)
        self._functions = KnownFunctions(known, features, over, factor, canonical)
        self._read_value, self._first = learnt, n_startup_trials
        self._worst, self._rivals = worst_quantile, rivals
        self._rng = LazyRandomState(seed)
        self._independent = RandomSampler(seed=seed)
        self._intersection = IntersectionSearchSpace()
        self._tuner = Tuner(n_startup_trials)
        self._domain: Domain | None = None
        self._encoded: dict[str, dict[int, Codes | None]] = {}  # codes of finished trials, by study and number
        self._directions: list[StudyDirection] = []
        self._learnt_index = 0

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
        domain = self._prepare_domain(study, search_space)
        history = self._read_history(study, domain, trial.number)
        rng = np.random.default_rng(self._rng.rng.randint(0, 2**32, 4, dtype=np.uint32))
        return domain.coding.decode(_publish(study, trial, self._rank_settings(domain, history, rng)))

    def beliefs(self, study: optuna.Study) -> dict[int, Belief]:
        """What the model of the whole study believes of each trial that has a value, by the trial's number.

        It does not matter which sampler asked for the trials. The best of many noisy values is too high on average;
        the best belief is not. {} if there are too few values for a model.
        """
        domain = self._prepare_domain(study, self.infer_relative_search_space(study, _NO_TRIAL))
        history = self._read_history(study, domain, _NO_TRIAL.number)
        good = ~history.failed
        if good.sum() < LEAST:
            return {}
        model = Model(domain, replace(history, pending=history.pending[:0]), Tuner(len(good)), self._worst)
        codes = history.codes[good]
        mean, std = model.process.predict(domain.inputs(codes, domain.costs(codes)))
        ends = [self._sign * model.warp.inverse(mean + z * std) for z in (0.0, -Z90, Z90)]
        return {number: Belief(middle, min(pair), max(pair)) for number, middle, *pair in
                zip(history.numbers[good].tolist(), *(end.tolist() for end in ends), strict=True)}

    def _prepare_domain(self, study: optuna.Study, search_space: Mapping[str, BaseDistribution]) -> Domain:
        """The domain of a study; the last one is kept. SamplerError if roles and study do not fit together."""
        directions = study.directions
        if self._domain is None or self._domain.search_space != search_space or self._directions != directions:
            roles = self._roles or (LEARNT, *[KNOWN] * (len(directions) - 1))
            if len(roles) != len(directions):
                raise SamplerError(f"{len(roles)} roles ({', '.join(roles)}) for a study of {len(directions)} "
                                   "objectives. Give one role for each.")
            if roles.count(KNOWN) > MOST_KNOWN:
                raise SamplerError(f"{roles.count(KNOWN)} known objectives; at most {MOST_KNOWN} can be searched with.")
            signs = [1.0 if direction == StudyDirection.MINIMIZE else -1.0
                     for direction, role in zip(directions, roles, strict=True) if role == KNOWN]
            self._domain = Domain(search_space, self._functions, signs, self._rivals)
            self._directions, self._learnt_index = directions, roles.index(LEARNT)
            self._tuner, self._encoded = Tuner(self._first), {}
        return self._domain

    @property
    def _sign(self) -> float:
        return 1.0 if self._directions[self._learnt_index] == StudyDirection.MAXIMIZE else -1.0

    def _read_history(self, study: optuna.Study, domain: Domain, number: int) -> History:
        read_value = self._read_value or (lambda trial: (float(trial.values[self._learnt_index]), 0.0))
        encoded = self._encoded.setdefault(study.study_name, {})
        return read_history(domain, study.get_trials(deepcopy=False), read_value, self._sign, number, encoded)

    def _rank_settings(self, domain: Domain, history: History, rng: np.random.Generator) -> Codes:
        """Settings to ask for, the best first, each of them once: workers that collide take later ones."""
        taken = set(_keys(np.concatenate([history.taken, history.pending])))
        n_asked = len(history.codes) + len(history.pending)
        if n_asked >= self._first and (~history.failed).sum() >= LEAST:
            model = Model(domain, history, self._tuner, self._worst)
            proposals = propose(rng, domain, model, taken)
            if len(proposals):
                return proposals
        spread = _spread_out(domain, taken, n_asked, self._first, rng)
        _, first = np.unique(np.nan_to_num(spread, nan=-1.0), axis=0, return_index=True)
        return np.asarray(spread[np.sort(first)])


def _spread_out(domain: Domain, taken: set[bytes], n_asked: int, n_parts: int, rng: np.random.Generator) -> Codes:
    """Random settings that are new and allowed, the wanted ones first.

    The known objective's range is cut into `n_parts`, and each ask has a part. Settings near a random place in it come
    first. In the first part, this place is the cheapest setting: a front ends there, and a model knows least about it.
    In the last part it is right below the limit, if there is one: random settings are seldom so dear.
    If no new setting exists, the result is any random one.
    """
    for _ in range(RANDOM_ROUNDS):
        codes = domain.canonical(domain.coding.sample(rng, 256))
        codes = np.concatenate([codes[domain.over(codes) <= 0], domain.sample[rng.permutation(len(domain.sample))]])
        codes = _select_new(codes, taken)
        if len(codes):
            break
    else:
        return domain.coding.sample(rng, 1)
    costs = domain.costs(codes)
    if not costs.shape[1]:
        return codes
    # Parts are in van der Corput's order, by reversed bits: every stretch of it covers the whole range evenly.
    part = np.argsort(np.argsort([int(f"{index:032b}"[::-1], 2) for index in range(n_parts)]))[n_asked % n_parts]
    if part == n_parts - 1 and domain.functions.over is not None:
        return _approach_limit(domain, codes, taken, rng)
    place = (part + rng.random()) / n_parts if part else 0.0
    wanted_cost = np.quantile(domain.sample_costs[:, 0], place)
    return np.asarray(codes[np.argsort(np.abs(costs[:, 0] - wanted_cost), kind="stable")])


def _approach_limit(domain: Domain, codes: Codes, taken: set[bytes], rng: np.random.Generator) -> Codes:
    """New allowed settings, those first that are nearest to a random place right below the limit.

    As long as none of `codes` is there, the nearest ones are changed.
    """
    over = domain.over(codes)
    edge = NEAR * float(domain.over(domain.sample).min())
    wanted = edge * rng.random()
    for _ in range(CLIMBS):
        order = np.argsort(np.abs(over - wanted), kind="stable")
        codes, over = codes[order], over[order]
        if over[0] >= edge:
            break
        mutants = domain.canonical(domain.coding.mutate(np.repeat(codes[:50], 5, axis=0), rng))
        mutants = _select_new(mutants, taken)
        codes, over = np.concatenate([codes, mutants]), np.concatenate([over, domain.over(mutants)])
        codes, over = codes[over <= 0], over[over <= 0]
    return np.asarray(codes[np.argsort(np.abs(over - wanted), kind="stable")])


def propose(rng: np.random.Generator, domain: Domain, model: Model, taken: set[bytes]) -> Codes:
    """New allowed settings by descending gain; equal gains are in the order of their codes.

    They are mutants and crossings of good evaluated settings, which then evolve on the expected gain.
    """
    coding, good = domain.coding, model.good(GOOD)
    drawn = (rng.random(MUTANTS) ** 1.5 * len(good)).astype(np.int64)  # the first ones are drawn more often
    bred = [coding.mutate(good[drawn], rng), cross(rng, good, CROSSINGS)]
    codes, gains = np.zeros((0, len(coding.columns))), np.zeros(0)
    for _ in range(1 + GENERATIONS):
        # 1. Score those that are new and allowed.
        new = _select_new(np.unique(domain.canonical(np.concatenate(bred)), axis=0), taken)
        new = new[domain.over(new) <= 0]
        new_gains = model.gains(new) if len(new) else np.zeros(0)
        # 2. Keep all, each once, the best first.
        codes, first = np.unique(np.concatenate([codes, new]), axis=0, return_index=True)
        gains = np.concatenate([gains, new_gains])[first]
        order = np.argsort(-gains, kind="stable")
        codes, gains = codes[order], gains[order]
        if not len(codes):
            break
        # 3. Breed the next generation from the best.
        parents, half = codes[:PARENTS], CHILDREN // 2
        bred = [coding.mutate(parents[rng.integers(0, len(parents), CHILDREN - half)], rng),
                coding.mutate(cross(rng, parents, half), rng)]
    return codes


def cross(rng: np.random.Generator, parents: Codes, n: int) -> Codes:
    """Uniform crossings [n, p] of random pairs."""
    left, right = (parents[rng.integers(0, len(parents), n)] for _ in range(2))
    return np.where(rng.random(left.shape) < 0.5, left, right)


def _publish(study: optuna.Study, trial: FrozenTrial, ranked: Codes) -> Codes:
    """Publish the first of `ranked` that no other trial has published since the study was read; returns it.

    A setting is published whole before it is used. If several workers publish the same one at once, all see it and
    move on to different ones.
    """
    row = ranked[0]
    for attempt in range(PUBLISH_ATTEMPTS):
        if attempt:
            row = ranked[min((attempt - 1) * WORKERS_APART + 1 + trial.number % WORKERS_APART, len(ranked) - 1)]
        # Optuna gives samplers no public way to write to a running trial.
        study._storage.set_trial_system_attr(trial._trial_id, PROPOSAL, row.tolist())
        if row.tolist() not in list_proposals(study.get_trials(deepcopy=False), trial.number):
            break
    return np.asarray(row)


def _select_new(codes: Codes, taken: set[bytes]) -> Codes:
    return np.asarray(codes[[key not in taken for key in _keys(codes)]])


def _keys(codes: Codes) -> list[bytes]:
    rows = np.ascontiguousarray(np.nan_to_num(codes, nan=-1.0))
    return [row.tobytes() for row in rows]
