"""What the command is asked for: `name=value` arguments, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hwnas.errors import ConfigError, UnknownName

OURS = "hwnas"
OPTUNA = ("tpe", "tpe_multivariate", "nsga2", "nsga2_small", "gp", "random")
AWARE = ("stratified", "linas")  # peers that know latency as ours does
NAMES = (OURS, *OPTUNA, *AWARE)


@dataclass(frozen=True)
class Options:
    """`parameters` or `arch_digits` names what tells architectures apart; the columns are those of the table."""

    table: Path
    accuracy: str
    latency: str
    out: Path
    parameters: tuple[str, ...] = ()
    arch_digits: str = ""
    duplicates_by: str = ""
    features: tuple[str, ...] = ()
    evals: int = 400
    seeds: int = 10
    samplers: tuple[str, ...] = NAMES
    jobs: int = 1

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns of the table that are read."""
        named = (*self.parameters, self.arch_digits, self.accuracy, self.latency, self.duplicates_by, *self.features)
        return tuple(dict.fromkeys(name for name in named if name))


Chosen = TypeVar("Chosen", bound=Options)


def parse(arguments: Sequence[str], kind: type[Chosen] = Options) -> Chosen:  # type: ignore[assignment]
    """ConfigError or UnknownName, in one line, for what cannot be meant; `kind` may have options of its own."""
    given = read_dotlist(arguments)
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise UnknownName("option", name, known)
    for name in ("table", "accuracy", "latency", "out"):
        if given.get(name) in (None, ""):
            raise ConfigError(f"{name}=… must be given.")
    options = kind(**{name: _READ[str(known[name].type)](name, value) for name, value in given.items()})
    if bool(options.parameters) == bool(options.arch_digits):
        raise ConfigError("give either parameters=[a,b,…] (a column each) or arch_digits=COLUMN.")
    for name in options.samplers:
        if name not in NAMES:
            raise UnknownName("sampler", name, NAMES)
    return options


def read_dotlist(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` arguments, values as in YAML; ConfigError for what cannot be read."""
    for argument in arguments:
        if "=" not in argument:
            raise ConfigError(f"{argument!r} is no name=value.")
    try:
        found = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)), resolve=True)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"options cannot be read: {' '.join(str(error).split())}") from error
    assert isinstance(found, dict)
    return {str(name): value for name, value in found.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, dict | list):
        raise ConfigError(f"{name} must be one name, got {value!r}.")
    return "" if value is None else str(value)


def _names(name: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if value in (None, "") or not values or any(isinstance(one, dict | list) or one in (None, "") for one in values):
        raise ConfigError(f"{name} must be a list of names, [a,b,…], got {value!r}.")
    return tuple(dict.fromkeys(str(one) for one in values))


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number from 1 on, got {value!r}.")
    return value


_READ: dict[str, Callable[[str, Any], Any]] = {
    "str": _text, "int": _count, "tuple[str, ...]": _names, "Path": lambda name, value: Path(_text(name, value))}
