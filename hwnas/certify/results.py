"""The estimators' values for a certificate's networks, and the certificate with its table and picture.

Estimators are asked in turn, as in a search, and their answers are stored at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.accuracy.certificate import (
    CERTIFICATE,
    COLUMNS,
    cost_of,
    keep,
    key_of,
    ranked,
    rows,
    sentences,
)
from hwnas.accuracy.estimator import (
    BUILT_IN,
    REMOVED,
    WITHOUT_IMAGES,
    AccuracyEstimator,
    Earlier,
    Estimate,
    EvaluatesAmong,
    Prepares,
    load_estimator,
)
from hwnas.certify.truth import CertifyPlan, Network, Training, epochs_done, read_training
from hwnas.cli.progress import Console, text_table
from hwnas.errors import CandidateError, ConfigError, DataError, SpaceError, StudyError, UnknownName, UserError
from hwnas.front.picture import CAP, FRONT, OTHER
from hwnas.front.verification import versions
from hwnas.networks.build import build
from hwnas.pictures import INK, MUTED, figure_bytes, new_figure, title
from hwnas.stats import (
    LEAST,
    LEVEL,
    Array,
    K,
    OfRows,
    hypervolume_loss,
    kendall_tau,
    paired,
    spearman,
    top_k_regret,
    with_interval,
)
from hwnas.system.documents import Document, now
from hwnas.system.paths import write_atomic
from hwnas.system.run_folder import WorkFolder
from hwnas.system.tables import finite, table_csv
from hwnas.target import Host
from hwnas.training.loop import predict, train
from hwnas.training.place import CPU, resolved
from hwnas.training.recipe import PROXY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace


ESTIMATES = Document("hwnas-estimates", 1, "an estimator's answers", "Remove it to judge anew.")
DEFAULT = ("proxy", "multi_fidelity")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}")
_STREAM = 0x04DE


@dataclass(frozen=True, slots=True)
class Judged:
    """An estimator to judge: its label in the certificate, the value of `accuracy`, its own options."""

    label: str
    accuracy: str
    options: Mapping[str, Any]

    def file(self, out: Path) -> Path:
        """The file of its estimates."""
        return out / "estimates" / f"{self.label}.json"


def read_judged(value: object, default: Sequence[str] = DEFAULT) -> list[Judged]:
    """Read the option `estimators`: a list of names and sections, or one section (None: `default`).

    A section maps labels to options. If the label does not name the estimator, the option `accuracy` does.
    ConfigError, UnknownName.
    """
    listed = _list_labels(list(default) if value is None else value)
    if not all(isinstance(options, dict) for _, options in listed):
        raise ConfigError("estimators must be a list of names or a section of labels and options, e.g. "
                          f"{{long: {{accuracy: proxy, epochs: 6}}}}, got {value!r}.")
    by_label = {label: dict(options) for label, options in listed}
    if len(by_label) < len(listed):
        raise ConfigError(f"estimators names one twice: {', '.join(label for label, _ in listed)}. Name each once.")
    if not by_label:
        raise ConfigError("estimators is empty. Name one at least, e.g. estimators=[proxy].")
    return [_read_entry(name, options) for name, options in by_label.items()]


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

    known = [*BUILT_IN, *(entry.name for entry in entry_points(group="hwnas.accuracy"))]
    if (own := name.partition(":")[0]) in REMOVED and own not in known:  # another package may have one of that name
        raise UnknownName("accuracy estimator", own, known, REMOVED)
    if not _LABEL.fullmatch(name):
        raise ConfigError(f"estimators: a label must be a plain name, got {name!r}.")
    accuracy = str(options.pop("accuracy", name))
    if accuracy not in known:
        raise UnknownName("accuracy estimator", accuracy, known, REMOVED)
    return Judged(name, accuracy, options)


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
    few = dataset.train.take(np.arange(min(16, len(dataset.train))))
    recipe = replace(PROXY, epochs=1, min_steps=0, max_steps=1, threads=1)
    predict(train(build(network.architecture), few, recipe=recipe, dataset=dataset, seed=0), few.images, dataset)


class _Work:
    """One estimator at work; its file is written after each network."""

    def __init__(self, plan: CertifyPlan, judged: Judged, dataset: Dataset, space: SearchSpace) -> None:
        self.plan, self.judged = plan, judged
        options = dict(judged.options)
        if judged.accuracy in BUILT_IN and judged.accuracy not in WITHOUT_IMAGES:
            options = {"threads": 1, "device": resolved(plan.training.get("device", CPU)), **options}
        if judged.accuracy == "inherited":
            options["pretrained"] = plan.training.get("pretrained", {})
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


_ACROSS = 3


def certificate_figure(content: Mapping[str, Any]) -> Figure:
    """The picture of a certificate.

    Left: Kendall's tau of each estimator, beside that of full training. Right: estimates against truth; the size of a
    mark shows the cost.
    """
    labels = [label for label, _ in ranked(content)]
    down = max(1, math.ceil(len(labels) / _ACROSS))
    height = 1.9 + 2.6 * down
    heading = (f"How well estimates rank: {content['space']['name']} on {_data(content)}, "
               f"{content['dataset']['image_size']} px")
    with new_figure(13.5, height, heading, _subtitle(content), left=0.02) as figure:
        halves = figure.add_gridspec(1, 2, left=0.02, right=0.985, top=1 - 1.3 / height, bottom=0.62 / height,
                                     width_ratios=(1, 1.9), wspace=0.13)
        inner = halves[0].subgridspec(1, 2, width_ratios=(0.38, 1), wspace=0)
        _draw_taus(figure.add_subplot(inner[1]), content, labels)
        grid = halves[1].subgridspec(down, _ACROSS, hspace=0.62, wspace=0.28)
        for index, label in enumerate(labels):
            axes = figure.add_subplot(grid[index // _ACROSS, index % _ACROSS])
            _draw_scatter(axes, content, label, first=index % _ACROSS == 0)
    return figure


def _data(content: Mapping[str, Any]) -> str:
    """The data set's name; for `imagefolder`, the folder's name, which says more."""
    data = content["dataset"]
    return str(data["folder"] if data["name"] == "imagefolder" and data.get("folder") else data["name"])


def _subtitle(content: Mapping[str, Any]) -> str:
    truth = content["truth"]
    times = f"{truth['trainings']} trainings in full ({truth['epochs']} epochs)"
    dear = "MACs" if content["cost"] == "macs" else "predicted latency"
    return (f"{truth['networks']} networks, {times} · {content['host']} · {str(content['created'])[:10]} · marks are "
            f"larger with {dear}, red intervals hold 0")


def _draw_taus(axes: Axes, content: Mapping[str, Any], labels: Sequence[str]) -> None:
    title(axes, f"Kendall's tau with {content['level']:.0%} intervals")
    axes.set_xlabel("rank correlation with full training")
    ceiling = content["ceiling"]
    if ceiling is not None and ceiling["kendall_tau"] is not None:
        axes.axvspan(ceiling["low"], ceiling["high"], color=MUTED, alpha=0.1, lw=0, zorder=0)
        axes.axvline(ceiling["kendall_tau"], color=MUTED, lw=1, ls="--", zorder=1,
                     label="one full training, other seed")
    for at, estimator in enumerate(labels):
        entry = content["estimators"][estimator]
        color = FRONT if estimator == content["best"] else CAP if (entry["low"] or 0) <= 0 else OTHER
        axes.plot([entry["low"], entry["high"]], [at, at], color=color, lw=2.2, alpha=0.6, solid_capstyle="round")
        axes.plot(entry["kendall_tau"], at, "o", color=color, mec="white", ms=7, zorder=3)
        axes.annotate(f"{entry['kendall_tau']:.2f}", (entry["kendall_tau"], at), (0, 7), textcoords="offset points",
                      ha="center", fontsize=8.5, color=INK)
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(range(len(labels)), [f"{label}\n{_cost(content['estimators'][label])}" for label in labels],
                    color=INK, fontsize=8.5)
    axes.set_xlim(right=1.04)
    axes.set_ylim(len(labels) - 0.4, -0.75 if ceiling is None else -0.95)
    axes.grid(visible=False, axis="y")
    if ceiling is not None:
        axes.legend(loc="upper left", frameon=True, facecolor="white", edgecolor="none", framealpha=1, fontsize=8,
                    borderaxespad=0)


def _cost(entry: Mapping[str, Any]) -> str:
    share = entry["share_of_full"]
    return f"{share:.1%} of a training" if share >= 0.001 else f"{entry['cpu_seconds_amortised']:.2g} s"


def _draw_scatter(axes: Axes, content: Mapping[str, Any], label: str, first: bool) -> None:
    title(axes, label)
    points = [(network["estimates"][label], network["top1"], network["cost"]) for network in content["networks"]
              if network["estimates"].get(label) is not None and network["top1"] is not None]
    x, y, cost = (np.array(values) for values in zip(*points, strict=True))
    dearness = np.argsort(np.argsort(cost)) / max(1, len(cost) - 1)
    axes.scatter(100 * x, 100 * y, s=18 + 46 * dearness, color=FRONT if label == content["best"] else OTHER,
                 edgecolor="white", lw=0.8, zorder=3)
    axes.margins(0.12)
    axes.set_xlabel("estimate (%)", fontsize=8.5)
    if first:
        axes.set_ylabel("test top-1 in full (%)", fontsize=8.5)


class Truth:
    """Test top-1 of a plan's networks: `each` [n, seeds] of every training, `mean` [n] over seeds; NaN: no training.

    DataError when too few networks are trained, or when they were trained on other images than those of `dataset`.
    """

    def __init__(self, plan: CertifyPlan, dataset: Dataset) -> None:
        self.plan = plan
        self.trainings = [[read_training(plan, network, seed) for seed in range(plan.seeds)]
                          for network in plan.networks]
        self.done = [training for row in self.trainings for training in row if training is not None]
        self.cost = np.array([network.cost for network in plan.networks])
        self.each = np.array([[np.nan if training is None or training.top1 is None else training.top1
                               for training in row] for row in self.trainings])
        counts = np.isfinite(self.each).sum(axis=1)
        self.mean: Array = np.divide(np.nansum(self.each, axis=1), counts, out=np.full(len(counts), np.nan),
                                     where=counts > 0)
        self._check(dataset)

    def _check(self, dataset: Dataset) -> None:
        same_size = all(network.architecture.image_size == dataset.image_size for network in self.plan.networks)
        known = {"", dataset.fingerprint}
        other = {training.dataset for training in self.done} - known
        if other and same_size:
            raise DataError(f"{self.plan.out} was trained on other images ({', '.join(sorted(other))}) than there are "
                            f"now ({dataset.fingerprint}). Give another out=FOLDER.")
        if np.isfinite(self.mean).sum() < LEAST:
            raise DataError(f"{int(np.isfinite(self.mean).sum())} networks of {len(self.plan.networks)} are trained in "
                            f"{self.plan.out}; {LEAST} are needed at least. Train more: the same command without "
                            "only=estimators.")

    @property
    def whole(self) -> bool:
        """Whether every training is finished; failed ones count as finished."""
        return len(self.done) == len(self.plan.networks) * self.plan.seeds

    @property
    def good(self) -> list[Training]:
        """The trainings that did not fail."""
        return [training for training in self.done if training.top1 is not None]

    def summary(self) -> dict[str, Any]:
        """Summary of the trainings: spread of the networks, noise of one training, and cost of one training."""
        good, both = self.good, np.isfinite(self.each).sum(axis=1) > 1
        spread = np.nanvar(self.each[both], axis=1, ddof=1).mean() ** 0.5 if both.any() else np.nan
        cpu = [training.cpu_seconds for training in good if training.cpu_seconds is not None]
        shares = np.array([(training.top1 or 0.0) for training in good])
        return {
            "trainings": len(good), "failed": len(self.done) - len(good), "seeds": self.plan.seeds,
            "networks": int(np.isfinite(self.mean).sum()), "epochs": epochs_done(self.plan), "n_test": good[0].n_test,
            "top1_low": float(np.nanmin(self.mean)), "top1_high": float(np.nanmax(self.mean)),
            "std_networks": float(np.nanstd(self.mean, ddof=1)), "std_seeds": float(spread),
            "std_binomial": float(np.sqrt(np.mean(shares * (1 - shares)) / good[0].n_test)),
            "seconds": float(np.mean([training.seconds for training in good])),
            "cpu_seconds": float(np.mean(cpu)) if cpu else None, "options": dict(self.plan.training)}

    def ceiling(self) -> dict[str, Any] | None:
        """How well one seed's trainings rank another seed's: the mean over pairs of seeds."""
        rows = self.each[np.isfinite(self.each).all(axis=1)]
        pairs = list(combinations(range(self.plan.seeds), 2))
        if len(rows) < LEAST or not pairs:
            return None
        intervals = [with_interval(_mean([paired(of, rows[:, a], rows[:, b]) for a, b in pairs]), len(rows))
                     for of in (kendall_tau, spearman)]
        return {"n": len(rows), **_correlations(*intervals)}


def certificate_of(truth: Truth, judged: Sequence[Judged], dataset: Dataset, space: SearchSpace) -> dict[str, Any]:
    """The content of certificate.json."""
    plan = truth.plan
    documents = {estimator.label: document for estimator in judged
                 if (document := ESTIMATES.find(estimator.file(plan.out)))}
    estimates = {label: _values(plan, document) for label, document in documents.items()}
    summary = truth.summary()
    full = summary["cpu_seconds"] or summary["seconds"]
    entries = {label: _entry(documents[label], estimates[label], truth, full) for label in documents}
    content = {
        **CERTIFICATE.header, "created": now(), "host": Host.detect().name, "versions": versions(),
        "dataset": _describe_dataset(plan, dataset),
        "space": {"name": space.name, "fingerprint": space.fingerprint}, "n": len(plan.networks), "seed": plan.seed,
        "cost": plan.cost, "cost_source": plan.cost_source, "k": K, "level": LEVEL, "truth": summary,
        "ceiling": truth.ceiling(), "estimators": entries,
        "networks": [_network(truth, row, estimates) for row in range(len(plan.networks))]}
    _add_behind_best(content, estimates, truth.mean)
    whole: dict[str, Any] = finite(content)
    return whole


def _describe_dataset(plan: CertifyPlan, dataset: Dataset) -> dict[str, Any]:
    return {"name": dataset.name, "folder": Path(str(plan.dataset.get("root") or "")).name, "key": key_of(dataset),
            "fingerprint": dataset.fingerprint, "image_size": dataset.image_size, "channels": dataset.channels,
            "class_names": list(dataset.class_names)}


def _network(truth: Truth, row: int, estimates: Mapping[str, Array]) -> dict[str, Any]:
    network = truth.plan.networks[row]
    return {"id": network.id, "architecture": str(network.architecture), "cost": network.cost, "top1": truth.mean[row],
            "trainings": [training and asdict(training) for training in truth.trainings[row]],
            "estimates": {label: values[row] for label, values in estimates.items()}}


def _values(plan: CertifyPlan, document: dict[str, Any]) -> Array:
    """Estimates [n], the mean over seeds; NaN if an estimate failed or is missing."""
    by_id: dict[str, list[float]] = {network.id: [] for network in plan.networks}
    for row in document["results"]:
        by_id[row["id"]].append(np.nan if "reason" in row else row["value"])
    return np.array([np.mean(values) if values else np.nan for values in by_id.values()])


def _entry(document: dict[str, Any], estimate: Array, truth: Truth, full: float) -> dict[str, Any]:
    """One estimator's entry, over the networks that have both an estimate and a full training.

    Times are those of a network: the sum over the evaluations behind its mean estimate.
    """
    results, usable = document["results"], np.isfinite(estimate) & np.isfinite(truth.mean)
    entry = {key: document[key] for key in ("accuracy", "options", "fingerprint", "setup_seconds", "setup_cpu_seconds")}
    entry |= {"n": int(usable.sum()), "failed": sum("reason" in row for row in results),
              "stopped": sum(bool(row.get("stopped")) for row in results),
              **{key: sum(row[key] for row in results) / len(estimate) for key in ("seconds", "cpu_seconds")}}
    entry["cpu_seconds_amortised"] = cost_of(entry)
    entry["share_of_full"] = entry["cpu_seconds_amortised"] / full
    if usable.sum() < LEAST:
        return entry | _correlations((np.nan,) * 3, (np.nan,) * 3)
    x, y, cost = estimate[usable], truth.mean[usable], truth.cost[usable]
    return entry | _correlations(*(with_interval(paired(of, x, y), len(x)) for of in (kendall_tau, spearman))) | {
        "top_k_regret": top_k_regret(x, y, cost), "hypervolume_loss": hypervolume_loss(x, y, cost),
        "hypervolume_loss_of_truth": hypervolume_loss(y, y, cost)}


def _mean(of: Sequence[OfRows]) -> OfRows:
    return lambda rows: np.mean([statistic(rows) for statistic in of], axis=0)


def _correlations(kendall: tuple[float, ...], rank: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(("kendall_tau", "low", "high", "spearman", "spearman_low", "spearman_high"), (*kendall, *rank),
                    strict=True))


def _add_behind_best(content: dict[str, Any], estimates: dict[str, Array], truth: Array) -> None:
    """Add `behind_best`: by how much the best estimator's tau is higher, paired over the networks that both have."""
    content["best"] = next((label for label, _ in ranked(finite(content))), None)
    best = estimates.get(str(content["best"]))
    for estimator, values in estimates.items():
        if best is None or estimator == content["best"]:
            continue
        usable = np.isfinite(values) & np.isfinite(best) & np.isfinite(truth)
        if usable.sum() < LEAST:
            continue
        of = _difference(*(paired(kendall_tau, values_of[usable], truth[usable]) for values_of in (best, values)))
        content["estimators"][estimator]["behind_best"] = with_interval(of, int(usable.sum()))


def _difference(left: OfRows, right: OfRows) -> OfRows:
    return lambda rows: left(rows) - right(rows)


def write_certificate(plan: CertifyPlan, judged: Sequence[Judged], dataset: Dataset, space: SearchSpace,
                      console: Console) -> None:
    """Write all files of a certificate and print its conclusions. If all trainings are done, searches can use it."""
    truth = Truth(plan, dataset)
    content = certificate_of(truth, judged, dataset, space)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    write_atomic(plan.out / "certificate.csv", table_csv(_table(content)))
    write_atomic(plan.out / "certificate.png", figure_bytes(certificate_figure(content), "png"))
    write_atomic(plan.out / "certificate.json", text)
    for line in (*text_table([COLUMNS, *rows(content)]), *sentences(content)):
        console.say(line)
    console.say(f"certificate: {plan.out / 'certificate.json'}")
    if not truth.whole:
        console.say(f"{len(truth.done)} of {len(plan.networks) * plan.seeds} trainings are done; searches are told "
                    "once all are.")
        return
    place, put = keep(content, text)
    console.say(f"searches of {space.name} on {dataset.name} will find it: {place}" if put else
                f"searches go on with {place}, which stands on more trainings. Remove it to have them use this one.")


def _table(content: dict[str, Any]) -> list[dict[str, Any]]:
    left_out = ("options", "behind_best")
    return [{"estimator": label, **{key: value for key, value in entry.items() if key not in left_out}}
            for label, entry in content["estimators"].items()]
