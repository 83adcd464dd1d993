"""Prices of machines: a YAML file that gives each host a price per hour, and how many of it can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hwnas.cli.options import option, read_options
from hwnas.errors import ConfigError
from hwnas.system.documents import load_yaml, yaml_text


@dataclass(frozen=True, slots=True)
class Price:
    """What one machine costs an hour, in dollars or any other currency, and how many there are at most."""

    per_hour: float = option(above=0, high=1e6)
    most: int = option(1_000_000, low=1, high=1_000_000)


def read_prices(path: Path) -> dict[str, Price]:
    """Prices by host: `NAME: 0.34`, or `NAME: {per_hour: 0.34, most: 20}`; ConfigError names file and host."""
    usage = "Write a line for each host: NAME: price per hour."
    try:
        data: Any = load_yaml(yaml_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. {usage}") from None
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{path} holds no prices. {usage}")
    return {str(host): read_options(Price, given if isinstance(given, Mapping) else {"per_hour": given},
                                    f"{path}: {host}") for host, given in data.items()}


def price_of(prices: Mapping[str, Price], host: str, path: Path) -> Price:
    """The price of a host; ConfigError names the line that is missing."""
    if host not in prices:
        raise ConfigError(f"{path} has no price for {host}. Add a line: {host}: price per hour.")
    return prices[host]
