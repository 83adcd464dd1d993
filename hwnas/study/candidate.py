"""Candidates: a network with its deployment and its latency there, from the proposal to the row of the front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwnas.space.architecture import Architecture
from hwnas.study.objective import CAP_QUANTILE, Objective, upper_ms
from hwnas.study.record import CAP, DEPLOYMENT

if TYPE_CHECKING:
    from hwnas.latency.model import Predictions


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The demands of a search on its candidates.

    `n_trials` is the number of architectures to evaluate, over all workers and restarts. `max_asks` limits the number
    of trials that are started, in the same way (None: 20 * n_trials + 100). `cap_ms` is the hard cap on the
    `cap_quantile` of the latency.
    """

    n_trials: int
    objective: Objective
    seed: int = 0
    max_asks: int | None = None
    cap_ms: float | None = None
    cap_quantile: float = CAP_QUANTILE


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network and its latency, predicted by a model or measured in a race.

    `latency.deployment` names the deployment that runs it fastest, if a search chooses among several.
    """

    architecture: Architecture
    latency: Predictions

    @property
    def columns(self) -> dict[str, Any]:
        """The latency in ms with its 90 % interval, by the names that a trial and a row of the front have for it."""
        values = zip(("", "_low", "_high"), (self.latency.mean, self.latency.low, self.latency.high), strict=True)
        return {f"latency_ms_predicted{end}": float(part[0]) for end, part in values}

    @property
    def latency_ms(self) -> float:
        """The mean latency in ms."""
        return float(self.latency.mean[0])

    def facts(self, options: SearchOptions) -> dict[str, Any]:
        """Return all that is known before a training, as user attributes of a trial."""
        chosen = {} if self.latency.deployment is None else {DEPLOYMENT: str(self.latency.deployment[0])}
        return {**chosen, "architecture_id": self.architecture.id, "architecture": str(self.architecture),
                "seed": options.seed, **self.columns, **options.objective.costs(self.latency_ms, self.architecture)}

    def constraints(self, options: SearchOptions) -> dict[str, float]:
        """Return its distance above the cap in ms (negative: below it), by name of the constraint; {} without a cap."""
        if options.cap_ms is None:
            return {}
        return {CAP: float(upper_ms(self.latency, options.cap_quantile)[0]) - options.cap_ms}
