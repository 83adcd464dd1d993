"""Samplers by name: ours, Optuna's, and third parties' through the entry point group `hwnas.samplers`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from inspect import signature
from typing import Any

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIIISampler, NSGAIISampler, RandomSampler, TPESampler

from hwnas.accuracy.certificate import SCORES
from hwnas.cli.options import defaults, option, read_options, read_value
from hwnas.errors import ConfigError, UnknownName
from hwnas.samplers.asking import Asking
from hwnas.samplers.informed import Context, informed

GROUP = "hwnas.samplers"

OWN = "hwnas"


@dataclass(frozen=True, slots=True)
class OwnOptions:
    """Options of our known-objective sampler."""

    n_startup_trials: int = option(8, low=1, help="random networks first")
    worst_quantile: float = option(0.25, low=0, high=1, help="of top-1, from which on a front is wanted")
    zero_cost: tuple[str, ...] = option((), choices=SCORES, check=lambda names: len({*names}) == len(names),
                                        what="a list of different zero-cost scores", help="scores that it sees too")


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
