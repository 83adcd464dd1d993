"""Certificates: find and check them, ask which estimator they favour, and describe them for a search's report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.accuracy.estimator import REMOVED
from hwnas.cli.options import Config, read_value
from hwnas.cli.progress import interval, number
from hwnas.errors import ConfigError, StudyError, UnknownName
from hwnas.system.documents import Document
from hwnas.system.paths import certificate_dirs, home, search_space_dirs, write_atomic

if TYPE_CHECKING:
    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace


_MAYBE = (float, None)
_RANK = {"kendall_tau": _MAYBE, "low": _MAYBE, "high": _MAYBE}
_ESTIMATOR = {
    **_RANK, "accuracy": str, "options": dict, "fingerprint": str, "failed": int, "spearman": _MAYBE,
    "cpu_seconds": float, "cpu_seconds_amortised": float, "setup_seconds": float, "setup_cpu_seconds?": _MAYBE,
    "share_of_full": float, "top_k_regret?": _MAYBE, "hypervolume_loss?": _MAYBE, "behind_best?": ([_MAYBE], None),
    "cost_source?": (str, None)}
_TRUTH = {
    **dict.fromkeys(("trainings", "failed", "seeds", "networks", "epochs", "n_test"), int),
    **dict.fromkeys(("top1_low", "top1_high", "std_networks", "std_binomial", "seconds"), float),
    "std_seeds": _MAYBE, "cpu_seconds": _MAYBE}
_SHAPE = {
    "dataset": {"name": str, "key": str, "fingerprint": str, "folder?": (str, None)}, "n": int, "host": str,
    "space": {"name": str, "fingerprint": str}, "cost_source": str, "truth": _TRUTH, "ceiling": (_RANK, None),
    "estimators": {"*": _ESTIMATOR}, "best?": (str, None), "created": str}
CERTIFICATE = Document("hwnas-certificate", 1, "a certificate", "Remove it, and certify again.", shape=_SHAPE)
TRIALS = 200  # networks of a search that share the work before the first estimate
LEAST_CEILING = 0.5
SHARE = 0.1  # most that an estimate may cost, as a share of a full training's cost
COLUMNS = ("estimator", "Kendall tau", "95 %", "Spearman", "regret (points)", "hypervolume lost", "s each",
           "setup (s)", "s with setup", "of full training")


@dataclass(frozen=True)
class Certificate:
    """A certificate's file.

    `content` names the data set, space, number of networks and the source of their costs (`dataset`, `space`, `n`,
    `cost_source`). `truth` describes full training: spread, noise, cost, options. `ceiling` says how one seed ranks
    another's results. There is an entry for each estimator, and every network has its values. An estimator has a
    `cost_source` when its times were not measured beside the trainings; it says how they were.
    Times are in seconds, top-1 and regret are fractions, and intervals have the confidence `level`.
    """

    path: Path
    content: Mapping[str, Any]

    @property
    def estimators(self) -> Mapping[str, Mapping[str, Any]]:
        """Entries by label: kendall_tau, low, high, seconds, cpu_seconds, setup_seconds, fingerprint and more."""
        estimators: Mapping[str, Mapping[str, Any]] = self.content["estimators"]
        return estimators

    @property
    def trainings(self) -> int:
        """Number of full trainings behind the certificate."""
        return int(self.content["truth"]["trainings"])

    def fits(self, dataset: Dataset, space: SearchSpace) -> bool:
        """Whether it was made for this data set (name, classes, image size) and exactly this space."""
        return (self.content["dataset"]["key"], self.content["space"]["fingerprint"]) == (key_of(dataset),
                                                                                        space.fingerprint)


def key_of(dataset: Dataset) -> str:
    """Names a data set by name, classes, channels and image size. The splits of its images do not count."""
    content = json.dumps([dataset.name, list(dataset.class_names), dataset.channels, dataset.image_size])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file; StudyError when it is missing, torn or foreign."""
    return Certificate(path, CERTIFICATE.read(path))


def find_certificate(dataset: Dataset, space: SearchSpace) -> Certificate | None:
    """The certificate that fits: the user's folder comes first, then the shipped ones. None when there is none.

    If several fit in one folder, the one with most trainings counts, then the newest. StudyError for a file that is
    no certificate.
    """
    for folder in certificate_dirs():
        stored = [read_certificate(path) for path in sorted(folder.glob("*.json"))]
        fitting = [certificate for certificate in stored if certificate.fits(dataset, space)]
        if fitting:
            return max(fitting, key=lambda certificate: (certificate.trainings, str(certificate.content["created"])))
    return None


def favoured(certificate: Certificate, seconds_available: float, n_trials: int) -> str | None:
    """The label of the estimator that ranks best within the time; the cheapest of equal ones.

    It must judge `n_trials` networks in `seconds_available` of one core, setup included, and its interval must lie
    above 0 (chance). None when no estimator does both.
    """
    affordable = (label for label, entry in ranked(certificate.content)
                  if (entry["low"] or 0) > 0 and entry["accuracy"] not in REMOVED
                  and setup_cost(entry) + n_trials * entry["cpu_seconds"] <= seconds_available)
    return next(affordable, None)


def ranked(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Estimators that have a rank correlation, the best first; of equal ones, the cheapest comes first."""
    entries = [(label, entry) for label, entry in content["estimators"].items() if entry.get("kendall_tau") is not None]
    yield from sorted(entries, key=lambda item: (-item[1]["kendall_tau"], cost_of(item[1])))


def setup_cost(entry: Mapping[str, Any]) -> float:
    """Seconds of work before an estimator's first estimate: processor time if it is known."""
    cpu = entry.get("setup_cpu_seconds")
    return float(entry["setup_seconds"] if cpu is None else cpu)


def cost_of(entry: Mapping[str, Any], n_trials: int = TRIALS) -> float:
    """Processor seconds for one network, with its share of the setup."""
    return float(entry["cpu_seconds"]) + setup_cost(entry) / n_trials


def keep(content: Mapping[str, Any], text: str) -> tuple[Path, bool]:
    """Put a certificate where searches look for it; returns its path and whether it was written.

    A stored certificate of the same space with more trainings stays instead.
    """
    data = content["dataset"]
    place = home() / "certificates" / f"{data['name']}-{content['space']['name']}-{data['image_size']}px-" \
                                      f"{data['key'][:6]}.json"
    if place.is_file():
        held = read_certificate(place)
        same = held.content["space"]["fingerprint"] == content["space"]["fingerprint"]
        if same and held.trainings > content["truth"]["trainings"]:
            return place, False
    write_atomic(place, text)
    return place, True


NAME = "certified"


@dataclass(frozen=True)
class Chosen:
    """An estimator's name, its own options, and why it is used (empty where the user named it)."""

    accuracy: str
    options: Mapping[str, Any]
    why: str = ""


def look_up(dataset: Dataset, space: SearchSpace) -> Certificate | StudyError | None:
    """The result of `find_certificate`, or its error, for callers that can work without a certificate."""
    try:
        return find_certificate(dataset, space)
    except StudyError as error:
        return error


def choose(config: Config, certificate: Certificate | None, dataset: Dataset, space: SearchSpace,
           n_trials: int) -> Chosen:
    """The estimator that `certificate` favours, with the options that it was certified with.

    `config` is the section `certified`: `minutes` of one core for `n_trials` networks, setup included. None means the
    time that the certificate's proxy would take. ConfigError when there is no certificate, or it favours none.
    """
    for key in config:
        if key != "minutes":
            raise UnknownName("key of certified", key, ("minutes",))
    if certificate is None:
        raise ConfigError(f"accuracy=certified: there is no certificate for {dataset.name} at {dataset.image_size} px "
                          f"and space {space.name}. Make one with hwnas certify, or give accuracy=proxy.")
    seconds = _seconds(config.get("minutes"), certificate, n_trials)
    label = favoured(certificate, seconds, n_trials)
    within = f"within {seconds / 60:.3g} min of one core for {n_trials} networks"
    if label is None:
        raise ConfigError(f"accuracy=certified: of the estimators in {certificate.path} none is shown to rank above "
                          f"chance {within}. Set certified.minutes higher, or give accuracy=proxy.")
    entry = certificate.estimators[label]
    return Chosen(str(entry["accuracy"]), dict(entry["options"]),
                  f"accuracy: {label}, which the certificate of {certificate.content['created']} favours {within}: "
                  f"Kendall tau {entry['kendall_tau']:.2f} ({entry['low']:.2f} to {entry['high']:.2f}) "
                  "against full training")


def _seconds(minutes: object, certificate: Certificate, n_trials: int) -> float:
    if minutes is None:
        proxy = certificate.estimators.get("proxy")
        if proxy is None:
            raise ConfigError(f"accuracy=certified: {certificate.path} judges no proxy, whose time would count. Give "
                              "certified.minutes=NUMBER.")
        return setup_cost(proxy) + n_trials * float(proxy["cpu_seconds"])
    return 60.0 * float(read_value(minutes, float | None, "certified.minutes", above=0, below=10**6))


def sentences(content: Mapping[str, Any]) -> list[str]:
    """The certificate's conclusions in plain sentences."""
    texts = (_truth(content), _ceiling(content), _favoured(content), _costs(content), _failures(content))
    return [text for text in texts if text]


def rows(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of COLUMNS for each estimator, the best first, those without a correlation last."""
    order = [label for label, _ in ranked(content)]
    order += [label for label in content["estimators"] if label not in order]
    return [_row(label, content["estimators"][label]) for label in order]


def _row(label: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    regret, lost = entry.get("top_k_regret"), entry.get("hypervolume_loss")
    return (label, number(entry["kendall_tau"], ".2f"), interval(entry["low"], entry["high"], ".2f"),
            number(entry["spearman"], ".2f"), number(None if regret is None else 100 * regret, ".2f"),
            "" if lost is None else f"{lost:.1%}", number(entry["cpu_seconds"], ".3f"), f"{entry['setup_seconds']:.0f}",
            number(entry["cpu_seconds_amortised"], ".3f"), f"{entry['share_of_full']:.2%}")


def _truth(content: Mapping[str, Any]) -> str:
    truth = content["truth"]
    noise = "" if truth["std_seeds"] is None else f"; seeds differ by {100 * truth['std_seeds']:.2f}"
    cost = f"{truth['cpu_seconds']:.0f} s of a core" if truth["cpu_seconds"] else f"{truth['seconds']:.0f} s"
    return (f"{truth['networks']} networks, spread over {content['cost_source']}, trained in full {truth['trainings']} "
            f"times ({truth['epochs']} epochs, {cost} each): test top-1 {truth['top1_low']:.2%} to "
            f"{truth['top1_high']:.2%}, standard deviation {100 * truth['std_networks']:.2f} points between networks"
            f"{noise}, {truth['n_test']} test images alone by {100 * truth['std_binomial']:.2f}.")


def _ceiling(content: Mapping[str, Any]) -> str:
    ceiling = content["ceiling"]
    if ceiling is None or ceiling["kendall_tau"] is None:
        return "How well one full training ranks another is not known: that takes seeds=2."
    meaning = (f"estimators are held against the mean of {content['truth']['seeds']} seeds, which is steadier, so that "
               "a good one may come out somewhat above." if ceiling["kendall_tau"] >= LEAST_CEILING else
               "these trainings rank by chance more than by merit. Train longer, on more images or with more seeds.")
    return (f"One full training ranks the networks as another seed's does with tau {ceiling['kendall_tau']:.2f} "
            f"({interval(ceiling['low'], ceiling['high'], '.2f')}): {meaning}")


def _favoured(content: Mapping[str, Any]) -> str:
    full = content["truth"]["cpu_seconds"] or content["truth"]["seconds"]
    label = favoured(Certificate(Path(), content), SHARE * full * TRIALS, TRIALS)
    within = f"At {SHARE:.0%} of a full training's cost for each of {TRIALS} networks, setup included,"
    if label is None:
        return f"{within} no estimator is shown to rank above chance."
    best = content["estimators"][label]
    others = [(name, entry) for name, entry in ranked(content) if name != label]
    overlap = [name for name, entry in others if entry["high"] is not None and best["low"] is not None
               and entry["high"] >= best["low"] and best["high"] >= entry["low"]]
    between = interval(best["low"], best["high"], ".2f")
    words = f"{within} {label} is favoured: tau {best['kendall_tau']:.2f} ({between})"
    if others:
        words += (f"; its interval overlaps {'those of ' if len(overlap) > 1 else 'that of '}{', '.join(overlap)}"
                  if overlap else "; no other's interval overlaps its own")
    return f"{words}.{_apart(content, label)}"


def _apart(content: Mapping[str, Any], label: str) -> str:
    """Which estimators the best one clearly beats. Paired draws show this better than two separate intervals."""
    if label != content.get("best"):
        return f" Without that limit {content.get('best')} ranks best."
    behind = [name for name, entry in content["estimators"].items()
              if any((low or 0) > 0 for low in (entry.get("behind_best") or ())[1:2])]
    return f" Drawn in pairs it is ahead of {', '.join(behind)}." if behind else ""


def _costs(content: Mapping[str, Any]) -> str:
    """Which estimators were not timed beside the trainings, and how they were timed."""
    sources = [f"{label}: {entry['cost_source']}" for label, entry in content["estimators"].items()
               if entry.get("cost_source")]
    return f"Costs taken otherwise: {'; '.join(sources)}." if sources else ""


def _failures(content: Mapping[str, Any]) -> str:
    failures = [f"{label} on {entry['failed']}" for label, entry in content["estimators"].items() if entry["failed"]]
    trained = content["truth"]["failed"]
    words = ([f"{trained} trainings failed" if trained > 1 else "one training failed"] if trained else []) + \
        ([f"no estimate by {', '.join(failures)}"] if failures else [])
    return f"Left out: {'; '.join(words)}." if words else ""


def certificate_facts(certificate: Certificate | StudyError | None, dataset: Dataset, space: SearchSpace, accuracy: str,
                      options: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    """What a search's report says about its certificate, as `lines` and `table`.

    `certificate` is the result of `look_up`. The facts name it, or the command that makes one, and what it says about
    the estimator that was used. If it cannot be read, a line says so; no error is raised.
    """
    if isinstance(certificate, StudyError):
        return {"accuracy": accuracy, "lines": [f"No certificate could be looked up: {certificate}"]}
    if certificate is None:
        return {"accuracy": accuracy, "lines": [
            f"No certificate for {dataset.name} at {dataset.image_size} px and space {space.name}. How well "
            f"accuracy={accuracy} ranks networks here was not checked, so treat its values as estimates. To check it: "
            f"hwnas certify {_command(dataset, space)}"]}
    used = [_describe_used(certificate, accuracy, options, fingerprint, dataset)]
    return {"accuracy": accuracy, "file": certificate.path.name, "created": certificate.content["created"],
            "host": certificate.content["host"], "lines": [*used, *sentences(certificate.content)],
            "columns": list(COLUMNS), "table": [list(row) for row in rows(certificate.content)]}


def _command(dataset: Dataset, space: SearchSpace) -> str:
    root = " dataset.root=DIR" if dataset.name not in ("digits", "digit_scenes") else ""
    size = f" dataset.image_size={dataset.image_size}" if len(space.image_sizes) == 1 else ""
    place = space.name if space.source is None or space.source.parent in search_space_dirs() else space.source
    return f"dataset={dataset.name}{root}{size} space={place} n=16 seeds=2"


def _describe_used(certificate: Certificate, accuracy: str, options: Mapping[str, Any], fingerprint: str,
                   dataset: Dataset) -> str:
    """What the certificate says about the estimator of the search.

    The fingerprint identifies it; if only the images differ, its options do.
    """
    options = _decisive(options)
    mine = {label: entry for label, entry in certificate.estimators.items() if entry["accuracy"] == accuracy}
    same = next((label for label, entry in mine.items() if entry["fingerprint"] == fingerprint), None)
    other_images = certificate.content["dataset"]["fingerprint"] != dataset.fingerprint
    if same is None and other_images:
        same = next((label for label, entry in mine.items() if _decisive(entry["options"]) == options), None)
    label = same or next(iter(mine), None)
    if label is None:
        return f"This search used accuracy={accuracy}, which the certificate does not judge."
    entry = mine[label]
    kind = ("another recipe of it" if same is None else
            _other_images(certificate, dataset) if other_images else "this recipe")
    tau = "no rank correlation" if entry["kendall_tau"] is None else \
        f"Kendall tau {entry['kendall_tau']:.2f} ({interval(entry['low'], entry['high'], '.2f')})"
    return (f"This search used accuracy={accuracy}. Certified with {kind} ({label}): {tau} against full training, "
            f"{entry['cpu_seconds_amortised']:.3g} s a network with its share of the setup over {TRIALS}, "
            f"{entry['share_of_full']:.2%} of a full training.")


def _other_images(certificate: Certificate, dataset: Dataset) -> str:
    """What to say about other images. A folder's classes and size identify it, and another product may share both."""
    if dataset.name != "imagefolder":
        return "other images of this data set"
    folder = certificate.content["dataset"].get("folder") or "another folder"
    return f"other images of the same classes, those in {folder}"


def _decisive(options: Mapping[str, Any]) -> dict[str, Any]:
    """An estimator's options that decide its values."""
    return {key: value for key, value in options.items() if key not in ("threads", "device", "path")}
