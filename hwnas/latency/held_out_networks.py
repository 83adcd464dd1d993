"""Networks to judge a latency model on, half drawn from the space, half from where a search would go.

A search keeps what a predictor calls fast, so its finalists lie where the predictor errs towards fast. Their accuracy
is not known beforehand; capacity (MACs or parameters) stands in for it: larger networks of a family score higher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np

from hwnas.errors import SpaceError
from hwnas.latency.measurement import Measurement
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import Figure, SearchSpace, macs, params, spread
from hwnas.stats import non_dominated

RANDOM, FRONT = "random", "front"
LatencyMs = Callable[[np.ndarray], np.ndarray]  # codes [n, p] -> predicted latency [n] in ms
POPULATION, GENERATIONS = 1500, 6
BINS, ELITE = 60, 8  # parents: the ELITE of highest capacity in each of BINS bins of predicted latency
SPARE = 6  # candidates drawn for each network wanted
ROUNDS = 40  # rounds of drawing before a space counts as exhausted
_STREAM = 0x6C6174  # sets these draws apart from those of a calibration with the same seed


@dataclass(frozen=True)
class HeldOutNetwork:
    """A network that no table holds, how it was chosen (`random`, `front` …), and its measurement."""

    group: str
    architecture: Architecture
    measurement: Measurement


def draw_held_out(space: SearchSpace, predict: LatencyMs, n: int, seed: int, known_ids: Collection[str]
                  ) -> list[tuple[str, Architecture]]:
    """Draw `n` different networks, none of `known_ids`; equal arguments give equal networks.

    Returns:
        (group, network): first n // 2 of the front, then random ones, both spread over the predicted latencies.

    Raises:
        SpaceError: the space does not hold so many.
    """
    rng = np.random.default_rng((seed, _STREAM))
    front = draw_front(space, predict, rng, n // 2, known_ids)
    known_ids = {*known_ids, *(network.id for network in front)}
    random = _draw_spread(space, predict, rng, n - len(front), known_ids,
                          lambda wanted: space.sample(rng, SPARE * wanted))
    return [(FRONT, network) for network in front] + [(RANDOM, network) for network in random]


def draw_front(space: SearchSpace, predict: LatencyMs, rng: np.random.Generator, n: int,
               known_ids: Collection[str]) -> list[Architecture]:
    """Draw `n` networks, none of `known_ids`, one mutation away from the fronts of capacity against predicted latency.

    Capacity is MACs for one front and parameters for the other. The networks are spread over the fronts' latencies.

    Raises:
        SpaceError: there are too few.
    """
    if not n:
        return []
    fronts = [evolve_front(space, predict, capacity, rng) for capacity in (macs, params)]

    def draw_mutants(wanted: int) -> np.ndarray:
        parents = [_draw_evenly(front, predict, rng, -(-SPARE * wanted // 2)) for front in fronts]
        return space.mutate(np.concatenate(parents), rng)

    return _draw_spread(space, predict, rng, n, known_ids, draw_mutants)


def evolve_front(space: SearchSpace, predict: LatencyMs, capacity: Figure, rng: np.random.Generator) -> np.ndarray:
    """Evolve networks towards high capacity, told by their blocks, and low predicted latency.

    Returns:
        Codes [k, p] of those that no other one beats in both, fastest first.
    """
    def score(codes: np.ndarray) -> np.ndarray:
        return np.column_stack([space.totals(codes, capacity)[:, 0], predict(codes)])

    codes = np.unique(space.sample(rng, POPULATION), axis=0)
    scores = score(codes)
    for _ in range(GENERATIONS):
        children = np.unique(_breed(space, _choose_parents(codes, scores), rng, POPULATION), axis=0)
        scores = np.concatenate([scores, score(children)])
        codes, kept = np.unique(np.concatenate([codes, children]), axis=0, return_index=True)
        scores = scores[kept]
    front = non_dominated(scores, (False, True))
    order = np.argsort(scores[front, 1], kind="stable")
    return np.asarray(codes[front][order])


def _choose_parents(codes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The highest capacities in every bin of log latency: the whole front evolves, not only its densest part."""
    latency = np.log(scores[:, 1])
    edges = np.linspace(latency.min(), latency.max(), BINS + 1)[1:-1]
    bins = np.searchsorted(edges, latency)
    order = np.lexsort((-scores[:, 0], bins))
    starts = np.searchsorted(bins[order], np.arange(BINS))
    rank = np.arange(len(order)) - starts[bins[order]]
    return np.asarray(codes[order[rank < ELITE]])


def _breed(space: SearchSpace, parents: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    """Canonical codes [n, p]: half of them crossed uniformly, all with up to two decisions drawn again."""
    children = parents[rng.integers(0, len(parents), n)].copy()
    others = parents[rng.integers(0, len(parents), n)]
    crossed = (rng.random(children.shape) < 0.5) & (rng.random(n) < 0.5)[:, None]
    children[crossed] = others[crossed]
    return space.mutate(children, rng)


def _draw_evenly(front: np.ndarray, predict: LatencyMs, rng: np.random.Generator, n: int) -> np.ndarray:
    """`n` rows of a front, at points drawn evenly over its log latencies: dense parts count no more than others."""
    latency = np.log(predict(front))
    points = rng.uniform(latency[0], latency[-1], n)
    return np.asarray(front[np.abs(latency[None, :] - points[:, None]).argmin(axis=1)])


def _draw_spread(space: SearchSpace, predict: LatencyMs, rng: np.random.Generator, n: int, known_ids: Collection[str],
                 draw: Callable[[int], np.ndarray]) -> list[Architecture]:
    """One new network from each of `n` quantiles of the predicted latency of what `draw(n)` gives.

    More are drawn as long as some quantile had none.
    """
    networks: dict[str, Architecture] = {}

    def take_new(codes: np.ndarray, quantile: np.ndarray) -> Architecture | None:
        for row in codes[rng.permutation(quantile)]:
            network = space.decode(space.to_params(row))
            if network.id not in known_ids and network.id not in networks:
                networks[network.id] = network
                return network
        return None

    for _ in range(ROUNDS):
        missing = n - len(networks)
        if not missing:
            return list(networks.values())
        codes = np.unique(draw(missing), axis=0)
        spread(predict(codes), min(missing, len(codes)), partial(take_new, codes))
    raise SpaceError(f"space {space.name}: only {len(networks)} of {n} networks were found that are not in the latency "
                     "table. Ask for fewer: n=NUMBER.")
