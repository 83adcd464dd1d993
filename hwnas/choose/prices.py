"""Prices of machines: a YAML file that gives each host a price per hour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwnas.errors import ConfigError, shown
from hwnas.system.documents import load_yaml, yaml_text


def read_prices(path: Path) -> dict[str, float]:
    """Prices an hour by host, in dollars or any other currency; ConfigError names file and host."""
    usage = "Write a line for each host: NAME: price per hour."
    try:
        data: Any = load_yaml(yaml_text(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. {usage}") from None
    if not isinstance(data, Mapping) or not data:
        raise ConfigError(f"{path} holds no prices. {usage}")
    for host, price in data.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price <= 1e6:
            raise ConfigError(f"{path}: the price of {shown(host)} must be a number above 0 and up to 1000000, got "
                              f"{shown(price)}. {usage}")
    return {str(host): float(price) for host, price in data.items()}


def price_of(prices: Mapping[str, float], host: str, path: Path) -> float:
    """The price of a host; ConfigError names the line that is missing."""
    if host not in prices:
        raise ConfigError(f"{path} has no price for {host}. Add a line: {host}: price per hour.")
    return prices[host]
