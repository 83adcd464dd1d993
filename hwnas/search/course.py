"""What a race begins with: its networks by name, its length, and what it asks of space, latency model and choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from hwnas.errors import BudgetError
from hwnas.front.finalists import choose_finalists
from hwnas.search.race import Course, Known
from hwnas.search.trial import SearchOptions
from hwnas.space.architecture import Architecture
from hwnas.space.coding import Codes
from hwnas.space.search_space import WHOLE, SearchSpace
from hwnas.study.lines import Line
from hwnas.study.objective import LATENCY, Predict, upper_ms
from hwnas.system.clock import Deadline

STEPS = 8  # of the images' size, in which lines get smaller
FAR_SMALLER = 3 / 4  # of an image's side, in which they do in a short race
LAST_MAP_PX = 2  # least side of a network's last map, for smaller images of it to be tried
NEAR = 0.05  # share by which the predicted latencies of a finalist and its control may differ
_DRAWS, _BATCHES = 4096, 8


@dataclass(frozen=True)
class Length:
    """How long a race is, as every process of it reads in the study.

    Attributes:
        step_s: seconds of a step of each known network that races, by name.
        known_steps: steps of the first rung.
        unit_steps: of a unit; None: by the time that is left.
        until: when lines and baselines must be trained; None: whenever.
        baselines_s: seconds of a step of each baseline that is trained behind the race.
        making_s: seconds that are kept for exporting and scoring each finalist.
        is_short: whether a unit has so few steps that there are fewer image sizes.
    """

    step_s: Mapping[str, float]
    known_steps: int
    unit_steps: int | None
    until: Deadline | None = None
    baselines_s: Sequence[float] = ()
    making_s: float = 0.0
    is_short: bool = False

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


def known_networks(space: SearchSpace, predict: Predict, options: SearchOptions) -> dict[str, Architecture]:
    """The networks that a race begins with, by name, at the largest image size and slowest first: those that the space
    knows and that keep the cap at some size, at the largest one that does.

    BudgetError where none keeps it.
    """
    able: dict[str, Architecture] = {}
    known = space.known or {"reference": space.reference}
    for name, network in known.items():
        sizes = [replace(network, image_size=px) for px in sorted(space.image_sizes, reverse=True)]
        fitting = [each for each in sizes if _fits(space, predict, options, each)]
        if fitting:
            able[name] = fitting[0]
    if not able:
        fastest = min(_predicted(space, predict, network) for network in known.values())
        raise BudgetError(f"budget.latency_ms={options.cap_ms:g}: none of the networks that the race begins with is as "
                          f"fast at any image size; the fastest takes {fastest:.3g} ms at the largest. Raise the cap, "
                          "or give smaller image_sizes.")
    return dict(sorted(able.items(), key=lambda item: -_predicted(space, predict, item[1])))


def _predicted(space: SearchSpace, predict: Predict, network: Architecture) -> float:
    return float(predict(space.to_codes(space.encode(network))[None]).mean[0])


def smaller_in(space: SearchSpace, predict: Predict, options: SearchOptions, is_short: bool
               ) -> Callable[[Architecture], Sequence[Architecture]]:
    """The function that gives a network on smaller images, largest first, as far as it may race on them: in steps of
    an eighth of the space's largest size or more, in a short race of a quarter of the network's or more."""
    @cache
    def smaller(network: Architecture) -> tuple[Architecture, ...]:
        sizes, last = [], network.image_size
        for each in _at_sizes(space, predict, options, network, 0, network.image_size):
            most = FAR_SMALLER * last if is_short else last - max(space.image_sizes) // STEPS
            if each.image_size <= most:
                sizes.append(each)
                last = each.image_size
        return tuple(sizes)

    return smaller


def between_in(space: SearchSpace, predict: Predict, options: SearchOptions
               ) -> Callable[[Architecture, Architecture], Sequence[Architecture]]:
    """The function that gives a network on images of every size between those of two that are alike."""
    @cache
    def between(upper: Architecture, lower: Architecture) -> tuple[Architecture, ...]:
        return tuple(_at_sizes(space, predict, options, upper, lower.image_size, upper.image_size))

    return between


def _at_sizes(space: SearchSpace, predict: Predict, options: SearchOptions, network: Architecture, low: int, high: int
              ) -> Iterator[Architecture]:
    """The network on images of each of the space's sizes between two, largest first, as far as it may race."""
    for px in sorted(space.image_sizes, reverse=True):
        if low < px < high and _fits(space, predict, options, each := replace(network, image_size=px)):
            yield each


def _fits(space: SearchSpace, predict: Predict, options: SearchOptions, network: Architecture) -> bool:
    """Whether the network is of the space, keeps the cap, and has a last map that is large enough."""
    params = space.find(network)
    if params is None:
        return False
    if network.image_size < max(space.image_sizes) and network.last_map_px < LAST_MAP_PX:
        return False
    predicted = predict(space.to_codes(params)[None])
    return options.cap_ms is None or float(upper_ms(predicted, options.cap_quantile)[0]) <= options.cap_ms


def make_course(space: SearchSpace, predict: Predict, options: SearchOptions, length: Length, *, k: int,
                n_lines: int | None, n_controls: int, workers: int, is_int8: bool,
                narrow: bool = False) -> Course:
    """The course of a race; `k` parts of the range of latency, at most `n_lines` lines without controls."""
    networks = {name: network for name, network in known_networks(space, predict, options).items()
                if name in length.step_s}

    @cache
    def latency_ms(network: Architecture) -> float:
        return _predicted(space, predict, network)

    costs = [cost for cost in options.objective.minimised if not cost.of_latency]

    def is_as_cheap(network: Architecture, other: Architecture) -> bool:
        return all(cost.of(latency_ms(network), network.blocks(), options.objective.terms)
                   <= cost.of(latency_ms(other), other.blocks(), options.objective.terms) for cost in costs)

    def choose(lines: Sequence[Line]) -> list[Line]:
        chosen = choose_lines([line for line in lines if line.id != whole], k, bound_ms, options)
        return [*chosen, *(line for line in lines if line.id == whole)]

    @cache
    def control_of(n: int, at_ms: float, taken: frozenset[str]) -> Architecture | None:
        rng = np.random.default_rng([options.seed, n, *b"controls"])
        for _ in range(_BATCHES):
            codes = _draw(space, rng)
            for at in np.flatnonzero(np.abs(predict(codes).mean / at_ms - 1) <= NEAR):
                network = space.decode(space.to_params(codes[at]))
                if network.id not in taken and _fits(space, predict, options, network):
                    return network
        return None

    whole = networks[WHOLE].id if WHOLE in networks else ""
    bound_ms = options.cap_ms or max(map(latency_ms, networks.values()))
    return Course(
        known=[Known(name, network, length.step_s[name]) for name, network in networks.items()], k=k,
        bound_ms=bound_ms, n_lines=n_lines or 1 << 30, n_controls=n_controls,
        workers=workers, is_int8=is_int8, narrow=narrow, known_steps=length.known_steps, unit_steps=length.unit_steps,
        left_s=lambda: length.left_s, making_s=length.making_s, whole=whole, baselines_s=length.baselines_s,
        smaller=smaller_in(space, predict, options, length.is_short), between=between_in(space, predict, options),
        latency_ms=latency_ms,
        is_as_cheap=is_as_cheap, choose=choose,
        control_of=lambda n, line, taken: control_of(n, line.latency_ms, taken))


def _draw(space: SearchSpace, rng: np.random.Generator) -> Codes:
    """Codes of random networks, of which some keep nearly all and others nearly nothing of the largest: networks drawn
    parameter by parameter would all be about as fast."""
    codes = space.sample(rng, _DRAWS)
    return space.canonical_codes(np.where(rng.random(codes.shape) < rng.random((len(codes), 1)), 0, codes))


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
    """What the choice of finalists reads of a line."""
    attrs = {} if line.trial is None else line.trial.user_attrs
    costs = {cost.predicted: attrs.get(cost.predicted) for cost in options.objective.minimised
             if cost.name != LATENCY}
    return {"number": line.number, "id": line.id, "state": "COMPLETE", "outcome": "evaluated", "top1_proxy": line.top1,
            "latency_ms_predicted": line.latency_ms, "reward": options.objective.reward(line.top1, line.latency_ms),
            "objectives": " ".join(cost.name for cost in options.objective.minimised), **costs}

