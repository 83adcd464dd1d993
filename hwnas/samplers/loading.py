"""Samplers by name: ours, Optuna's, and third parties' through the entry points `hwnas.samplers`.

`RepeatableSampler` wraps a sampler and makes it repeatable, aware of the cap, and not misled by duplicates. It solves
three problems. Optuna's samplers restart their random stream in every process, so a resumed search would ask for its
first networks again. NSGA-II and GP ignore PRUNED trials, so they would never learn the cap. Genetic samplers leave
queued trials out of every generation.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import EntryPoint
from inspect import signature
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseGASampler, BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.samplers._lazy_random_state import LazyRandomState
from optuna.trial import FrozenTrial, TrialState

from hwnas.cli.options import defaults, option, read_options, read_value
from hwnas.errors import ConfigError
from hwnas.samplers.informed import Context, informed
from hwnas.samplers.model import LEAST
from hwnas.study.objective import COSTS
from hwnas.study.record import DUPLICATE, FAILED, INFEASIBLE, minimised, outcome
from hwnas.system.libraries import find_offers


class RepeatableSampler(BaseSampler):
    """A wrapper that seeds the sampler `inner` before each ask, and shows it the study through a StudyView.

    The seed of an ask comes from `seed` and the ask's place in the study. With one worker, the same seed asks for the
    same networks, even if the search was interrupted. A resumed GP may differ slightly, because it warm-starts its
    fits.
    """

    def __init__(self, inner: BaseSampler, seed: int) -> None:
        self.inner = inner
        self._seed = seed
        self._states = _random_states(inner, set())

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self.inner.infer_relative_search_space(StudyView(study), trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
                        ) -> dict[str, Any]:
        return self.inner.sample_relative(StudyView(study), trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        return self.inner.sample_independent(StudyView(study), trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed every random state from the trial's place. Lost trials do not count: their places are used again."""
        view = StudyView(study)
        place = trial.number - sum(
            1 for other in view.read_all()
            if other.number < trial.number and other.state == TrialState.FAIL and outcome(other) != FAILED)
        for index, state in enumerate(self._states):
            state.rng.seed(np.random.SeedSequence([self._seed, place, index]).generate_state(4))
        self.inner.before_trial(view, trial)
        # A queued trial is not sampled: without this, a genetic sampler would leave it out of every generation.
        if "fixed_params" in trial.system_attrs and isinstance(self.inner, BaseGASampler):
            self.inner.get_trial_generation(view, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
                    ) -> None:
        self.inner.after_trial(StudyView(study), trial, state, values)


class StudyView(optuna.Study):
    """A study as a sampler should see it. Only the trials differ from the study's own.

    Duplicates are left out. A trial over the cap is a COMPLETE one that violates its constraint. Its costs are the
    known ones; its other values are the mean of the earlier trials' values.

    Optuna's samplers read the trials by `_get_trials`, which has no public name. Optuna refreshes the cache behind it
    at each ask, so an ask reads the database once, however often the sampler reads trials.
    """

    def __init__(self, study: optuna.Study) -> None:
        self.__dict__.update(study.__dict__)
        self._study = study

    def stop(self) -> None:
        """Do nothing: a sampler does not decide when a search is over."""

    def read_all(self) -> list[FrozenTrial]:
        """Return the study's own trials."""
        return self._study._get_trials(deepcopy=False, use_cache=True)

    def _get_trials(self, deepcopy: bool = True, states: Container[TrialState] | None = None, use_cache: bool = False
                    ) -> list[FrozenTrial]:
        columns = [COSTS[name].predicted for name in minimised(self._study)][:len(self.directions) - 1]
        # A trial over the cap has the mean of the trials before it only, so that later asks see the same values.
        total, n_complete = np.zeros(len(self.directions)), 0
        trials = []
        for trial in self.read_all():
            if trial.state == TrialState.COMPLETE:
                total, n_complete = total + trial.values, n_complete + 1
            elif trial.state == TrialState.PRUNED and outcome(trial) == DUPLICATE:
                continue
            elif trial.state == TrialState.PRUNED and outcome(trial) == INFEASIBLE:
                values = (total / max(n_complete, 1)).tolist()
                for index, column in enumerate(columns, 1):
                    cost = float(trial.user_attrs.get(column, math.nan))
                    values[index] = cost if math.isfinite(cost) else values[index]
                trial = copy.copy(trial)
                trial.state, trial.values = TrialState.COMPLETE, values
            if states is None or trial.state in states:
                trials.append(trial)
        return copy.deepcopy(trials) if deepcopy else trials


def _random_states(part: Any, seen: set[int]) -> list[LazyRandomState]:
    """Return every random state in a sampler and in its parts, each once, in a fixed order."""
    if id(part) in seen:
        return []
    seen.add(id(part))
    if isinstance(part, LazyRandomState):
        return [part]
    if not type(part).__module__.startswith(("optuna.samplers", "hwnas.samplers")):
        return []
    parts = getattr(part, "__dict__", {})
    return [state for name in sorted(parts) for state in _random_states(parts[name], seen)]


GROUP = "hwnas.samplers"  # entry points of other packages
OWN = "hwnas"


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """The options of our known-objective sampler."""

    n_startup_trials: int = option(8, low=LEAST, help="random networks first")


@dataclass(frozen=True, slots=True)
class StartOptions:
    """The options of Optuna's samplers that fit a model."""

    n_startup_trials: int = option(10, low=1)


@dataclass(frozen=True, slots=True)
class GeneticOptions:
    """The options of NSGA-II. Generations of 10 suit 30 to 500 evaluations; Optuna's 50 leave the first 50 random."""

    population_size: int = option(10, low=2)


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of random search: none."""


# TPE samples all parameters together, so that an ask reads the study once, and counts running trials as bad.
_TPE = partial(TPESampler, multivariate=True, constant_liar=True)
# Each built-in sampler: a callable `(seed, **options)`, and its options. Ours takes a Context as well.
_BUILT_IN: dict[str, tuple[Callable[..., BaseSampler], type[Any]]] = {
    OWN: (informed, OwnOptions), "nsga2": (NSGAIISampler, GeneticOptions), "tpe": (_TPE, StartOptions),
    "gp": (GPSampler, StartOptions), "random": (RandomSampler, NoOptions)}


def check_sampler(name: str) -> dict[str, EntryPoint]:
    """Return the entry points by name; UnknownName unless `read_sampler` accepts `name`."""
    return find_offers(GROUP, "sampler", name, _BUILT_IN)


def default_options(name: str) -> dict[str, Any]:
    """Return the options of a sampler with their defaults; {} for a sampler of another package."""
    return defaults(_BUILT_IN[name][1]) if name in _BUILT_IN else {}


def read_sampler(name: str, seed: int, options: Mapping[str, Any]) -> Callable[[Context | None], RepeatableSampler]:
    """Check the options of the sampler `name`, and return a function that makes it from a Context.

    A third party's entry point is a callable `(seed, **options) -> BaseSampler`. If it takes `context`, it gets the
    same Context as ours: space, predicted latency, objective with its costs, cap. The cap needs no constraints_func,
    because trials carry their constraint (Optuna 5).

    Raises:
        UnknownName: No sampler or no option has the name.
        ConfigError: The sampler refuses an option's value, or a package is missing.
    """
    read_value(seed, int, "seed", low=0)
    if name in _BUILT_IN:
        make, options_class = _BUILT_IN[name]
        options = asdict(read_options(options_class, options, "sampler_options"))
    else:
        make = check_sampler(name)[name].load()
    takes_context = "context" in signature(make).parameters

    def build(context: Context | None) -> RepeatableSampler:
        more = {"context": context} if takes_context else {}
        try:
            with warnings.catch_warnings():  # some options are "experimental" in Optuna
                warnings.simplefilter("ignore", ExperimentalWarning)
                return RepeatableSampler(make(seed=seed, **options, **more), seed)
        except (TypeError, ValueError) as error:
            message = " ".join(str(error).split())
            raise ConfigError(f"sampler {name}: {message} (options {dict(options)}).") from error

    if not takes_context:
        build(None)  # a wrong option is an error before the search measures anything
    return build
