"""Certificates: found, checked, and asked which estimator they favour."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.options import read_value
from hwnas.errors import ConfigError, StudyError, UnknownName
from hwnas.system.documents import Document
from hwnas.system.paths import certificate_dirs, home, write_atomic

if TYPE_CHECKING:
    from hwnas.data.dataset import Dataset
    from hwnas.space.search_space import SearchSpace


CERTIFICATE = Document("hwnas-certificate", 1, "a certificate", "Remove it, and certify again.")
TRIALS = 200  # networks of a search over which the work before the first estimate is spread
_NEEDED = ("dataset", "space", "n", "truth", "estimators", "created")


@dataclass(frozen=True)
class Certificate:
    """A certificate's file.

    `content` says of what it is (`dataset`, `space`, `n`, `cost_source`), what full training came to (`truth`: spread,
    noise, cost, options; `ceiling`: how one seed ranks another's), holds a line for each estimator and every network's
    values. An estimator's `cost_source`, where there is one, says how its times were had, if not beside the trainings.
    Times are seconds, top-1 and regret fractions, intervals of share `level`.
    """

    path: Path
    content: Mapping[str, Any]

    @property
    def estimators(self) -> Mapping[str, Mapping[str, Any]]:
        """By label: kendall_tau, low, high, seconds, cpu_seconds, setup_seconds, fingerprint and more."""
        found: Mapping[str, Mapping[str, Any]] = self.content["estimators"]
        return found

    @property
    def trainings(self) -> int:
        """Trainings in full that it stands on."""
        return int(self.content["truth"]["trainings"])

    def fits(self, dataset: Dataset, space: SearchSpace) -> bool:
        """Whether it is of this data set (name, classes, image size) and this very space."""
        return (self.content["dataset"]["key"], self.content["space"]["fingerprint"]) == (key_of(dataset),
                                                                                        space.fingerprint)


def key_of(dataset: Dataset) -> str:
    """Names a data set by name, classes, channels and image size, whichever of its images are used for what."""
    content = json.dumps([dataset.name, list(dataset.class_names), dataset.channels, dataset.image_size])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def read_certificate(path: Path) -> Certificate:
    """The certificate in a file; StudyError when it is missing, torn or foreign."""
    content = CERTIFICATE.read(path)
    if any(key not in content for key in _NEEDED):
        raise StudyError(f"{path}: no whole certificate. {CERTIFICATE.remedy}")
    return Certificate(path, content)


def find_certificate(dataset: Dataset, space: SearchSpace) -> Certificate | None:
    """The certificate that fits, in the user's folder first, then the shipped one; None where there is none.

    Of several that fit in a folder, that of most trainings, then the newest. StudyError for a file that is none.
    """
    for folder in certificate_dirs():
        found = [one for path in sorted(folder.glob("*.json")) if (one := read_certificate(path)).fits(dataset, space)]
        if found:
            return max(found, key=lambda one: (one.trainings, str(one.content["created"])))
    return None


def favoured(certificate: Certificate, seconds_available: float, n_trials: int) -> str | None:
    """The label that ranks best of those that can judge `n_trials` networks in `seconds_available` of one core, their
    setup included; of equal ones the cheapest. None where none can of those whose interval is above 0 (chance)."""
    found = {label: one for label, one in ranked(certificate.content)
             if (one["low"] or 0) > 0 and setup_cost(one) + n_trials * one["cpu_seconds"] <= seconds_available}
    return next(iter(found), None)


def ranked(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Estimators that have a rank correlation, the best first, of equal ones the cheapest."""
    found = [(label, one) for label, one in content["estimators"].items() if one.get("kendall_tau") is not None]
    yield from sorted(found, key=lambda item: (-item[1]["kendall_tau"], cost_of(item[1])))


def setup_cost(entry: Mapping[str, Any]) -> float:
    """Seconds of work before an estimator's first estimate: of the processor where that is known."""
    cpu = entry.get("setup_cpu_seconds")
    return float(entry["setup_seconds"] if cpu is None else cpu)


def cost_of(entry: Mapping[str, Any], n_trials: int = TRIALS) -> float:
    """Seconds of the processor for one network, its share of the setup included."""
    return float(entry["cpu_seconds"]) + setup_cost(entry) / n_trials


def keep(content: Mapping[str, Any], text: str) -> tuple[Path, bool]:
    """Put a certificate where searches look for it, unless one of the same space there stands on more trainings:
    (place, put)."""
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
    """`find_certificate`, or the error that it ends with, for whoever can do without one."""
    try:
        return find_certificate(dataset, space)
    except StudyError as error:
        return error


def choose(config: Mapping[str, Any], found: Certificate | None, dataset: Dataset, space: SearchSpace, n_trials: int
           ) -> Chosen:
    """The estimator that the certificate `found` favours, with the options that it was certified with.

    `config` is the section `certified`: `minutes` of one core for `n_trials` networks, setup included (None: what the
    certificate's proxy would take). ConfigError where no certificate fits, or it favours none.
    """
    for key in config:
        if key != "minutes":
            raise UnknownName("key of certified", key, ("minutes",))
    if found is None:
        raise ConfigError(f"accuracy=certified: there is no certificate for {dataset.name} at {dataset.image_size} px "
                          f"and space {space.name}. Make one with python -m hwnas.certify, or give accuracy=proxy.")
    seconds = _seconds(config.get("minutes"), found, n_trials)
    label = favoured(found, seconds, n_trials)
    within = f"within {seconds / 60:.3g} min of one core for {n_trials} networks"
    if label is None:
        raise ConfigError(f"accuracy=certified: of the estimators in {found.path} none is shown to rank above chance "
                          f"{within}. Set certified.minutes higher, or give accuracy=proxy.")
    one = found.estimators[label]
    return Chosen(str(one["accuracy"]), dict(one["options"]),
                  f"accuracy: {label}, which the certificate of {found.content['created']} favours {within}: Kendall "
                  f"tau {one['kendall_tau']:.2f} ({one['low']:.2f} to {one['high']:.2f}) against full training")


def _seconds(minutes: Any, found: Certificate, n_trials: int) -> float:
    if minutes is None:
        proxy = found.estimators.get("proxy")
        if proxy is None:
            raise ConfigError(f"accuracy=certified: {found.path} judges no proxy, whose time would count. Give "
                              "certified.minutes=NUMBER.")
        return setup_cost(proxy) + n_trials * float(proxy["cpu_seconds"])
    return 60.0 * float(read_value(minutes, float | None, "certified.minutes", above=0, below=10**6))
