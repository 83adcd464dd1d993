"""What the command is asked for: options of its own, those of single samplers, and overrides of hwnas.search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hwnas.errors import ConfigError

OWN = ("samplers", "seeds", "seed", "verify", "out")
REFUSED = {  # what would make budgets unequal, or two searches one
    "sampler": "write samplers=[hwnas,nsga2]",
    "sampler_options": "name the sampler: nsga2.population_size=20",
    "storage": "every search keeps its own study",
    "search.reuse": "no search may know more than another",
}


@dataclass(frozen=True)
class Options:
    """`overrides` go to every search as they are, `of_sampler` to the one named. Of the first `verify` seeds finalists
    are trained and verified; of the others only the search runs."""

    samplers: tuple[str, ...]
    out: Path
    seeds: tuple[int, ...] = (0,)
    verify: int = 1
    overrides: tuple[str, ...] = ()
    of_sampler: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse(arguments: Sequence[str]) -> Options:
    """ConfigError, in one line, for what cannot be meant; what hwnas.search takes is checked by `plan`."""
    own: dict[str, str] = {}
    others = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is no name=value.")
        if key in OWN:
            own[key] = value
        else:
            others.append(argument)
    if not own.get("out"):
        raise ConfigError("out=DIR must be given: the folder of the runs and of what is told of them.")
    if "seed" in own and "seeds" in own:
        raise ConfigError("give seed=N or seeds=[N,…], not both.")
    samplers = tuple(str(name) for name in _list("samplers", own.get("samplers", "[hwnas,nsga2]"), str))
    seeds = tuple(_list("seeds", own.get("seeds", own.get("seed", "0")), int))
    if len(samplers) < 2:
        raise ConfigError(f"samplers must name two or more, got {own['samplers']}.")
    verify = _list("verify", own.get("verify", "1"), int)
    if len(verify) != 1:
        raise ConfigError(f"verify must be one whole number (of seeds), got {own['verify']}.")
    shared, single = _apart(others, samplers)
    return Options(samplers, Path(own["out"]), seeds, verify[0], shared, single)


def _apart(arguments: Sequence[str], samplers: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Overrides for every search, and by sampler those whose key begins with its name."""
    shared = []
    single: dict[str, tuple[str, ...]] = {}
    for argument in arguments:
        first, dot, rest = argument.partition(".")
        if dot and first in samplers:
            single[first] = (*single.get(first, ()), f"sampler_options.{rest}")
            continue
        key = argument.partition("=")[0].lstrip("+")
        for name, hint in REFUSED.items():
            if key == name or key.startswith(f"{name}."):
                raise ConfigError(f"{key} cannot be given here: {hint}.")
        shared.append(argument)
    return tuple(shared), single


def _list(key: str, text: str, kind: type) -> list[Any]:
    """One value or [a,b,…], each once: names, or whole numbers of at least 0."""
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}={text}"]))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{key}={text} cannot be read: {' '.join(str(error).split())}") from error
    assert isinstance(value, dict)
    found = value[key] if isinstance(value[key], list) else [value[key]]
    right = [isinstance(one, kind) and not isinstance(one, bool) and (kind is str or one >= 0) for one in found]
    if not found or not all(right):
        rule = "names" if kind is str else "whole numbers of at least 0"
        raise ConfigError(f"{key} must be {rule}, got {text}.")
    return list(dict.fromkeys(found))
