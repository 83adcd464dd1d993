"""The estimators' values for a certificate's networks. They are asked in turn, as in a search, and stored at once."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.accuracy.certificate import CHOICES, label
from hwnas.accuracy.estimator import (
    BUILT_IN,
    WITHOUT_IMAGES,
    Earlier,
    Estimate,
    EvaluatesAmong,
    Prepares,
    load_estimator,
)
from hwnas.certify.plan import CertifyPlan, Network
from hwnas.cli.progress import Console
from hwnas.errors import CandidateError, ConfigError, DataError, SpaceError, StudyError, UnknownName, UserError
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic
from hwnas.system.tables import finite
from hwnas.system.work_folder import WorkFolder

if TYPE_CHECKING:
    from hwnas.accuracy.estimator import AccuracyEstimator
    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace

ESTIMATES = Document("hwnas-estimates", 1, "an estimator's answers", "Remove it to judge anew.")
DEFAULT = ("proxy", "supernet", "multi_fidelity", *map(label, CHOICES))
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,59}")
_STREAM = 0x04DE


@dataclass(frozen=True, slots=True)
class Judged:
    """An estimator to judge: its label in the certificate, the value of `accuracy`, its own options."""

    label: str
    accuracy: str
    options: Mapping[str, Any]

    def file(self, out: Path) -> Path:
        """The file of its estimates."""
        return out / "estimates" / f"{self.label.replace(':', '-')}.json"


def read_judged(value: object) -> list[Judged]:
    """Read the option `estimators`: a list of names and sections, or one section (None: DEFAULT).

    A name may be `zero_cost:SCORE`. A section maps labels to options. If the label does not name the estimator, the
    option `accuracy` does. ConfigError, UnknownName.
    """
    listed = _list_labels(list(DEFAULT) if value is None else value)
    if not all(isinstance(options, dict) for _, options in listed):
        raise ConfigError("estimators must be a list of names or a section of labels and options, e.g. "
                          f"{{long: {{accuracy: proxy, epochs: 6}}}}, got {value!r}.")
    by_label = {label: dict(options) for label, options in listed}
    if len(by_label) < len(listed):
        raise ConfigError(f"estimators names one twice: {', '.join(label for label, _ in listed)}. Name each once.")
    if not by_label:
        raise ConfigError("estimators is empty. Name one at least, e.g. estimators=[proxy].")
    judged = [_read_entry(name, options) for name, options in by_label.items()]
    if len({estimator.file(Path()) for estimator in judged}) < len(judged):
        raise ConfigError(f"estimators: two of {', '.join(by_label)} differ in : and - only. Give another label.")
    return judged


def _list_labels(value: Any) -> list[tuple[str, Any]]:
    """Labels and their options. An item that is neither a name nor a section has None for options."""
    pairs: list[tuple[str, Any]] = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            pairs += [(str(label), options) for label, options in item.items()]
        else:
            pairs.append((str(item), {} if isinstance(item, str) and isinstance(value, list) else None))
    return pairs


def _read_entry(name: str, options: dict[str, Any]) -> Judged:
    from importlib.metadata import entry_points

    if not _LABEL.fullmatch(name):
        raise ConfigError(f"estimators: a label must be a plain name, got {name!r}.")
    own, _, score = name.partition(":")
    accuracy = str(options.pop("accuracy", own))
    known = [*BUILT_IN, *(entry.name for entry in entry_points(group="hwnas.accuracy"))]
    if accuracy not in known:
        raise UnknownName("accuracy estimator", accuracy, known)
    return Judged(name, accuracy, {"score": score, **options} if score else options)


def estimate_all(plan: CertifyPlan, judged: Sequence[Judged], seeds: int, dataset: Dataset, space: SearchSpace,
                 console: Console) -> None:
    """Let every estimator estimate every network's top-1, with `seeds` seeds, in this process alone.

    An estimator that cannot be prepared for this space and data is named in a line and left out, unless it is the only
    one.
    """
    with WorkFolder(plan.out, "certify").hold("estimates", console.say):
        warm = False
        for estimator in judged:
            work = _Work(plan, estimator, dataset, space)
            if left := work.left(seeds):
                if not warm:
                    _warm_up(plan.networks[0], dataset)
                    warm = True
                try:
                    work.prepare(console)
                except (CandidateError, DataError, SpaceError) as error:
                    if len(judged) == 1:
                        raise
                    console.say(f"{estimator.label} is left out: {error}")
                    continue
                work.run(left, console)


def check_estimators(plan: CertifyPlan, judged: Sequence[Judged], dataset: Dataset, space: SearchSpace) -> None:
    """UserError when an estimator refuses its options, the data or the space, or its file has another's estimates."""
    for estimator in judged:
        _Work(plan, estimator, dataset, space)


def judged_before(plan: CertifyPlan, judged: Sequence[Judged], dataset: Dataset, space: SearchSpace, console: Console
                  ) -> list[Judged]:
    """Estimators besides `judged` with an estimate for every network in this folder; notes name those out of date."""
    earlier = []
    for path in sorted((plan.out / "estimates").glob("*.json")):
        if any(estimator.file(plan.out) == path for estimator in judged):
            continue
        try:
            document = ESTIMATES.find(path) or {}
            estimator = Judged(str(document.get("label")), str(document.get("accuracy")), document.get("options") or {})
            if not _Work(plan, estimator, dataset, space).left(1):
                earlier.append(estimator)
        except UserError as error:
            console.say(f"note: an earlier estimator is left out: {error}")
    return earlier


def _warm_up(network: Network, dataset: Dataset) -> None:
    """Import and start everything that a training needs, so that no estimator's first network pays for it."""
    from hwnas.networks.build import build
    from hwnas.training.loop import predict, train
    from hwnas.training.recipe import PROXY

    few = dataset.train.take(np.arange(min(16, len(dataset.train))))
    recipe = replace(PROXY, epochs=1, min_steps=0, max_steps=1, threads=1)
    predict(train(build(network.architecture), few, recipe=recipe, dataset=dataset, seed=0), few.images, dataset)


class _Work:
    """One estimator at work; its file is written after each network."""

    def __init__(self, plan: CertifyPlan, judged: Judged, dataset: Dataset, space: SearchSpace) -> None:
        self.plan, self.judged = plan, judged
        options = dict(judged.options)
        if judged.accuracy in BUILT_IN and judged.accuracy not in WITHOUT_IMAGES:
            options = {"threads": 1, **options}
        self.estimator = load_estimator(judged.accuracy, dataset=dataset, space=space, config=options)
        self.content = self._content()

    def left(self, seeds: int) -> list[tuple[Network, int]]:
        """Networks and seeds without an estimate, in an order that does not depend on their costs."""
        order = np.random.default_rng([self.plan.seed, _STREAM]).permutation(len(self.plan.networks))
        have = {(row["id"], row["seed"]) for row in self.content["results"]}
        every = [(self.plan.networks[row], seed) for seed in range(seeds) for row in order]
        return [pair for pair in every if (pair[0].id, pair[1]) not in have]

    def run(self, left: Sequence[tuple[Network, int]], console: Console) -> None:
        """Ask for the estimates of these networks and seeds."""
        with console.step(f"estimate: {self.judged.label}") as report:
            for done, (network, seed) in enumerate(left, start=1):
                self.content["results"].append(self._result(network, seed))
                self._write()
                report(done / len(left), f"{done} of {len(left)}")

    def _content(self) -> dict[str, Any]:
        path, fingerprint = self.judged.file(self.plan.out), self.estimator.fingerprint
        stored = ESTIMATES.find(path)
        if stored is not None and stored.get("fingerprint") != fingerprint:
            raise StudyError(f"{path} is of another recipe (fingerprint {stored.get('fingerprint')}, now "
                             f"{fingerprint}). Remove it to judge anew, or give the estimator another label.")
        networks = {network.id for network in self.plan.networks}
        if stored is not None and any(row["id"] not in networks for row in stored["results"]):
            raise StudyError(f"{path} is of other networks than {self.plan.out} has now. Remove it to judge anew.")
        return stored or {
            **ESTIMATES.header, "label": self.judged.label, "accuracy": self.judged.accuracy,
            "options": dict(self.judged.options), "fingerprint": fingerprint, "setup_seconds": 0.0,
            "setup_cpu_seconds": None, "results": []}

    def prepare(self, console: Console) -> None:
        """Do the work before the first estimate.

        `setup_cpu_seconds` is known if this process did all of it, for this estimator or for another that shares it.
        """
        if not isinstance(self.estimator, Prepares):
            return
        wall, before = time.perf_counter(), cpu_seconds()
        self.estimator.prepare(console)
        wall = time.perf_counter() - wall
        self.content["setup_seconds"] = float(self.estimator.setup_seconds)
        if getattr(self.estimator, "setup_here", True) and wall >= self.content["setup_seconds"] > 0:
            self.content["setup_cpu_seconds"] = cpu_seconds() - before
        elif self.content["setup_cpu_seconds"] is None:
            self.content["setup_cpu_seconds"] = self._shared_cpu_seconds()
        self._write()

    def _shared_cpu_seconds(self) -> float | None:
        """Processor seconds of the same setup under another label. Equal `setup_seconds` show that it is the same."""
        for path in sorted(self.judged.file(self.plan.out).parent.glob("*.json")):
            other = ESTIMATES.find(path) or {}
            if all(other[key] == self.content[key] for key in ("accuracy", "setup_seconds")) \
                    and other["setup_cpu_seconds"] is not None:
                return float(other["setup_cpu_seconds"])
        return None

    def _result(self, network: Network, seed: int) -> dict[str, Any]:
        wall, before = time.perf_counter(), cpu_seconds()
        result: dict[str, Any] = {"id": network.id, "seed": seed}
        try:
            estimate = ask(self.estimator, network, self._earlier(seed), seed)
            result |= {"value": estimate.value, "std": estimate.std, "stopped": estimate.stopped,
                       "curve": list(estimate.curve)}
            if not math.isfinite(estimate.value):
                result["reason"] = f"top-1 is {estimate.value}"
        except CandidateError as error:
            result["reason"] = " ".join(str(error).split())
        return result | {"seconds": time.perf_counter() - wall, "cpu_seconds": cpu_seconds() - before}

    def _earlier(self, seed: int) -> list[Earlier]:
        """The networks that a search would know by now."""
        costs = {network.id: network.cost for network in self.plan.networks}
        return [Earlier((costs[row["id"]],), row["value"], row["std"], tuple(row["curve"]), row["stopped"])
                for row in self.content["results"] if row["seed"] == seed and "reason" not in row]

    def _write(self) -> None:
        write_atomic(self.judged.file(self.plan.out), json.dumps(finite(self.content), indent=1) + "\n")


def ask(estimator: AccuracyEstimator, network: Network, earlier: Sequence[Earlier], seed: int) -> Estimate:
    """Ask for an estimate as a search does; CandidateError."""
    if isinstance(estimator, EvaluatesAmong):
        return estimator.evaluate_among(network.architecture, (network.cost,), earlier, seed)
    return estimator.evaluate(network.architecture, [other.curve for other in earlier if other.curve], seed)


def cpu_seconds() -> float:
    """Processor time of this process and its ended children. A busy machine changes it little."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
