"""Target: a deployment as data: runtime, precision, threads, batch. No code, no measured number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hwnas.errors import ConfigError, UnknownName

PRECISIONS = ("fp32", "bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment protocol. `threads == 0` means every core the process may use; `vendor` is the CPU make it names.

    Tables belong to hosts, not to targets: xeon_int8 and epyc_int8 share the table of the host they run on.
    """

    name: str
    runtime: str
    precision: str
    threads: int = 1
    batch: int = 1
    vendor: str = ""
    device: str = "cpu"
    price_per_hour: float | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Target:
        """Read and check a `conf/target/*.yaml`; ConfigError names key, rule and value."""
        known = set(cls.__slots__)
        for key in config:
            if key not in known:
                raise UnknownName("key of a target", key, known)
        values = dict(config)
        for key in ("name", "runtime", "precision"):
            if not isinstance(values.get(key), str) or not values[key]:
                raise ConfigError(f"target.{key} must be a name, got {values.get(key)!r}.")
        if values["precision"] not in PRECISIONS:
            raise UnknownName("precision", values["precision"], PRECISIONS)
        for key, low in (("threads", 0), ("batch", 1)):
            value = values.get(key, 1)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= 4096:
                raise ConfigError(f"target.{key} must be a whole number from {low} to 4096, got {value!r}.")
        price = values.get("price_per_hour")
        if price is not None and (not isinstance(price, int | float) or not 0 <= price < float("inf")):
            raise ConfigError(f"target.price_per_hour must be a price of at least 0, got {price!r}.")
        return cls(**values)
