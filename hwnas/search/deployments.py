"""The deployments of a set: a search chooses among them for each network, and verifies the front in two of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hwnas.cli.progress import Console
from hwnas.errors import ConfigError, TargetError
from hwnas.front.make import check_deployable
from hwnas.front.rows import FrontRow
from hwnas.latency.deployment import Deployment
from hwnas.latency.measured import MeasuredLatency
from hwnas.latency.model import LatencyModel, Predictions
from hwnas.latency.session import Session
from hwnas.latency.table import LatencyTable
from hwnas.networks.network import FoundNetwork, Network
from hwnas.space.architecture import Architecture
from hwnas.study.candidate import Candidate, SearchOptions
from hwnas.study.record import CAP

VERIFIED = 2  # deployments that a finalist is verified in


def deployments_of(network: Network, deployments: Sequence[Deployment], console: Console) -> tuple[Deployment, ...]:
    """Return the deployments that can run a network; lines say why others cannot. Raises ConfigError if none can."""
    able, reasons = [], []
    for deployment in deployments:
        try:
            check_deployable([network], deployment.target)
        except (ConfigError, TargetError) as error:
            reasons.append(str(error))
        else:
            able.append(deployment)
    if not able:
        raise ConfigError(" ".join(reasons))
    for reason in reasons:
        console.remark(f"note: a deployment fewer: {reason}")
    return tuple(able)


Latency = LatencyModel | MeasuredLatency  # predicts or measures latencies of networks on one deployment


@dataclass(frozen=True)
class CalibratedDeployment:
    """A deployment with the source of its latencies. A model comes with the session of the run and the table that it
    has learnt from. Measured latencies have no session, and their own table of the networks that were timed."""

    deployment: Deployment
    latency: Latency
    session: Session | None
    learnt_from: LatencyTable | None = None

    @property
    def name(self) -> str:
        """The target's name."""
        return self.deployment.target.name

    @property
    def table(self) -> LatencyTable:
        """The latency table: host, reference network and what was timed."""
        if isinstance(self.latency, MeasuredLatency):
            return self.latency.table
        assert self.learnt_from is not None
        return self.learnt_from


class BestOf:
    """The latency of each network in the deployment of a set that is predicted to run it fastest."""

    def __init__(self, models: Mapping[str, Latency]) -> None:
        self.models = models

    def predict(self, codes: np.ndarray) -> Predictions:
        """Predict as `LatencyModel.predict` does, with the `deployment` of each network."""
        return _best_of({name: model.predict(codes) for name, model in self.models.items()})

    def predict_architectures(self, architectures: Sequence[Architecture]) -> Predictions:
        """Predict the same for architectures of any origin; slower."""
        return _best_of({name: model.predict_architectures(architectures) for name, model in self.models.items()})


def _best_of(predicted: Mapping[str, Predictions]) -> Predictions:
    best = np.argmin([each.mean for each in predicted.values()], axis=0)
    at = np.arange(len(best))
    mean, low, high = (np.stack([getattr(each, part) for each in predicted.values()])[best, at]
                       for part in ("mean", "low", "high"))
    return Predictions(mean, low, high, np.array(list(predicted))[best])


def model_of_all(calibrated: Sequence[CalibratedDeployment]) -> Latency | BestOf:
    """Return the model that predicts the latencies of a run."""
    if len(calibrated) == 1:
        return calibrated[0].latency
    return BestOf({each.name: each.latency for each in calibrated})


def choose_deployments(predicted_ms: Mapping[str, float], int8: Collection[str]) -> list[str]:
    """Return the two deployments of a network that may both be on the front, the fastest first.

    A second file of the same kind would answer as the first one does, only later. So the second deployment is the
    fastest of the other kind, int8 or floating point. If the set has one kind only, it is the second fastest.

    Args:
        predicted_ms: Predicted latency by deployment.
        int8: The names of the int8 deployments.
    """
    by_latency = sorted(predicted_ms, key=lambda name: predicted_ms[name])
    first = by_latency[0]
    others = [name for name in by_latency if (name in int8) != (first in int8)] or by_latency[1:]
    return [first, *others[: VERIFIED - 1]]


def deploy_rows(rows: Sequence[FrontRow], calibrated: Sequence[CalibratedDeployment],
                able: Mapping[str, Collection[str]], options: SearchOptions, like: Architecture,
                say: Callable[[str], None]) -> list[FrontRow]:
    """Return each row in its deployments: finalists and baselines in two, controls in the fastest.

    A finalist's second deployment keeps the cap, as predicted, or there is none. A baseline that no deployment can run
    is left out.

    Args:
        rows: Rows without deployments. If the run has a single one, they are returned as they are.
        calibrated: The deployments of the run.
        able: The deployments that can run a baseline, by its `trained_id`; all, if it is not there.
        options: Cap and objective, which gives the reward of a second deployment.
        like: The architecture whose latencies choose the deployments of a network that has no predicted ones.
        say: Receives the reason for each row that is left out.
    """
    if len(calibrated) == 1:
        return list(rows)
    int8 = {each.name for each in calibrated if each.deployment.target.precision == "int8"}
    deployed = []
    for row in rows:
        network = row.network
        assert network is not None, "explorers give rows of networks"
        # The latencies of timm's networks are not predicted: the latencies of `like` choose their deployments.
        judged = network.architecture if isinstance(network, FoundNetwork) else like
        predicted = {each.name: each.latency.predict_architectures([judged]) for each in calibrated
                     if each.name in able.get(network.trained_id, [each.name])}
        if not predicted:
            say(f"{row.id} is left out: none of the deployments that were measured can run it.")
            continue
        # A deployment that cannot time it counts only if no other one can either.
        predicted = {name: values for name, values in predicted.items() if np.isfinite(values.mean[0])} or predicted
        names = choose_deployments({name: float(each.mean[0]) for name, each in predicted.items()}, int8)
        for place, name in enumerate(names[:1] if row.is_control else names):
            candidate = Candidate(judged, predicted[name])
            if place and row.is_finalist and candidate.constraints(options).get(CAP, 0.0) > 0:
                continue  # predicted to be over the cap
            mine, figures = network.deployed_as(name), {} if row.latency_ms_predicted is None else candidate.columns
            if place and figures and row.top1_proxy is not None:
                figures |= {"reward": options.objective.reward(row.top1_proxy, candidate.latency_ms),
                            "reward_winner": False}
            deployed.append(replace(row, id=mine.id, network=mine, target=name, **figures))
    # A control belongs to the first deployment of its finalist.
    first = {row.trained_id: row.id for row in reversed(deployed)}
    return [replace(row, control_of=first.get(row.control_of, row.control_of)) for row in deployed]
