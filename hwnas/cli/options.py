"""Options of a command, read as numbers, flags, files, sections; an error names key, rule and value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.errors import ConfigError

if TYPE_CHECKING:
    pass



def number(config: Any, key: str, low: float, high: float = float("inf"), *, whole: bool = False,
           optional: bool = False) -> Any:
    """Option `key` (dotted) as a number within [low, high]; ConfigError names key, rule and value."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(config, key)
    if value is None and optional:
        return None
    kind = "whole number" if whole else "number"
    right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high:
        limit = f"of at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise ConfigError(f"{key} must be a {kind} {limit}, got {value!r}.")
    return value


def section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Section `key` of a configuration as plain values; ConfigError when it is something else."""
    from omegaconf import OmegaConf

    value = OmegaConf.to_container(config[key], resolve=True) if config.get(key) is not None else {}
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a section of keys and values, got {value!r}.")
    return {str(name): one for name, one in value.items()}


def flag(config: Any, key: str) -> bool:
    """Option `key` as true or false; ConfigError."""
    if not isinstance(config[key], bool):
        raise ConfigError(f"{key} must be true or false, got {config[key]!r}.")
    return bool(config[key])


def file_option(config: Any, key: str) -> Path | None:
    """Option `key` (dotted) as the path of a file that is there, None where it is null; ConfigError."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(config, key)
    if value is None:
        return None
    path = Path(str(value)).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}. Give the path of one.")
    return path
