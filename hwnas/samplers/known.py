"""KnownObjectiveSampler: an Optuna sampler for studies in which all objectives but one are known before a trial runs.

Latency, model size or price of a network can be looked up; only its accuracy needs a training. The sampler models this
one objective with a Gaussian process, and knows the others exactly. It asks for the setting that is expected to add
most hypervolume.

    import optuna
    from optuna.distributions import CategoricalDistribution, IntDistribution
    from hwnas.samplers.known import KnownFunctions, KnownObjectiveSampler

    space = {"depth": IntDistribution(1, 8), "width": CategoricalDistribution([16, 32, 64, 128])}

    def cost(codes):                         # known before anything runs; indices of values [n, 2] in, [n, 1] out
        return 0.16 * (codes[:, :1] + 1) * 2.0 ** codes[:, 1:]

    def objective(trial):
        depth, width = trial.suggest_int("depth", 1, 8), trial.suggest_categorical("width", [16, 32, 64, 128])
        return 1 - 1 / (1 + depth * width ** 0.5), 0.01 * depth * width          # the first is the expensive part

    sampler = KnownObjectiveSampler(space, KnownFunctions(cost), seed=0)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    study.optimize(objective, n_trials=30)
    print([trial.values for trial in study.best_trials])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from hwnas.errors import SamplerError
from hwnas.samplers.domain import Codes, Domain, History, ReadValue, read_history
from hwnas.samplers.domain import KnownFunctions as KnownFunctions
from hwnas.samplers.model import LEAST, MOST_KNOWN, Surrogate
from hwnas.stats import Z90

Array = NDArray[np.float64]
GOOD = 60  # number of evaluated settings from which candidates are bred
NEAR = 0.15  # share of the way from the limit to the cheapest setting that counts as right below the limit
MUTANTS, CROSSINGS = 500, 250  # candidates bred from evaluated settings
GENERATIONS, CHILDREN, PARENTS = 4, 250, 50  # rounds of evolution, new settings in each, and their parents
RANDOM_ROUNDS = 8  # a space counts as used up after so many samples without a new setting


@dataclass(frozen=True)
class Belief:
    """A model's belief about a setting's learnt objective without its noise: mean and 90 % interval."""

    mean: float
    low: float
    high: float


class KnownObjectiveSampler(BaseSampler):
    """A sampler that models the study's first objective and knows the others. The module's docstring has an example.

    Equal seeds give equal proposals with one worker. The first ask raises a SamplerError if functions and study do not
    fit together, and a BudgetError if no setting is allowed.

    Args:
        search_space: Categorical and integer parameters by name.
        functions: The known facts of settings; None: there are none.
        learnt: Reads the learnt objective's value, and the standard deviation of its noise (0: unknown), from a
            complete trial. If None, the recorded value is read.
        n_startup_trials: Number of first trials, LEAST or more, which are spread over the range of the known
            objective. With `over`, the last of them is right below the limit, if the space reaches it.
        seed: The seed of all random numbers; None: a random one.
    """

    def __init__(self, search_space: Mapping[str, BaseDistribution], functions: KnownFunctions | None = None, *,
                 learnt: ReadValue | None = None, n_startup_trials: int = 8, seed: int | None = None) -> None:
        self._search_space = dict(search_space)
        self._functions = functions or KnownFunctions()
        self._read_value = learnt or (lambda trial: (float(trial.values[0]), 0.0))
        self._first = n_startup_trials
        self._rng = LazyRandomState(seed)
        self._independent = RandomSampler(seed=seed)
        self._domain: Domain | None = None

    def reseed_rng(self) -> None:
        """Take a new random seed."""
        self._rng.rng.seed()
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
                        ) -> dict[str, Any]:
        """Return the setting to try next, as parameters by name; {} for a trial whose parameters are fixed."""
        if {*search_space} <= {*trial.system_attrs.get("fixed_params", {})}:
            return {}
        domain = self._prepare_domain(study)
        history = self._read_history(study, domain, trial.number)
        rng = np.random.default_rng(self._rng.rng.randint(0, 2**32, 4, dtype=np.uint32))
        taken = set(_keys(np.concatenate([history.taken, history.pending])))
        # The first asks spread out; then the model proposes, as soon as there are enough values for one.
        n_asked, proposals = len(taken), domain.sample[:0]
        if n_asked >= self._first and len(history.values) >= LEAST:
            proposals = propose(rng, domain, Surrogate(domain, history), taken)
        if not len(proposals):
            proposals = _spread_out(domain, taken, n_asked, self._first, rng)
        return domain.coding.decode(proposals[0])

    def beliefs(self, study: optuna.Study) -> dict[int, Belief]:
        """Return the model's belief about each trial that has a value, by the trial's number, from the whole study.

        Any sampler may have asked for the trials. The best of many noisy values is too high on average, the best belief
        is not. {} if there are too few values for a model.
        """
        domain = self._prepare_domain(study)
        history = self._read_history(study, domain)
        if len(history.values) < LEAST:
            return {}
        model = Surrogate(domain, replace(history, pending=history.pending[:0]))
        mean, std = model.process.predict(domain.inputs(history.codes, domain.costs(history.codes)))
        ends = [_sign(study) * model.warp.inverse(mean + z * std) for z in (0.0, -Z90, Z90)]
        return {number: Belief(middle, min(pair), max(pair)) for number, middle, *pair in
                zip(history.numbers.tolist(), *(end.tolist() for end in ends), strict=True)}

    def _prepare_domain(self, study: optuna.Study) -> Domain:
        """Return the domain of a study, the last one if it fits; SamplerError if the study cannot be searched."""
        n_known = len(study.directions) - 1
        if n_known > MOST_KNOWN or StudyDirection.MAXIMIZE in study.directions[1:]:
            raise SamplerError(f"{n_known} known objectives; at most {MOST_KNOWN} can be searched with, minimised.")
        if self._domain is None or self._domain.n_known != n_known:
            self._domain = Domain(self._search_space, self._functions, n_known)
        return self._domain

    def _read_history(self, study: optuna.Study, domain: Domain, without: int = -1) -> History:
        trials = [trial for trial in study.get_trials(deepcopy=False) if trial.number != without]
        return read_history(domain, trials, self._read_value, _sign(study))


def _sign(study: optuna.Study) -> float:
    """Return 1 if larger values of the learnt objective are better, otherwise -1."""
    return 1.0 if study.directions[0] == StudyDirection.MAXIMIZE else -1.0


def _spread_out(domain: Domain, taken: set[bytes], n_asked: int, n_parts: int, rng: np.random.Generator) -> Codes:
    """Return random settings that are new and allowed, the best suited first.

    The range of the first known objective is cut into `n_parts`, and each ask has a part. Settings near a random place
    in it come first. In the first part, this place is the cheapest setting: a front ends there, and a model knows least
    about it. In the last part it is right below the limit, if there is one: random settings are seldom so dear. If no
    new setting exists, the result is any random one.
    """
    # 1. Draw new settings: random ones that are allowed, and the domain's sample.
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
    # 2. Take the ask's part. In van der Corput's order (reversed bits) any successive parts cover the range evenly.
    part = np.argsort(np.argsort([int(f"{index:032b}"[::-1], 2) for index in range(n_parts)]))[n_asked % n_parts]
    if part == n_parts - 1 and domain.functions.over is not None:
        return _approach_limit(domain, codes, taken, rng)
    place = (part + rng.random()) / n_parts if part else 0.0
    target_cost = np.quantile(domain.sample_costs[:, 0], place)
    return np.asarray(codes[np.argsort(np.abs(costs[:, 0] - target_cost), kind="stable")])


def _approach_limit(domain: Domain, codes: Codes, taken: set[bytes], rng: np.random.Generator) -> Codes:
    """Return new allowed settings, the nearest to a random place right below the limit first."""
    edge = NEAR * float(domain.over(domain.sample).min())
    place = edge * rng.random()
    near, over = domain.climb(codes, lambda over: np.abs(over - place), lambda over: edge <= over[0] <= 0, rng)
    near = _select_new(near[over <= 0], taken)
    return near if len(near) else codes


def propose(rng: np.random.Generator, domain: Domain, model: Surrogate, taken: set[bytes]) -> Codes:
    """Return new allowed settings by descending gain; equal gains are in the order of their codes.

    They are mutants and crossings of good evaluated or pending settings, which then evolve on the expected gain.
    """
    coding, good = domain.coding, model.good(GOOD)
    drawn_rows = (rng.random(MUTANTS) ** 1.5 * len(good)).astype(np.int64)  # the first ones are drawn more often
    bred = [coding.mutate(good[drawn_rows], rng), cross(rng, good, CROSSINGS)]
    codes, gains = good[:0], np.zeros(0)
    for _ in range(1 + GENERATIONS):
        # 1. Score the settings that are new and allowed.
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
    """Return uniform crossings [n, p] of random pairs."""
    left, right = (parents[rng.integers(0, len(parents), n)] for _ in range(2))
    return np.where(rng.random(left.shape) < 0.5, left, right)


def _select_new(codes: Codes, taken: set[bytes]) -> Codes:
    return np.asarray(codes[[key not in taken for key in _keys(codes)]])


def _keys(codes: Codes) -> list[bytes]:
    return [row.tobytes() for row in codes]
