"""Networks to judge a latency predictor on: half drawn from the space, half from where a search would go.

A search keeps what a predictor calls fast, so its finalists lie where the predictor errs towards fast. Their accuracy
is not known beforehand; capacity (MACs or parameters) stands in for it: larger networks of a family score higher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hwnas.errors import SpaceError
from hwnas.latency.table import LatencyTable, Measurement, robust_error
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace, macs, params, spread
from hwnas.stats import non_dominated

RANDOM, FRONT, ANCHOR = "random", "front", "anchor"
LatencyMs = Callable[[np.ndarray], np.ndarray]  # codes [n, p] -> predicted latency [n] in ms
POPULATION, GENERATIONS = 1500, 6
BINS, ELITE = 60, 8  # parents: the ELITE of highest capacity in each of BINS bins of predicted latency
LEAST = 5  # with fewer valid anchors the reference alone tells the pace
SPARE = 6  # candidates drawn for each network wanted
ROUNDS = 40  # rounds of drawing before a space counts as exhausted
_STREAM = 0x6C6174  # sets these draws apart from those of a calibration with the same seed


class Predictor(Protocol):
    """A model that predicts latency in ms: `predict(codes [n, p]).mean` [n]."""

    def predict(self, codes: np.ndarray) -> Any:
        """Predictions of canonical codes."""


def held_out_networks(space: SearchSpace, model: Predictor, n: int, seed: int,
                      known_ids: Collection[str]) -> list[tuple[str, Architecture]]:
    """`n` different networks, none of `known_ids`, as (group, network): first n // 2 of the front, then random ones.

    Both groups are spread over the range of predicted latencies. Equal arguments give equal networks. SpaceError
    when the space does not hold so many.
    """
    rng = np.random.default_rng((seed, _STREAM))

    def predict(codes: np.ndarray) -> np.ndarray:
        return np.asarray(model.predict(codes).mean)

    front = front_networks(space, predict, rng, n // 2, known_ids)
    drawn = random_networks(space, predict, rng, n - len(front), {*known_ids, *(network.id for network in front)})
    return [(FRONT, network) for network in front] + [(RANDOM, network) for network in drawn]


def random_networks(space: SearchSpace, predict: LatencyMs, rng: np.random.Generator, n: int,
                    known_ids: Collection[str]) -> list[Architecture]:
    """`n` networks of settings drawn uniformly, one from each quantile of predicted latency."""
    return _take_spread(space, predict, rng, n, known_ids, lambda wanted: space.sample(rng, SPARE * wanted))


def front_networks(space: SearchSpace, predict: LatencyMs, rng: np.random.Generator, n: int,
                   known_ids: Collection[str]) -> list[Architecture]:
    """`n` networks one mutation away from the fronts of capacity against predicted latency, MACs and parameters.

    `predict` gives ms [n] for canonical codes [n, p]. The networks are spread over the fronts' range of latencies;
    none is of `known_ids`. SpaceError when there are too few.
    """
    if not n:
        return []
    fronts = [predicted_front(space, predict, lambda codes: space.totals(codes, macs)[:, 0], rng),
              predicted_front(space, predict, lambda codes: space.totals(codes, params)[:, 0], rng)]

    def mutants(wanted: int) -> np.ndarray:
        parents = [_evenly(front, predict, rng, -(-SPARE * wanted // 2)) for front in fronts]
        return np.array([space.mutate(row, rng) for row in np.concatenate(parents)])

    return _take_spread(space, predict, rng, n, known_ids, mutants)


def predicted_front(space: SearchSpace, predict: LatencyMs, capacity: Callable[[np.ndarray], np.ndarray],
                    rng: np.random.Generator) -> np.ndarray:
    """Codes [k, p] of an evolved population that no other beats in capacity and predicted latency, fastest first."""
    codes = np.unique(space.sample(rng, POPULATION), axis=0)
    scores = np.column_stack([capacity(codes), predict(codes)])
    for _ in range(GENERATIONS):
        parents = _parents(codes, scores)
        children = np.unique(_children(space, parents, rng, POPULATION), axis=0)
        scores = np.concatenate([scores, np.column_stack([capacity(children), predict(children)])])
        codes, kept = np.unique(np.concatenate([codes, children]), axis=0, return_index=True)
        scores = scores[kept]
    front = non_dominated(scores, (False, True))
    order = np.argsort(scores[front, 1], kind="stable")
    return np.asarray(codes[front][order])


def _parents(codes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The highest capacities in every bin of log latency, so that the whole front evolves and not its densest part
    only."""
    latency = np.log(scores[:, 1])
    edges = np.linspace(latency.min(), latency.max(), BINS + 1)[1:-1]
    bins = np.searchsorted(edges, latency)
    order = np.lexsort((-scores[:, 0], bins))
    starts = np.searchsorted(bins[order], np.arange(BINS))
    rank = np.arange(len(order)) - starts[bins[order]]
    return np.asarray(codes[order[rank < ELITE]])


def _children(space: SearchSpace, parents: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    """Canonical codes: half of them crossed uniformly, all with up to two decisions drawn again."""
    children = parents[rng.integers(0, len(parents), n)].copy()
    others = parents[rng.integers(0, len(parents), n)]
    crossed = (rng.random(children.shape) < 0.5) & (rng.random(n) < 0.5)[:, None]
    children[crossed] = others[crossed]
    choices = np.array([len(parameter.choices) for parameter in space.parameters])
    for _ in range(2):
        column = rng.integers(0, children.shape[1], n)
        children[np.arange(n), column] = rng.integers(0, choices[column])
    return space.canonical_codes(children)


def _evenly(front: np.ndarray, predict: LatencyMs, rng: np.random.Generator, n: int) -> np.ndarray:
    """`n` rows of a front, at points drawn evenly over its log latencies, so that dense parts count no more than
    others."""
    latency = np.log(predict(front))
    points = rng.uniform(latency[0], latency[-1], n)
    return np.asarray(front[np.abs(latency[None, :] - points[:, None]).argmin(axis=1)])


def _take_spread(space: SearchSpace, predict: LatencyMs, rng: np.random.Generator, n: int, known_ids: Collection[str],
                 draw: Callable[[int], np.ndarray]) -> list[Architecture]:
    """One new network from each of `n` quantiles of the predicted latency of what `draw(n)` gives.

    More are drawn as long as some quantile had none.
    """
    networks: dict[str, Architecture] = {}
    for _ in range(ROUNDS):
        missing = n - len(networks)
        if not missing:
            return list(networks.values())
        codes = np.unique(draw(missing), axis=0)

        def new(part: np.ndarray, codes: np.ndarray = codes) -> Architecture | None:
            network = next(_new(space, codes[rng.permutation(part)], known_ids, networks), None)
            if network is not None:
                networks[network.id] = network
            return network

        spread(predict(codes), min(missing, len(codes)), new)
    raise SpaceError(f"space {space.name}: only {len(networks)} of {n} networks were found that are not in the latency "
                     "table. Ask for fewer: n=NUMBER.")


def _new(space: SearchSpace, rows: Iterable[np.ndarray], *taken: Collection[str]) -> Iterator[Architecture]:
    for row in rows:
        network = space.decode(space.to_params(row))
        if not any(network.id in ids for ids in taken):
            yield network


@dataclass(frozen=True)
class TimedOne:
    """A network that no table holds, how it was chosen (`random` or `front`), and its samples."""

    group: str
    architecture: Architecture
    measurement: Measurement


@dataclass(frozen=True, slots=True)
class Pace:
    """A run's latencies over those of the calibration, both relative to the reference; `n` anchors tell it (0:
    none)."""

    factor: float
    standard_error: float
    n: int


def chosen_anchors(table: LatencyTable, space_name: str, n: int) -> list[Architecture]:
    """`n` networks of the table spread evenly over its latencies."""
    valid = sorted((network for network in table.networks if network.space == space_name and network.measurement.valid),
                   key=lambda network: network.measurement.latency_ms)
    if not n:
        return []
    picked = np.unique(np.linspace(0, len(valid) - 1, min(n, len(valid)) + 2)[1:-1].round().astype(int))
    return [valid[int(index)].architecture for index in picked]


def pace(table: LatencyTable, again: Mapping[str, Measurement]) -> Pace:
    """The pace that the anchors' measurements in a later run show, by architecture id."""
    before = {network.architecture.id: network.measurement for network in table.networks}
    logs = [np.log(measurement.at_ms(table.quiet_ms) / before[name].at_ms(table.quiet_ms))
            for name, measurement in again.items() if measurement.valid and name in before and before[name].valid]
    if len(logs) < LEAST:
        return Pace(1.0, float("nan"), 0)
    return Pace(float(np.exp(np.median(logs))), robust_error(np.array(logs)), len(logs))
