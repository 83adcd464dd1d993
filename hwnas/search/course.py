"""The start of a race: its networks by name, its length, and what it asks of space, latency model and choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

from hwnas.errors import BudgetError, CandidateError
from hwnas.front.finalists import choose_finalists
from hwnas.latency.measured import NotTimed
from hwnas.latency.model import Predictions
from hwnas.search.race import Course, KnownNetwork
from hwnas.search.trial import SearchOptions
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.study.lines import Line
from hwnas.study.objective import LATENCY, upper_ms
from hwnas.system.clock import Deadline

STEPS = 8  # of the images' size, in which lines get smaller
FAR_SMALLER = 3 / 4  # of an image's side, in which they do in a short race
LAST_MAP_PX = 2  # least side of a network's last map, for smaller images of it to be tried
Latencies = Callable[[Sequence[Architecture]], Predictions]  # of networks; NotTimed if some were not timed yet
NOT_ONE = "none of the networks that the race begins with can be exported and timed here"


@dataclass(frozen=True)
class Length:
    """The length of a race, as every process of it reads it in the study.

    Attributes:
        step_s: seconds of a step of each known network that races, by name.
        known_steps: steps of the first rung.
        unit_steps: of a unit; None: by the time that is left.
        until: when lines and baselines must be trained; None: whenever.
        baselines_s: seconds of a step of each baseline that is trained behind the race.
        making_s: seconds that are kept for exporting and scoring each finalist.
        is_short: whether there are few minutes: `short_race.py` decides, of networks on fewer image sizes.
        parts: finalists at most, if there are fewer than the plan has because minutes are few; 0: as many.
    """

    step_s: Mapping[str, float]
    known_steps: int
    unit_steps: int | None
    until: Deadline | None = None
    baselines_s: Sequence[float] = ()
    making_s: float = 0.0
    is_short: bool = False
    parts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values by key."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Length:
        """Inverse of `to_dict`; what another version of hwnas wrote beside it is not read."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        return cls(**{**known, "until": Deadline.of(known.get("until"))})

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
    smaller = {name: [] if network in keeping else [*_at_sizes(space, network, 0, largest)]
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


def smaller_in(space: SearchSpace, is_short: bool) -> Callable[[Architecture], Sequence[Architecture]]:
    """The function that gives a network on smaller images, largest first, as far as it may race on them: in steps of
    an eighth of the space's largest size or more, in a short race of a quarter of the network's or more."""
    @cache
    def smaller(network: Architecture) -> tuple[Architecture, ...]:
        sizes, last = [], network.image_size
        for each in _at_sizes(space, network, 0, network.image_size):
            most = FAR_SMALLER * last if is_short else last - max(space.image_sizes) // STEPS
            if each.image_size <= most:
                sizes.append(each)
                last = each.image_size
        return tuple(sizes)

    return smaller


def between_in(space: SearchSpace) -> Callable[[Architecture, Architecture], Sequence[Architecture]]:
    """The function that gives a network on images of every size between those of two that are alike."""
    @cache
    def between(upper: Architecture, lower: Architecture) -> tuple[Architecture, ...]:
        return tuple(_at_sizes(space, upper, lower.image_size, upper.image_size))

    return between


def _at_sizes(space: SearchSpace, network: Architecture, low: int, high: int) -> Iterator[Architecture]:
    """The network on images of each of the space's sizes between two, largest first, as far as its last map is large
    enough."""
    for px in sorted(space.image_sizes, reverse=True):
        each = replace(network, image_size=px)
        if low < px < high and space.find(each) is not None and (
                px == max(space.image_sizes) or each.last_map_px >= LAST_MAP_PX):
            yield each


def make_course(space: SearchSpace, predict: Latencies, options: SearchOptions, length: Length, *, k: int,
                n_lines: int | None, workers: int, is_int8: bool, narrow: bool = False) -> Course:
    """The course of a race; `k` parts of the range of latency, at most `n_lines` lines."""
    networks = {name: network for name, network in known_networks(space, predict, options).items()
                if name in length.step_s}

    @cache
    def latency_ms(network: Architecture) -> float:
        return _predicted(predict, network)

    def is_timed(network: Architecture) -> bool:
        try:
            latency_ms(network)
        except NotTimed:
            return False
        return True

    def is_allowed(network: Architecture) -> bool:
        return not is_timed(network) or bool(_keeping(predict, options, [network]))

    def ask(wanted: Sequence[Architecture]) -> None:
        if wanted:
            predict(wanted)

    costs = [cost for cost in options.objective.minimised if not cost.of_latency]

    def is_as_cheap(network: Architecture, other: Architecture) -> bool:
        return all(cost.of(latency_ms(network), network.blocks(), options.objective.terms)
                   <= cost.of(latency_ms(other), other.blocks(), options.objective.terms) for cost in costs)

    def choose(lines: Sequence[Line]) -> list[Line]:
        apart = {*wholes.values()} if len(wholes) == 1 else ()
        chosen = choose_lines([line for line in lines if line.id not in apart], k, bound_ms, options)
        return [*chosen, *(line for line in lines if line.id in apart)]

    names = {name for name, network in space.known.items() if network in space.wholes.values()}
    wholes = {network.around: network.id for name, network in networks.items() if name in names}
    bound_ms = options.cap_ms or max(map(latency_ms, networks.values()))
    return Course(
        known=[KnownNetwork(name, network, length.step_s[name]) for name, network in networks.items()], k=k,
        bound_ms=bound_ms, n_lines=n_lines or 1 << 30, workers=workers, is_int8=is_int8, narrow=narrow,
        is_short=length.is_short, known_steps=length.known_steps, unit_steps=length.unit_steps,
        left_s=lambda: length.left_s, making_s=length.making_s, wholes=wholes, baselines_s=length.baselines_s,
        smaller=smaller_in(space, length.is_short), between=between_in(space), latency_ms=latency_ms,
        is_timed=is_timed, is_allowed=is_allowed, ask=ask, is_as_cheap=is_as_cheap, choose=choose)


def choose_lines(lines: Sequence[Line], k: int, bound_ms: float, options: SearchOptions) -> list[Line]:
    """The lines that are finished: at most `k`. The most accurate of each part of the range up to `bound_ms`; with
    objective=cap the most accurate of all, with objective=reward those of the highest reward."""
    objective = options.objective
    if objective.kind != "pareto":
        def worth(line: Line) -> float:
            return line.top1 if objective.kind == "cap" else objective.reward(line.top1, line.latency_ms)

        return sorted(lines, key=worth, reverse=True)[:k]
    rows = [row_of(line, options) for line in lines]
    numbers = {row["number"] for row in choose_finalists(rows, k, bound_ms)} if rows else set()
    return [line for line in lines if line.number in numbers]


def row_of(line: Line, options: SearchOptions) -> dict[str, Any]:
    """Return the values of a line that the choice of finalists reads."""
    attrs = {} if line.trial is None else line.trial.user_attrs
    costs = {cost.predicted: attrs.get(cost.predicted) for cost in options.objective.minimised
             if cost.name != LATENCY}
    return {"number": line.number, "id": line.id, "state": "COMPLETE", "outcome": "evaluated", "top1_proxy": line.top1,
            "latency_ms_predicted": line.latency_ms, "reward": options.objective.reward(line.top1, line.latency_ms),
            "objectives": " ".join(cost.name for cost in options.objective.minimised), **costs}

