"""Samplers by name: ours, Optuna's, and third parties' through the entry point group `hwnas.samplers`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIIISampler, NSGAIISampler, RandomSampler, TPESampler

from hwnas.accuracy.zero_cost import SCORES
from hwnas.errors import ConfigError, UnknownName
from hwnas.samplers.asking import Asking
from hwnas.samplers.informed import Context, informed

GROUP = "hwnas.samplers"

# What each may be given, with our defaults. A generation of 10 suits some 30 to 500 evaluations, where Optuna's 50
# would leave the first fifty random. TPE samples its parameters jointly: one look at the study an ask, not one each.
_GENETIC: dict[str, Any] = {"population_size": 10, "mutation_prob": None, "crossover_prob": 0.9, "swapping_prob": 0.5}
OWN = "hwnas"
_OWN_OPTIONS: dict[str, Any] = {"n_startup_trials": 8, "worst_quantile": 0.25, "zero_cost": ()}
_BUILT_IN: dict[str, tuple[Callable[..., BaseSampler], dict[str, Any]]] = {
    "nsga2": (NSGAIISampler, _GENETIC),
    "nsga3": (NSGAIIISampler, {**_GENETIC, "dividing_parameter": 12}),
    "tpe": (TPESampler, {"n_startup_trials": 10, "n_ei_candidates": 24, "multivariate": True, "constant_liar": True}),
    "gp": (GPSampler, {"n_startup_trials": 10}),
    "random": (RandomSampler, {}),
}


def sampler_names() -> list[str]:
    """Every name that `load_sampler` takes."""
    return sorted({OWN, *_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def default_options(name: str) -> dict[str, Any]:
    """The options of a sampler with their defaults; {} for another package's, which knows its own."""
    return dict(_OWN_OPTIONS) if name == OWN else dict(_BUILT_IN[name][1]) if name in _BUILT_IN else {}


def load_sampler(name: str, seed: int, context: Context | None = None, **options: Any) -> Asking:
    """The sampler `name`, seeded. `context`: what ours is told; without one it knows nothing of the networks."""
    return read_sampler(name, seed, options)(context)


def read_sampler(name: str, seed: int, options: Mapping[str, Any]) -> Callable[[Context | None], Asking]:
    """Check the options of the sampler `name`; what is returned gives it, once it is told what ours needs to know.

    A third party's entry point is a callable `(seed, **options) -> BaseSampler`.
    The cap needs no constraints_func: trials carry their constraint (Optuna 5). UnknownName for another name,
    ConfigError for an option that the sampler has not or whose value it refuses.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be a whole number of at least 0, got {seed!r}.")
    if name == OWN:
        _check_options(name, options, _OWN_OPTIONS)
        wanted = {**_OWN_OPTIONS, **options}
        return lambda context: Asking(_made(name, partial(informed, context), seed, wanted), seed)
    if name in _BUILT_IN:
        make, defaults = _BUILT_IN[name]
        _check_options(name, options, defaults)
        if name == "gp" and not (find_spec("torch") and find_spec("scipy")):
            raise ConfigError("sampler gp needs torch and scipy: pip install torch scipy, or choose another sampler.")
        options = {**defaults, **options}
    else:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            raise UnknownName("sampler", name, sampler_names())
        make = points[name].load()
    sampler = Asking(_made(name, make, seed, options), seed)
    return lambda context: sampler


def _made(name: str, make: Callable[..., BaseSampler], seed: int, options: Mapping[str, Any]) -> BaseSampler:
    try:
        with warnings.catch_warnings():  # NSGA-III and some options are "experimental" in Optuna.
            warnings.simplefilter("ignore", ExperimentalWarning)
            return make(seed=seed, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler {name}: {' '.join(str(error).split())} (options {dict(options)}).") from error


def _check_options(name: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key not in defaults:
            raise UnknownName(f"option of sampler {name}", key, defaults)
        default = defaults[key]
        if isinstance(default, tuple):
            _check_scores(key, value)
            continue
        if isinstance(default, bool) or isinstance(value, bool):
            fits = isinstance(default, bool) and isinstance(value, bool)
        elif isinstance(default, int):
            fits = isinstance(value, int) and value >= 1
        else:
            fits = isinstance(value, int | float) and 0 <= value <= 1
        if not fits and not (value is None and default is None):
            rule = ("true or false" if isinstance(default, bool) else "a whole number of at least 1"
                    if isinstance(default, int) else "a number from 0 to 1")
            raise ConfigError(f"sampler_options.{key} must be {rule}, got {value!r}.")


def _check_scores(key: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or len({*map(str, value)}) < len(value):
        raise ConfigError(f"sampler_options.{key} must be a list of different zero-cost scores, got {value!r}.")
    for name in value:
        if name not in SCORES:
            raise UnknownName(f"sampler_options.{key}", name, SCORES)
