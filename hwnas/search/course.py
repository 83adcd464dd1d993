"""The start of a race: its networks by name, its length, and its questions to the space and the latencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hwnas.errors import BudgetError, CandidateError, StudyError
from hwnas.front.make import DECIDING
from hwnas.latency.measured import NotTimed
from hwnas.latency.model import Predictions
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.candidate import SearchOptions
from hwnas.study.lines import THREADS
from hwnas.study.objective import upper_ms
from hwnas.system.clock import Deadline

Latencies = Callable[[Sequence[Architecture]], Predictions]  # of networks; NotTimed if some were not timed yet
NOT_ONE = "none of the networks that the race begins with can be exported and timed here"


@dataclass(frozen=True)
class Length:
    """The length of a race, as every process of it reads it in the study.

    Attributes:
        step_s: seconds of a step of each known network that races, by name.
        total_s: seconds of the race in one process on a machine whose steps take `step_s`; None if minutes bound it.
            With it, decisions depend on no clock.
        until: when lines and baselines must be trained; None: whenever.
        baselines_s: seconds of a step of each baseline that is trained after the race.
        making_s: seconds that are kept after `until` for exporting and scoring each finalist.
        parts: finalists at most, as planned, and no more than the last command asked for.
        n_smaller: networks on smaller images that are timed and judged at most; None: as many as suit `parts`.
        n_images: validation images by which networks are judged.
        first_threads: threads on which the first network is trained; None: as many as there are workers.
        speedup: how many times as fast a step is on these as on one; None: their number to the power of THREADS.
        planned: finalists as planned at first, if a later command asked for fewer; None: `parts`.
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
    planned: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], where: object) -> Length:
        """Return the length of what `asdict` gave. StudyError, with the run folder, if another version wrote it."""
        try:
            return cls(**{**values, "until": Deadline.of(values.get("until"))})
        except TypeError:
            raise StudyError(f"{where}: another version of hwnas began this race. Give another out=DIR to begin anew."
                             ) from None

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; infinite if there is none."""
        return math.inf if self.until is None else self.until.left_s


@dataclass(frozen=True, slots=True)
class KnownNetwork:
    """A network that a race starts with, known by name. `step_s` are the seconds of a step, measured before the race.
    Without minutes they are not measured: they are relative, by multiply-adds."""

    name: str
    architecture: Architecture
    step_s: float


@dataclass(frozen=True)
class Course:
    """The decisions that are made before a race starts.

    Attributes:
        known: the networks that it starts with, slowest first.
        length: how long it is.
        predict: returns the latencies of networks, as timed.
        options: cap and objective of the search.
        workers: processes that train side by side.
        n_lines: lines at most.
        most_k: finalists at most, if the planned ones leave seconds; None: no more than planned.
        is_pretrained: whether networks have weights by which they can be judged before they are trained.
        has_new_head: whether much of a network has no pretrained weights, so that its cuts start from the weights of a
            trained network.
    """

    known: Sequence[KnownNetwork]
    length: Length
    space: SearchSpace
    predict: Latencies
    options: SearchOptions
    workers: int
    n_lines: int = 1 << 30
    most_k: int | None = None
    is_pretrained: bool = True
    has_new_head: bool = False

    @property
    def first_threads(self) -> int:
        """Threads on which the first network is trained alone."""
        return self.length.first_threads or self.workers

    def speed_of(self, threads: int) -> float:
        """Return how many times as fast a step is on so many threads as on one."""
        measured = self.length.speedup if threads == self.first_threads else None
        return float(threads ** THREADS) if measured is None else measured

    def latency_ms(self, network: Architecture) -> float:
        """Return a network's latency in ms. Raises NotTimed if it was not timed yet."""
        return float(self.predict([network]).mean[0])

    def is_allowed(self, network: Architecture) -> bool:
        """Return whether a network can be timed and keeps the cap; true if it was not timed yet."""
        try:
            return bool(_keeping(self.predict, self.options, [network]))
        except NotTimed:
            return True

    def is_as_cheap(self, network: Architecture, other: Architecture) -> bool:
        """Return whether one network costs no more than another in all minimised costs other than latency."""
        objective = self.options.objective
        return all(cost.of(None, network.blocks(), objective.terms) <= cost.of(None, other.blocks(), objective.terms)
                   for cost in objective.minimised if not cost.of_latency)


def known_networks(space: SearchSpace, predict: Latencies, options: SearchOptions) -> dict[str, Architecture]:
    """Return the networks that a race starts with, by name and slowest first. Each known network of the space is on the
    largest images on which it keeps the cap; without such images it is left out.

    Raises:
        BudgetError: No network keeps the cap.
        CandidateError: No network can be timed.
    """
    on_largest = {name: replace(network, image_size=max(space.image_sizes)) for name, network in space.known.items()}
    sizes = {name: [network, *smaller_of(space, network)] for name, network in on_largest.items()}
    keeping = {*_keeping(predict, options, [*on_largest.values()])}
    # Smaller images are timed only for networks that are over the cap on the largest ones.
    keeping |= {*_keeping(predict, options, [each for networks in sizes.values() if networks[0] not in keeping
                                             for each in networks[1:]])}
    able = {name: fitting[0] for name, networks in sizes.items()
            if (fitting := [each for each in networks if each in keeping])}
    if able:
        mean_ms = dict(zip(able, predict([*able.values()]).mean.tolist(), strict=True))
        return dict(sorted(able.items(), key=lambda item: -mean_ms[item[0]]))
    fastest_ms = predict([*on_largest.values()]).mean.min()
    if options.cap_ms is None or not math.isfinite(fastest_ms):
        raise CandidateError(NOT_ONE)
    raise BudgetError(f"budget.latency_ms={options.cap_ms:g}: none of the networks that the race begins with is as "
                      f"fast at any image size; the fastest takes {fastest_ms:.3g} ms at the largest. Raise the cap, "
                      "or give smaller image_sizes.")


def _keeping(predict: Latencies, options: SearchOptions, networks: Sequence[Architecture]) -> list[Architecture]:
    """Return the networks that can be timed and keep the cap, by its quantile."""
    if not networks:
        return []
    predicted = predict(networks)
    most_ms = upper_ms(predicted, options.cap_quantile) if options.cap_ms is not None else predicted.mean
    return [network for network, ms in zip(networks, most_ms, strict=True)
            if math.isfinite(ms) and (options.cap_ms is None or ms <= options.cap_ms)]


def smaller_of(space: SearchSpace, network: Architecture) -> Iterator[Architecture]:
    """Yield the network on each of the space's smaller images, largest first, if its last map has a whole pixel."""
    for px in sorted(space.image_sizes, reverse=True):
        each = replace(network, image_size=px)
        if px < network.image_size and space.encode(each) is not None and px >= each.total_stride:
            yield each
