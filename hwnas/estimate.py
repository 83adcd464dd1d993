"""Estimate: a value that is predicted or measured, and says which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["table", "model", "measured", "proxy", "supernet", "zero_cost", "trained", "published"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval, standard deviation, source and the seconds it cost.

    The unit is the value's own (milliseconds for latency, a fraction in [0, 1] for top-1).
    `curve` is the validation top-1 after each epoch where something was trained; `stopped` says that the run was
    ended early as hopeless, so that the value is what it had reached by then.
    """

    value: float
    low: float
    high: float
    std: float
    source: Source
    seconds: float = 0.0
    curve: tuple[float, ...] = ()
    stopped: bool = False
