"""Explorer: what a search tries next. The road asks it for all in which races and searches by estimates differ.

Behind it is what both prepare: data, the pace of this machine, a study.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import optuna

from hwnas.cli.progress import Console
from hwnas.data.dataset import Dataset
from hwnas.data.loading import read_images
from hwnas.front.make import BuildSettings, TrainedWeights
from hwnas.front.rows import FrontRow
from hwnas.front.score import scoring_seconds
from hwnas.latency.deployment import Deployment
from hwnas.latency.table import LatencyTable
from hwnas.networks.network import FoundNetwork
from hwnas.networks.quantize import needs_narrow_weights
from hwnas.samplers.informed import Context
from hwnas.search.deployments import VERIFIED, BestOf, CalibratedDeployment, Latency, model_of_all
from hwnas.search.minutes import Clock, Pace, pace_of
from hwnas.search.plan import Plan, making_of
from hwnas.study.candidate import SearchOptions
from hwnas.study.record import trial_rows
from hwnas.study.study import check_resumable, database_path, open_study
from hwnas.system.run_folder import RunFolder


@dataclass(frozen=True)
class Explorer(ABC):
    """A search whose objects are prepared. Any number of processes work on it; the study is their only record.

    `clock` and `pace` are there if minutes bound the search.
    """

    plan: Plan
    run: RunFolder
    dataset: Dataset
    calibrated: tuple[CalibratedDeployment, ...]
    model: Latency | BestOf
    options: SearchOptions
    study: optuna.Study
    clock: Clock | None
    pace: Pace | None

    @classmethod
    @abstractmethod
    def prepare(cls, plan: Plan, run: RunFolder, console: Console, clock: Clock | None = None) -> Self:
        """Load the data, find out what networks cost here, open the study. With a `clock` the machine's pace is
        measured too."""

    @property
    def deployment(self) -> Deployment:
        """The first deployment, which runs the reference network of all timings."""
        return self.calibrated[0].deployment

    @property
    def table(self) -> LatencyTable:
        """That of the first deployment."""
        return self.calibrated[0].table

    @property
    def files(self) -> int:
        """The deployments that a network of the front is made, scored and timed in, at most."""
        return min(VERIFIED, len(self.calibrated))

    @property
    def narrow(self) -> tuple[str, ...]:
        """The targets for which int8 weights need 7 bits, by the CPU that their tables name."""
        return tuple(each.name for each in self.calibrated if needs_narrow_weights(
            each.deployment.target, each.table.host.get("vendor", ""), each.table.host.get("flags", ())))

    @property
    def making(self) -> BuildSettings:
        """The settings by which finalists and baselines are made: those of the plan, for what could be calibrated."""
        deployments = [each.deployment for each in self.calibrated]
        return replace(making_of(self.plan, self.dataset, deployments), narrow=self.narrow)

    @property
    def n_workers(self) -> int:
        """Processes that find work."""
        return self.plan.workers

    @abstractmethod
    def begin(self, console: Console) -> None:
        """Decide how long the search is, unless it has begun, and say how the minutes are divided."""

    @abstractmethod
    def work(self, console: Console) -> None:
        """Work on the study until it is done, as one of its processes."""

    def trials(self, console: Console) -> list[dict[str, Any]]:
        """Return the rows of trials.csv."""
        return trial_rows(self.study)

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
        made = {path.name.partition("-")[0] for path in (self.run.path / "models").glob("*")}
        kept = {weights.path for weights in self.trained().values()}
        kept |= {weights.path for id, weights in self.begun().items() if id in made}
        for path in [*self.run.lines.glob("*.safetensors"), *self.run.lines.glob(".*.tmp")]:
            if path not in kept:
                path.unlink(missing_ok=True)


def load_data(plan: Plan, run: RunFolder, identity: Mapping[str, str], console: Console) -> Dataset:
    """Load the images. StudyError if the run's study is of other ones, or of another `identity`, before anything is
    measured."""
    url = url_of(plan, run)
    dataset = read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed, console)
    check_resumable(url, {**_identity(plan, dataset), **identity})
    return dataset


def url_of(plan: Plan, run: RunFolder) -> str:
    """Return the URL of the run's database."""
    return plan.options.storage or database_path(run.path)


def measure_pace(plan: Plan, dataset: Dataset, calibrated: Sequence[CalibratedDeployment], console: Console,
                 network: FoundNetwork) -> Pace:
    """Time how fast this machine makes a network's files and trains the baselines, and another one scores them."""
    device = plan.deployment.device
    making = making_of(plan, dataset, [calibrated[0].deployment])
    score = None if device.is_here else partial(scoring_seconds, network=network, dataset=dataset,
                                                target=making.target, device=device)
    where = "time this machine" if score is None else f"time this machine, and {device.host.name} over ssh"
    with console.step(where) as report:
        pace = pace_of(network, making, score, report).with_networks(plan.baselines, making)
    if score is not None:
        console.note(f"{device.host.name} takes {pace.scoring_s:.1f} s to score a network")
    n_files = min(VERIFIED, len(calibrated))
    return replace(pace, making_s=n_files * pace.making_s, scoring_s=n_files * pace.scoring_s)


def search_options(plan: Plan, reference_ms: float) -> SearchOptions:
    """Return the search's options, with an objective whose T is `reference_ms` where the user gave none."""
    asked, budget = plan.options, plan.options.budget
    return SearchOptions(asked.trials, plan.objective.at(plan.objective.target_ms or reference_ms), seed=asked.seed,
                         max_asks=asked.max_asks, cap_ms=budget.latency_ms, cap_quantile=budget.quantile)


def open_run_study(plan: Plan, run: RunFolder, dataset: Dataset, calibrated: Sequence[CalibratedDeployment],
                   options: SearchOptions, identity: Mapping[str, str], *, chosen: Mapping[str, int] | None = None
                   ) -> optuna.Study:
    """Open the run's study. `identity`: what its trials depend on besides data, space, target, objective and cap."""
    targets = ", ".join(f"{each.name} ({each.table.key})" for each in calibrated)
    context = Context(plan.space, model_of_all(calibrated).predict, options.objective, options.cap_ms,
                      options.cap_quantile)
    return open_study(url_of(plan, run), {**identity, **_identity(plan, dataset), "target": targets},
                      options.objective, plan.sampler(context), chosen=chosen)


def _identity(plan: Plan, dataset: Dataset) -> dict[str, str]:
    """The facts that are known before this host is measured."""
    cap_ms, quantile = plan.options.budget.latency_ms, plan.options.budget.quantile
    at = "" if quantile == 0.9 else f" at {quantile:g}"  # of conf/search.yaml
    return {"space": f"{plan.space.name} ({plan.space.fingerprint})",
            "data set": f"{dataset.name} ({dataset.fingerprint})", "host": plan.deployment.host_name,
            "budget.latency_ms": "none" if cap_ms is None else f"{cap_ms:g} ms{at}", "seed": str(plan.options.seed)}
