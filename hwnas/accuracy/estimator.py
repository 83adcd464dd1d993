"""Accuracy estimators: what one promises, what it answers, and how it is found by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from hwnas.errors import ConfigError, UnknownName
from hwnas.space.architecture import Architecture

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace


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

# Their modules have `load(config, dataset, space) -> AccuracyEstimator`.
BUILT_IN = {
    "multi_fidelity": "hwnas.accuracy.multi_fidelity",
    "proxy": "hwnas.accuracy.proxy",
    "supernet": "hwnas.accuracy.supernet",
    "tabular": "hwnas.accuracy.tabular",
    "zero_cost": "hwnas.accuracy.zero_cost",
}
WITHOUT_IMAGES = ("tabular",)  # of these: what needs no data set, and trains nothing
# What their values are, in words for reports.
_MEANINGS = {
    "proxy": "validation top-1 after short training",
    "multi_fidelity": "top-1 by short training and NASWOT, predicted where stopped",
    "supernet": "validation top-1 with a supernet's weights",
    "zero_cost": "top-1 predicted from a zero-cost score",
    "tabular": "top-1 in a table",
}


class AccuracyEstimator(Protocol):
    """Tells what top-1 (a fraction) an architecture reaches."""

    @property
    def fingerprint(self) -> str:
        """Names all that decides the values, besides the architecture: a study is resumed with the same only."""
        ...

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]], seed: int) -> Estimate:
        """Top-1 with its error. `history`: per-epoch curves of earlier trials. CandidateError when it cannot tell."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """An estimator with work to do once, before its first `evaluate`: training a supernet, say.

    It may say, as `setup_here`, whether this process did all of that work: waiting for another takes as long.
    """

    @property
    def setup_seconds(self) -> float:
        """What that work has cost, wherever it was done; 0 before `prepare`."""
        ...

    def prepare(self, console: Console) -> None:
        """Do it, or find it done; killed and called again, it goes on. Many processes may call it at once."""
        ...


@runtime_checkable
class EvaluatesAmong(Protocol):
    """An estimator that spends less on networks that cannot enter the front, for which it is told of the search."""

    def evaluate_among(self, architecture: Architecture, costs: Sequence[float], earlier: Sequence[Earlier],
                       seed: int) -> Estimate:
        """As `evaluate`, which a search then does not call. `costs`: the known costs that are minimised (predicted
        latency in ms, where the search does not minimise others), `earlier`: the networks evaluated so far."""
        ...


def load_estimator(name: str, *, dataset: Dataset | None = None, space: SearchSpace | None = None,
                   config: Mapping[str, Any] | None = None) -> AccuracyEstimator:
    """The estimator called `name`: one of BUILT_IN, or an entry point of the group `hwnas.accuracy`.

    An entry point is a callable `(dataset=, space=, config=) -> AccuracyEstimator`. `config` is the estimator's own
    section. UnknownName, ConfigError. Where the estimator Prepares, call `prepare` before `evaluate`.
    """
    options = {str(key): value for key, value in (config or {}).items()}
    if name in BUILT_IN:
        if dataset is None and name not in WITHOUT_IMAGES:
            raise ConfigError(f"accuracy={name} needs a data set. Give dataset=NAME.")
        return cast("AccuracyEstimator", import_module(BUILT_IN[name]).load(options, dataset, space))
    others = {entry.name: entry for entry in entry_points(group="hwnas.accuracy")}
    if name not in others:
        raise UnknownName("accuracy estimator", name, [*BUILT_IN, *others])
    return cast("AccuracyEstimator", others[name].load()(dataset=dataset, space=space, config=options))


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of one of BUILT_IN as plain values, where `given` are set; UnknownName, ConfigError."""
    return cast("dict[str, Any]", import_module(BUILT_IN[name]).all_options(given))


def meaning(name: str) -> str:
    """What the values of the estimator called `name` are."""
    return _MEANINGS.get(name, f"top-1 as {name} estimates it")
