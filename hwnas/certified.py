"""`accuracy=certified`: the estimator that the certificate of this data set and space favours within a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hwnas.certificate import Certificate, favoured, find_certificate, setup_cost
from hwnas.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from hwnas.accuracy.dataset import Dataset
    from hwnas.space import SearchSpace

NAME = "certified"


@dataclass(frozen=True)
class Chosen:
    """An estimator's name, its own options, and why it is used (empty where the user named it)."""

    accuracy: str
    options: Mapping[str, Any]
    why: str = ""


def choose(config: Mapping[str, Any], dataset: Dataset, space: SearchSpace, n_trials: int) -> Chosen:
    """The favoured estimator with the options that it was certified with.

    `config` is the section `certified`: `minutes` of one core for `n_trials` networks, setup included (None: what the
    certificate's proxy would take). ConfigError where no certificate fits, or it favours none.
    """
    for key in config:
        if key != "minutes":
            raise UnknownName("key of certified", key, ("minutes",))
    found = find_certificate(dataset, space)
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
    if not isinstance(minutes, int | float) or isinstance(minutes, bool) or not 0 < minutes < 1e6:
        raise ConfigError(f"certified.minutes must be null or a number above 0, got {minutes!r}.")
    return 60.0 * minutes
