"""What the command is asked for: `name=value` arguments, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common import number_of
from experiments.latency.macro.benchmark import CHANNELS, CLASSES, SPACE
from hwnas.cli.command import compose
from hwnas.errors import ConfigError, UnknownName

NAMES = ("+target", "benchmark", "out", "random", "near", "seed", "seconds", "measure")


@dataclass(frozen=True)
class Options:
    """`config` is that of hwnas.validate for this target and the benchmark's space; `near` is a share of latency."""

    config: Any
    benchmark: Path
    out: Path
    random: int = 100
    near: float = 0.02
    seed: int = 7
    seconds: float = 45.0
    measure: bool = True


def parse(arguments: Sequence[str]) -> Options:
    """ConfigError or UnknownName, in one line, for what cannot be meant."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name not in NAMES and name != "target":  # compose says what is wrong with that one
            raise UnknownName("option", name, NAMES) if equals else ConfigError(f"{argument!r} is no name=value.")
    target = [argument for argument in arguments if argument.startswith(("+target=", "target="))]
    config = compose("validate", [*target, f"space={SPACE}", f"channels={CHANNELS}", f"classes={CLASSES}"])
    try:
        given = OmegaConf.from_dotlist([argument for argument in arguments if argument not in target])
        for name in ("benchmark", "out"):
            if not isinstance(given.get(name), str) or not given[name]:
                raise ConfigError(f"{name}=… must be given, one path.")
        return _checked(config, OmegaConf.merge(
            {name: getattr(Options, name) for name in ("random", "near", "seed", "seconds", "measure")},
            given))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"options cannot be read: {' '.join(str(error).split())}") from error


def _checked(config: Any, given: Any) -> Options:
    if not isinstance(given.measure, bool):
        raise ConfigError(f"measure must be true or false, got {given.measure!r}.")
    return Options(config, Path(given.benchmark), Path(given.out), number_of(given, "random", 0, whole=True),
                   float(number_of(given, "near", 0, 0.5)), number_of(given, "seed", 0, 2**31, whole=True),
                   float(number_of(given, "seconds", 1, 86_400)),
                   given.measure)
