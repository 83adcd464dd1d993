"""The start of a race: its networks by name, its length, and what it asks of space and latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from typing import Any

from hwnas.errors import BudgetError, CandidateError, StudyError
from hwnas.latency.measured import NotTimed
from hwnas.latency.model import Predictions
from hwnas.search.race import Course, KnownNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.candidate import SearchOptions
from hwnas.study.objective import upper_ms
from hwnas.system.clock import Deadline

DECIDING = 2048  # validation images, stratified, that networks are judged by
Latencies = Callable[[Sequence[Architecture]], Predictions]  # of networks; NotTimed if some were not timed yet
NOT_ONE = "none of the networks that the race begins with can be exported and timed here"


@dataclass(frozen=True)
class Length:
    """The length of a race, as every process of it reads it in the study.

    Attributes:
        step_s: seconds of a step of each known network that races, by name.
        total_s: of the race, if no minutes bound it, on a machine whose steps take `step_s`.
        until: when lines and baselines must be trained; None: whenever.
        baselines_s: seconds of a step of each baseline that is trained behind the race.
        making_s: seconds that are kept for exporting and scoring each finalist.
        parts: finalists at most.
        n_smaller: networks on smaller images that are timed and judged at most; None: as many as suit `parts`.
        n_images: validation images by which networks are judged.
        first_threads: on which the first network is trained; None: as many as there are workers.
        speedup: of its steps on these, beside one; None: as lines expect it of so many threads.
    """

    step_s: Mapping[str, float]
    parts: int
    total_s: float | None = None
    until: Deadline | None = None
    baselines_s: Sequence[float] = ()
    making_s: float = 0.0
    n_smaller: int | None = None
    n_images: int = DECIDING
    first_threads: int | None = None
    speedup: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values by key."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: object) -> Length:
        """Inverse of `to_dict`. StudyError, which names the run folder `where`, for what another version wrote."""
        needed = {each.name for each in fields(cls) if each.default is MISSING}
        if not needed <= values.keys() <= {each.name for each in fields(cls)}:
            raise StudyError(f"{where}: another version of hwnas began this race. Give another out=DIR to begin anew.")
        return cls(**{**values, "until": Deadline.of(values.get("until"))})

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return math.inf if self.until is None else self.until.left_s


def known_networks(space: SearchSpace, predict: Latencies, options: SearchOptions) -> dict[str, Architecture]:
    """The networks that a race begins with, by name, at the largest image size and slowest first: those that the space
    knows and that keep the cap at some size, at the largest one that does.

    Raises:
        BudgetError: None keeps it.
        CandidateError: None can be timed.
    """
    largest = max(space.image_sizes)
    known = {name: replace(network, image_size=largest) for name, network in space.known.items()}
    keeping = {*_keeping(predict, options, list(known.values()))}
    smaller = {name: [] if network in keeping else [*smaller_of(space, network)]
               for name, network in known.items()}
    keeping |= {*_keeping(predict, options, [each for sizes in smaller.values() for each in sizes])}
    able = {name: fitting[0] for name, network in known.items()
            if (fitting := [each for each in (network, *smaller[name]) if each in keeping])}
    if able:
        return dict(sorted(able.items(), key=lambda item: -_predicted(predict, item[1])))
    fastest_ms = min(_predicted(predict, network) for network in known.values())
    if options.cap_ms is None or not math.isfinite(fastest_ms):
        raise CandidateError(NOT_ONE)
    raise BudgetError(f"budget.latency_ms={options.cap_ms:g}: none of the networks that the race begins with is as "
                      f"fast at any image size; the fastest takes {fastest_ms:.3g} ms at the largest. Raise the cap, "
                      "or give smaller image_sizes.")


def _keeping(predict: Latencies, options: SearchOptions, networks: Sequence[Architecture]) -> list[Architecture]:
    """Those of the networks that can be timed and keep the cap."""
    if not networks:
        return []
    predicted = predict(networks)
    most_ms = upper_ms(predicted, options.cap_quantile) if options.cap_ms is not None else predicted.mean
    return [network for network, ms in zip(networks, most_ms, strict=True)
            if math.isfinite(ms) and (options.cap_ms is None or ms <= options.cap_ms)]


def _predicted(predict: Latencies, network: Architecture) -> float:
    return float(predict([network]).mean[0])


def smaller_of(space: SearchSpace, network: Architecture) -> Iterator[Architecture]:
    """Yield the network on each of the space's smaller images, largest first, if its last map has a whole pixel."""
    for px in sorted(space.image_sizes, reverse=True):
        each = replace(network, image_size=px)
        if px < network.image_size and space.encode(each) is not None and px >= each.total_stride:
            yield each


def make_course(space: SearchSpace, predict: Latencies, options: SearchOptions, length: Length, *,
                n_lines: int | None, workers: int, is_int8: bool, narrow: bool = False, is_pretrained: bool = True,
                has_new_head: bool = False, most_k: int | None = None) -> Course:
    """Return the course of a race, with at most `n_lines` lines, and `most_k` finalists if there is time."""
    networks = {name: network for name, network in known_networks(space, predict, options).items()
                if name in length.step_s}

    @cache
    def latency_ms(network: Architecture) -> float:
        return _predicted(predict, network)

    def is_allowed(network: Architecture) -> bool:
        try:
            latency_ms(network)
        except NotTimed:
            return True
        return bool(_keeping(predict, options, [network]))

    def ask(wanted: Sequence[Architecture]) -> None:
        if wanted:
            predict(wanted)

    costs = [cost for cost in options.objective.minimised if not cost.of_latency]

    def is_as_cheap(network: Architecture, other: Architecture) -> bool:
        return all(cost.of(latency_ms(network), network.blocks(), options.objective.terms)
                   <= cost.of(latency_ms(other), other.blocks(), options.objective.terms) for cost in costs)

    @cache
    def smaller(network: Architecture) -> tuple[Architecture, ...]:
        return tuple(smaller_of(space, network))

    return Course(
        known=[KnownNetwork(name, network, length.step_s[name]) for name, network in networks.items()],
        k=length.parts, n_lines=n_lines or 1 << 30, workers=workers, first_threads=length.first_threads or workers,
        speedup=length.speedup, is_int8=is_int8,
        narrow=narrow, is_pretrained=is_pretrained, total_s=length.total_s,
        left_s=lambda: length.left_s, making_s=length.making_s,
        baselines_s=length.baselines_s, n_smaller=length.n_smaller, smaller=smaller, latency_ms=latency_ms,
        is_allowed=is_allowed, ask=ask, is_as_cheap=is_as_cheap, has_new_head=has_new_head, most_k=most_k)
