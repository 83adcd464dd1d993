"""The explorer decides which networks a search tries next. It is all in which races and searches by estimates differ.

The functions after it prepare what both need: data, the pace of this machine, a study.
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
from hwnas.search.reuse import check_reusable
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import CAP_QUANTILE
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
        """Load the data, find out what networks cost, open the study. With a `clock`, measure this machine's pace."""

    @property
    def deployment(self) -> Deployment:
        """The first deployment, which runs the reference network of all timings."""
        return self.calibrated[0].deployment

    @property
    def table(self) -> LatencyTable:
        """The latency table of the first deployment."""
        return self.calibrated[0].table

    @property
    def files(self) -> int:
        """The number of deployments in which a network of the front is made, scored and timed, at most."""
        return min(VERIFIED, len(self.calibrated))

    @property
    def narrow(self) -> tuple[str, ...]:
        """The names of the targets for which int8 weights need 7 bits, by the CPU that their tables name."""
        return tuple(each.name for each in self.calibrated if needs_narrow_weights(
            each.deployment.target, each.table.host.get("vendor", ""), each.table.host.get("flags", ())))

    @property
    def making(self) -> BuildSettings:
        """The settings by which finalists and baselines are made, for the deployments that could be calibrated."""
        deployments = [each.deployment for each in self.calibrated]
        return replace(making_of(self.plan, self.dataset, deployments), narrow=self.narrow)

    @property
    def n_workers(self) -> int:
        """The number of processes that work on the search."""
        return self.plan.workers

    @abstractmethod
    def begin(self, console: Console) -> None:
        """Decide how long the search is, unless it has started, and say how the minutes are divided."""

    @abstractmethod
    def work(self, console: Console) -> None:
        """Work on the study until it is done, as one of its processes."""

    def trials(self, console: Console) -> list[dict[str, Any]]:
        """Return the rows of trials.csv."""
        return trial_rows(self.study)

    @abstractmethod
    def front_rows(self, trials: Sequence[Mapping[str, Any]], console: Console) -> list[FrontRow]:
        """Return the rows of the front, without figures yet: finalists, controls and baselines."""

    def trained(self) -> dict[str, TrainedWeights]:
        """Return the weights of networks that need no training after the search, by network id."""
        return {}

    def begun(self) -> dict[str, TrainedWeights]:
        """Return the weights with which networks go on after the search, by network id."""
        return {}

    def latency_facts(self) -> dict[str, Any]:
        """Return the report's facts about predicted latencies: `line` is a sentence on their error."""
        return {"line": ""}

    def report_facts(self) -> dict[str, Any]:
        """Return further facts about the search for environment.json."""
        return {}

    def clear(self) -> None:
        """Remove what killed processes left half written, and weights that no network of the front would be made from
        again. Weights with which networks go on stay if such a network was made."""
        made_ids = {path.name.partition("-")[0] for path in (self.run.path / "models").glob("*")}
        needed = {weights.path for weights in self.trained().values()}
        needed |= {weights.path for id, weights in self.begun().items() if id in made_ids}
        for path in [*self.run.lines.glob("*.safetensors"), *self.run.lines.glob(".*.tmp")]:
            if path not in needed:
                path.unlink(missing_ok=True)


def load_data(plan: Plan, run: RunFolder, identity: Mapping[str, str], console: Console) -> Dataset:
    """Load the images. StudyError, before any measuring, if the run's study is of others or of another `identity`, or
    if the study that is reused is of others."""
    dataset = read_images(plan.options.dataset, max(plan.space.image_sizes), plan.options.seed, console)
    identity = {**_identity(plan, dataset), **identity}
    check_resumable(url_of(plan, run), identity)
    if plan.reuse is not None:
        check_reusable(plan.reuse, identity)
    return dataset


def url_of(plan: Plan, run: RunFolder) -> str:
    """Return the URL of the run's database."""
    return plan.options.storage or database_path(run.path)


def measure_pace(plan: Plan, dataset: Dataset, calibrated: Sequence[CalibratedDeployment], console: Console,
                 network: FoundNetwork) -> Pace:
    """Time how fast this machine makes files and trains the baselines, and how fast the device scores files."""
    device = plan.deployment.device
    making = making_of(plan, dataset, [calibrated[0].deployment])
    score = None if device.is_here else partial(scoring_seconds, network=network, dataset=dataset,
                                                target=making.target, device=device)
    title = "time this machine" if score is None else f"time this machine, and {device.host.name} over ssh"
    with console.step(title) as report:
        pace = pace_of(network, making, score, report).with_networks(plan.baselines, making)
    if score is not None:
        console.note(f"{device.host.name} takes {pace.scoring_s:.1f} s to score a network")
    n_files = min(VERIFIED, len(calibrated))
    return replace(pace, making_s=n_files * pace.making_s, exporting_s=n_files * pace.exporting_s,
                   scoring_s=n_files * pace.scoring_s)


def search_options(plan: Plan, reference_ms: float) -> SearchOptions:
    """Return the search's options, whose objective has `reference_ms` as its T if the user gave none."""
    options, budget = plan.options, plan.options.budget
    return SearchOptions(options.trials, plan.objective.at(plan.objective.target_ms or reference_ms), seed=options.seed,
                         max_asks=options.max_asks, cap_ms=budget.latency_ms, cap_quantile=budget.quantile)


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
    """Return the facts of the study's identity that are known before this host is measured."""
    cap_ms, quantile = plan.options.budget.latency_ms, plan.options.budget.quantile
    at = "" if quantile == CAP_QUANTILE else f" at {quantile:g}"
    return {"space": f"{plan.space.name} ({plan.space.fingerprint})",
            "data set": f"{dataset.name} ({dataset.fingerprint})", "host": plan.deployment.host_name,
            "budget.latency_ms": "none" if cap_ms is None else f"{cap_ms:g} ms{at}", "seed": str(plan.options.seed)}
