"""Explorer: what a search tries next. The road asks it for all in which races and searches by estimates differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hwnas.cli.progress import Console
from hwnas.front.make import TrainedWeights
from hwnas.front.rows import FrontRow
from hwnas.search.minutes import Clock
from hwnas.search.plan import Plan
from hwnas.search.prepare import PreparedSearch
from hwnas.study.record import trial_rows
from hwnas.system.run_folder import RunFolder


@dataclass(frozen=True)
class Explorer(ABC):
    """A search whose objects are prepared. Any number of processes work on it; the study is their only record."""

    prepared: PreparedSearch

    @classmethod
    @abstractmethod
    def prepare(cls, plan: Plan, run: RunFolder, console: Console, clock: Clock | None = None) -> Self:
        """Load the data, find out what networks cost here, open the study. With a `clock` the machine's pace is
        measured too."""

    @property
    def n_workers(self) -> int:
        """Processes that find work."""
        return self.prepared.plan.workers

    @abstractmethod
    def begin(self, console: Console) -> None:
        """Decide how long the search is, unless it has begun, and say how the minutes are divided."""

    @abstractmethod
    def work(self, console: Console) -> None:
        """Work on the study until it is done, as one of its processes."""

    def trials(self, console: Console) -> list[dict[str, Any]]:
        """Return the rows of trials.csv."""
        return trial_rows(self.prepared.study)

    @abstractmethod
    def front_rows(self, trials: Sequence[Mapping[str, Any]], console: Console) -> list[FrontRow]:
        """Return the rows of the front as yet without figures: finalists, controls and baselines."""

    def trained(self) -> dict[str, TrainedWeights]:
        """Return the weights of networks that need no training behind the search, by network id."""
        return {}

    def begun(self) -> dict[str, TrainedWeights]:
        """Return the weights that networks go on with behind the search, by network id."""
        return {}

    def latency_facts(self) -> dict[str, Any]:
        """Return what the report says of predicted latencies: `line` is a sentence on their error."""
        return {"line": ""}

    def report_facts(self) -> dict[str, Any]:
        """Return what else environment.json has of the search."""
        return {}

    def clear(self) -> None:
        """Remove the weights of all but those that a network of the front would be made from again, and what killed
        processes left half written. Weights that networks go on with stay for those that were made."""
        run = self.prepared.run
        made = {path.name.partition("-")[0] for path in (run.path / "models").glob("*")}
        kept = {weights.path for weights in self.trained().values()}
        kept |= {weights.path for id, weights in self.begun().items() if id in made}
        for path in [*run.lines.glob("*.safetensors"), *run.lines.glob(".*.tmp")]:
            if path not in kept:
                path.unlink(missing_ok=True)
