"""What a network can do: data sets, training recipes, accuracy estimators. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

from hwnas.architecture import Architecture
from hwnas.errors import ConfigError, UnknownName
from hwnas.estimate import Estimate

if TYPE_CHECKING:
    from hwnas.accuracy.dataset import Dataset
    from hwnas.accuracy.tabular import Decodes

BUILT_IN = ("proxy", "tabular")


class AccuracyEstimator(Protocol):
    """Tells what top-1 (a fraction) an architecture reaches."""

    @property
    def fingerprint(self) -> str:
        """Names all that decides the values, besides the architecture: a study is resumed with the same only."""
        ...

    def evaluate(self, architecture: Architecture, history: Sequence[Sequence[float]], seed: int) -> Estimate:
        """Top-1 with its error. `history`: per-epoch curves of earlier trials. CandidateError when it cannot tell."""
        ...


def load_estimator(name: str, *, dataset: Dataset | None = None, space: Decodes | None = None,
                   config: Mapping[str, Any] | None = None) -> AccuracyEstimator:
    """The estimator called `name`: `proxy`, `tabular`, or an entry point of the group `hwnas.accuracy`.

    An entry point is a callable `(dataset=, space=, config=) -> AccuracyEstimator`. `config` is the estimator's own
    section. UnknownName, ConfigError.
    """
    options = {str(key): value for key, value in (config or {}).items()}
    if name == "proxy":
        from hwnas.accuracy.proxy import Proxy

        if dataset is None:
            raise ConfigError("accuracy=proxy needs a data set. Give dataset=NAME.")
        return Proxy.from_config(options, dataset)
    if name == "tabular":
        from hwnas.accuracy.tabular import Tabular

        return Tabular.from_config(options, space)
    others = {entry.name: entry for entry in entry_points(group="hwnas.accuracy")}
    if name not in others:
        raise UnknownName("accuracy estimator", name, [*BUILT_IN, *others])
    return cast("AccuracyEstimator", others[name].load()(dataset=dataset, space=space, config=options))
