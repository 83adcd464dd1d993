"""Samplers by name (ours, Optuna's, third parties' through the entry points `hwnas.samplers`), and how they ask.

`Asking` wraps a sampler and makes it repeatable, aware of the cap, not misled by duplicates. It solves three problems.
Optuna's samplers restart their random stream in every process, so a resumed search would ask for its first networks
again. NSGA-II, NSGA-III and GP ignore PRUNED trials, so they would never learn where the cap lies. Genetic samplers
leave queued trials out of every generation.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import signature
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseGASampler,
    BaseSampler,
    GPSampler,
    NSGAIIISampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.trial import FrozenTrial, TrialState

from hwnas.cli.options import defaults, option, read_options, read_value
from hwnas.errors import ConfigError, UnknownName
from hwnas.samplers.informed import Context, informed
from hwnas.study.objective import COSTS
from hwnas.study.record import DUPLICATE, FAILED, INFEASIBLE, VALUES, minimised, outcome


class Asking(BaseSampler):
    """Wraps the sampler `inner`: seeds it before each ask, and shows it the study through a view.

    The seed of an ask comes from `seed` and the ask's place in the study. In the view, a trial over the cap is a
    COMPLETE one that violates its constraint. Its costs are the known ones; its other values are the mean of the
    values at the time of its ask. Duplicates are left out.
    With one worker, the same seed asks for the same networks, whether or not the search was interrupted. A resumed GP
    may differ slightly, because it warm-starts its fits.
    """

    def __init__(self, inner: BaseSampler, seed: int) -> None:
        self.inner = inner
        self._seed = seed
        self._states = _random_states(inner, set())
        self._stand_ins: dict[str, dict[int, FrozenTrial]] = {}  # by the study's name and the trial's number

    def __str__(self) -> str:
        return str(self.inner)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """See optuna.samplers.BaseSampler: the inner sampler's answer for the view."""
        return self.inner.infer_relative_search_space(self._view(study), trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
                        ) -> dict[str, Any]:
        """See optuna.samplers.BaseSampler: the inner sampler's answer for the view."""
        return self.inner.sample_relative(self._view(study), trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        """See optuna.samplers.BaseSampler: the inner sampler's answer for the view."""
        return self.inner.sample_independent(self._view(study), trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed every random state from the trial's place. Lost trials do not count: their places are used again."""
        view = self._view(study)
        place = trial.number - sum(
            1 for other in view.raw()
            if other.number < trial.number and other.state == TrialState.FAIL and outcome(other) != FAILED)
        for index, state in enumerate(self._states):
            words = np.random.SeedSequence([self._seed, place, index]).generate_state(4)
            state.rng.seed(words)
        self.inner.before_trial(view, trial)
        if "fixed_params" in trial.system_attrs and isinstance(self.inner, BaseGASampler):
            self.inner.get_trial_generation(view, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
                    ) -> None:
        """Let the inner sampler see the end of the trial."""
        self.inner.after_trial(self._view(study), trial, state, values)

    def reseed_rng(self) -> None:
        """Let the inner sampler take a new seed."""
        self.inner.reseed_rng()

    def _view(self, study: optuna.Study) -> View:
        return View(study, self._stand_ins.setdefault(study.study_name, {}))


class View(optuna.Study):
    """A study as a sampler should see it. Only the trials differ from the study's own.

    `stand_ins` are the trials shown in place of others before, by number. Optuna's samplers read the trials by
    `_get_trials`, which has no public name. It returns the trials read at the start of the ask; `get_trials` reads
    them again.
    """

    def __init__(self, study: optuna.Study, stand_ins: dict[int, FrozenTrial]) -> None:
        self.__dict__.update(study.__dict__)
        self._study = study
        self._stand_ins = stand_ins

    def raw(self) -> list[FrozenTrial]:
        """The study's own trials, from Optuna's cache.

        Optuna refreshes it at each ask, so an ask reads the database once, however often the sampler reads trials.
        """
        return self._study._get_trials(deepcopy=False, use_cache=True)

    def _get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
                    ) -> list[FrozenTrial]:
        return self._show(self.raw(), deepcopy, states)

    def get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None) -> list[FrozenTrial]:
        """The study's trials as a sampler should see them, read again."""
        return self._show(self._study.get_trials(deepcopy=False), deepcopy, states)

    def _show(self, raw: Sequence[FrozenTrial], deepcopy: bool, states: Container[TrialState] | None
                 ) -> list[FrozenTrial]:
        seen = [self._show_trial(trial, raw) if trial.state == TrialState.PRUNED else _shown_line(trial)
                for trial in raw]
        wanted = [trial for trial in seen if trial is not None and (states is None or trial.state in states)]
        return copy.deepcopy(wanted) if deepcopy else wanted

    def _show_trial(self, trial: FrozenTrial, raw: Sequence[FrozenTrial]) -> FrozenTrial | None:
        kind = outcome(trial)
        if kind == DUPLICATE:
            return None
        if kind != INFEASIBLE:
            return _shown_line(trial)
        if trial.number not in self._stand_ins:
            stand_in = copy.copy(trial)
            stand_in.state = TrialState.COMPLETE
            stand_in.values = self._values(trial, raw)
            self._stand_ins[trial.number] = stand_in
        return self._stand_ins[trial.number]

    def _values(self, trial: FrozenTrial, raw: Sequence[FrozenTrial]) -> list[float]:
        earlier = [other.values for other in raw if other.state == TrialState.COMPLETE and other.number < trial.number]
        values = np.mean(earlier, axis=0).tolist() if earlier else [0.0] * len(self.directions)
        for index, name in enumerate(minimised(self._study)[:len(values) - 1], 1):
            cost = trial.user_attrs.get(COSTS[name].predicted, math.nan)
            if math.isfinite(cost):
                values[index] = cost
        return [float(value) for value in values]


def _shown_line(trial: FrozenTrial) -> FrozenTrial:
    """A line that was trained, running or dropped, as complete with what it answers so far; any other trial as it
    is."""
    if trial.state == TrialState.COMPLETE or not trial.user_attrs.get(VALUES):
        return trial
    shown = copy.copy(trial)
    shown.state, shown.values = TrialState.COMPLETE, list(trial.user_attrs[VALUES])
    return shown


def _random_states(thing: Any, seen: set[int]) -> list[LazyRandomState]:
    """Every random state in a sampler and in its parts, each once, in a fixed order."""
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, LazyRandomState):
        return [thing]
    if not type(thing).__module__.startswith(("optuna.samplers", "hwnas.samplers")):
        return []
    parts = getattr(thing, "__dict__", {})
    return [state for name in sorted(parts) for state in _random_states(parts[name], seen)]


GROUP = "hwnas.samplers"

OWN = "hwnas"


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """Options of our known-objective sampler."""

    n_startup_trials: int = option(8, low=1, help="random networks first")
    worst_quantile: float = option(0.25, low=0, high=1, help="of top-1, from which on a front is wanted")


@dataclass(frozen=True, slots=True)
class GeneticOptions:
    """Options of NSGA-II. Generations of 10 suit 30 to 500 evaluations; Optuna's 50 leave the first 50 random."""

    population_size: int = option(10, low=1)
    mutation_prob: float | None = option(None, low=0, high=1)
    crossover_prob: float = option(0.9, low=0, high=1)
    swapping_prob: float = option(0.5, low=0, high=1)


@dataclass(frozen=True, slots=True)
class ReferenceOptions(GeneticOptions):
    """Options of NSGA-III."""

    dividing_parameter: int = option(12, low=1)


@dataclass(frozen=True, slots=True)
class ParzenOptions:
    """Options of TPE. It samples all parameters together, so that an ask reads the study once."""

    n_startup_trials: int = option(10, low=1)
    n_ei_candidates: int = option(24, low=1)
    multivariate: bool = True
    constant_liar: bool = True


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of Optuna's Gaussian process."""

    n_startup_trials: int = option(10, low=1)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of random search: none."""


_BUILT_IN: dict[str, tuple[Callable[..., BaseSampler], type[Any]]] = {
    "nsga2": (NSGAIISampler, GeneticOptions), "nsga3": (NSGAIIISampler, ReferenceOptions),
    "tpe": (TPESampler, ParzenOptions), "gp": (GPSampler, ProcessOptions), "random": (RandomSampler, NoOptions)}


def sampler_names() -> list[str]:
    """Every name that `load_sampler` accepts."""
    return sorted({OWN, *_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def default_options(name: str) -> dict[str, Any]:
    """The options of a sampler with their defaults; {} for a sampler of another package."""
    return defaults(OwnOptions if name == OWN else _BUILT_IN[name][1]) if name == OWN or name in _BUILT_IN else {}


def load_sampler(name: str, seed: int, context: Context | None = None, **options: Any) -> Asking:
    """The sampler `name`, seeded. `context` is for ours, which knows nothing about the networks without it."""
    return read_sampler(name, seed, options)(context)


def read_sampler(name: str, seed: int, options: Mapping[str, Any]) -> Callable[[Context | None], Asking]:
    """Check the options of the sampler `name`; returns a function that makes it from a Context.

    A third party's entry point is a callable `(seed, **options) -> BaseSampler`. If it takes `context`, it gets the
    same Context as ours: space, predicted latency, objective with its costs, cap. The cap needs no constraints_func,
    because trials carry their constraint (Optuna 5). UnknownName for another name; ConfigError for an option that the
    sampler lacks, or whose value it refuses.
    """
    read_value(seed, int, "seed", low=0)
    if name == OWN:
        wanted = asdict(read_options(OwnOptions, options, "sampler_options"))
        return lambda context: Asking(_made(name, partial(informed, context), seed, wanted), seed)
    if name in _BUILT_IN:
        make, cls = _BUILT_IN[name]
        options = asdict(read_options(cls, options, "sampler_options"))
        if name == "gp" and not (find_spec("torch") and find_spec("scipy")):
            raise ConfigError("sampler gp needs torch and scipy: pip install torch scipy, or choose another sampler.")
    else:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            raise UnknownName("sampler", name, sampler_names())
        make = points[name].load()
        if "context" in signature(make).parameters:
            return lambda context: Asking(_made(name, partial(make, context=context), seed, options), seed)
    sampler = Asking(_made(name, make, seed, options), seed)
    return lambda context: sampler


def _made(name: str, make: Callable[..., BaseSampler], seed: int, options: Mapping[str, Any]) -> BaseSampler:
    try:
        with warnings.catch_warnings():  # NSGA-III and some options are "experimental" in Optuna.
            warnings.simplefilter("ignore", ExperimentalWarning)
            return make(seed=seed, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler {name}: {' '.join(str(error).split())} (options {dict(options)}).") from error
