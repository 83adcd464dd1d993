"""Estimate: a value that is predicted or measured, and says which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Source = Literal["table", "model", "measured", "proxy", "supernet", "zero_cost", "trained", "published"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval, standard deviation, source and the seconds it cost.

    The unit is the value's own (milliseconds for latency, a fraction in [0, 1] for top-1).
    `curve` is the validation top-1 after each epoch where something was trained, or after just those in
    `curve_epochs`; `stopped` says that the run was ended early as hopeless, so that the value is what it had reached
    by then, or, where it is `extrapolated`, a prediction of what the whole run would have reached.
    """

    value: float
    low: float
    high: float
    std: float
    source: Source
    seconds: float = 0.0
    curve: tuple[float, ...] = ()
    stopped: bool = False
    curve_epochs: tuple[int, ...] = ()
    extrapolated: bool = False


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an evaluated network of the search came to: the known costs that are minimised (latency in ms, first or
    alone, unless the search minimises others), top-1 with its standard deviation, curve, and whether it was stopped."""

    costs: tuple[float, ...]
    value: float
    std: float
    curve: tuple[float, ...]
    stopped: bool = False
