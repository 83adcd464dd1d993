"""The protocol of accuracy estimators, the estimates that they return, and the look-up by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from hwnas.space.architecture import Architecture
from hwnas.stats import Z90
from hwnas.system.libraries import find_offers

if TYPE_CHECKING:
    from torch import Tensor

    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace


Source = Literal["table", "model", "measured", "proxy", "trained", "published"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval, standard deviation, source and the seconds it cost.

    The unit is the value's own (milliseconds for latency, a fraction in [0, 1] for top-1). An estimate by a training
    has the network's `weights` after so many `steps`: the training of a finalist continues from them.
    """

    value: float
    low: float
    high: float
    std: float
    source: Source
    seconds: float = 0.0
    weights: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    steps: int = 0

    @classmethod
    def of_top1(cls, value: float, std: float, source: Source, **more: Any) -> Estimate:
        """Return a top-1 with its 90 % interval, which ends at 0 and 1; `more` are the other fields."""
        return cls(value, max(0.0, value - Z90 * std), min(1.0, value + Z90 * std), std, source, **more)


PROXY = "proxy"  # the estimator of this package; all others come from other packages
_MEANINGS = {"race": "validation top-1 in the race", PROXY: "validation top-1 after short training"}  # for reports


class AccuracyEstimator(Protocol):
    """A way to estimate the top-1 (a fraction) that an architecture reaches."""

    @property
    def fingerprint(self) -> str:
        """A text of all that decides the values, except the architecture. A study resumes only with the same one."""
        ...

    def evaluate(self, architecture: Architecture, seed: int) -> Estimate:
        """Return the top-1 with its error; CandidateError if it cannot be estimated."""
        ...


def load_estimator(name: str, *, dataset: Dataset, space: SearchSpace | None = None,
                   config: Mapping[str, Any] | None = None) -> AccuracyEstimator:
    """Return the estimator called `name`: PROXY, or an entry point of the group `hwnas.accuracy`.

    An entry point is a callable `(dataset=, space=, config=) -> AccuracyEstimator`. `config` is the estimator's own
    section. UnknownName for an unknown name or option, ConfigError for a wrong value.
    """
    options = {str(key): value for key, value in (config or {}).items()}
    if name == PROXY:
        return cast("AccuracyEstimator", import_module("hwnas.accuracy.proxy").load(options, dataset))
    other = check_estimator(name)[name]
    return cast("AccuracyEstimator", other.load()(dataset=dataset, space=space, config=options))


def check_estimator(name: str, *more: str) -> dict[str, EntryPoint]:
    """Return the entry points by name; UnknownName unless `name` is one of them, PROXY, or in `more`."""
    return find_offers("hwnas.accuracy", "accuracy estimator", name, [*more, PROXY])


def meaning(name: str) -> str:
    """Describe the values that the estimator called `name` gives."""
    return _MEANINGS.get(name, f"top-1 as {name} estimates it")
