"""Makes a certificate from trainings and estimates, and writes it with its table and picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.accuracy.certificate import CERTIFICATE, COLUMNS, cost_of, keep, key_of, ranked, rows, sentences
from hwnas.certify.estimates import ESTIMATES, Judged
from hwnas.certify.plan import CertifyPlan
from hwnas.certify.truth import Training, epochs_done, read_training
from hwnas.cli.progress import Console, text_table
from hwnas.errors import DataError
from hwnas.front.picture import CAP, FRONT, OTHER
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
from hwnas.system.paths import write_atomic
from hwnas.system.tables import finite, table_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace


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
    for at, label in enumerate(labels):
        entry = content["estimators"][label]
        color = FRONT if label == content["best"] else CAP if (entry["low"] or 0) <= 0 else OTHER
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
        known = {"", dataset.fingerprint, dataset.former}
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
    from hwnas.front.verification import now, versions
    from hwnas.target import Host

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
    for label, values in estimates.items():
        if best is None or label == content["best"]:
            continue
        usable = np.isfinite(values) & np.isfinite(best) & np.isfinite(truth)
        if usable.sum() < LEAST:
            continue
        of = _difference(*(paired(kendall_tau, values_of[usable], truth[usable]) for values_of in (best, values)))
        content["estimators"][label]["behind_best"] = with_interval(of, int(usable.sum()))


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
