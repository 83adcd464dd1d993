"""Networks to time: the waves of a calibration, and the networks on which a latency model is judged.

Some are random, others are near a Pareto front. A search keeps networks that a predictor calls fast, so its finalists
are often networks whose latency is predicted too low. Their accuracy is not known beforehand. Capacity (MACs or
parameters) takes its place, because larger networks of a family score higher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hwnas.errors import SpaceError
from hwnas.latency.model import most_telling
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import Figure, SearchSpace, macs, params, spread
from hwnas.stats import non_dominated

if TYPE_CHECKING:
    from hwnas.latency.features import Prior

Planned = list[tuple[str, Architecture]]  # origin (telling, known, extreme, random, front) and network
RANDOM, FRONT = "random", "front"
LatencyMs = Callable[[np.ndarray], np.ndarray]  # codes [n, p] -> predicted latency [n] in ms
POPULATION, GENERATIONS = 1500, 6
BINS, ELITE = 60, 8  # parents: the ELITE of highest capacity in each of BINS bins of predicted latency
SPARE = 6  # candidates drawn for each network that is needed
ROUNDS = 40  # rounds of drawing before a space counts as exhausted
EXTREMES = 400  # random networks, of which the smallest and the largest are timed
TO_TELL = 300  # random networks, from which the most informative ones beside a prior are chosen for the first wave
_STREAM = 0x6C6174  # gives held-out networks other random numbers than a calibration with the same seed


class TimingPlan:
    """The waves of a calibration, with no network twice. The same seed, `held`, predictions and prior give the same.

    `held`: ids of networks that are timed already. `prior`: the entries of other machines' tables; then the first wave
    shows how this machine differs.
    """

    def __init__(self, space: SearchSpace, seed: int, held: Collection[str], prior: Prior | None = None) -> None:
        self.space, self._held, self._prior = space, set(held), prior
        self._rng = np.random.default_rng([seed, len(held)])
        sample = sorted(self._sample(EXTREMES), key=lambda network: network.macs)
        self._first = self._take([*(("known", network) for network in space.known.values()),
                                  ("extreme", sample[0]), ("extreme", sample[-1])])

    def wave(self, size: int, predict: LatencyMs | None) -> Planned:
        """Draw `size` networks, fewer if the space has no more: known and extreme ones first, then front and random
        ones in equal parts.

        `predict` (codes [n, p] -> latency_ms [n]) comes with the first model; before, none is of the front. With a
        prior, half of the first wave or more are telling ones.
        """
        most = size if self._prior is None else size // 2
        planned, self._first = self._first[:most], self._first[most:]
        n_left = size - len(planned)
        if self._prior is not None:  # the most informative ones of a sample, given the planned ones
            sampled = {network.id: network for network in self._sample(TO_TELL) if network.id not in self._held}
            sample = [*(network for _, network in planned), *sampled.values()]
            telling = most_telling([network.blocks() for network in sample], self._prior, n_left, known=len(planned))
            planned += self._take([("telling", sample[index]) for index in telling])
            self._prior = None
        if predict is not None:
            front = draw_front(self.space, predict, self._rng, n_left // 2, self._held)
            planned += self._take([(FRONT, network) for network in front])
        # Random networks, spread over MACs, fill the wave up.
        random = draw_spread(self.space, lambda codes: self.space.totals(codes, macs)[:, 0], self._rng,
                             size - len(planned), self._held)
        return planned + self._take([(RANDOM, network) for network in random])

    def _sample(self, n: int) -> list[Architecture]:
        return [self.space.decode(self.space.to_params(row)) for row in self.space.sample(self._rng, n)]

    def _take(self, planned: Planned) -> Planned:
        """Return the networks that were not planned before, and note that they are planned now."""
        new: Planned = []
        for origin, network in planned:
            if network.id not in self._held:
                self._held.add(network.id)
                new.append((origin, network))
        return new


def draw_held_out(space: SearchSpace, predict: LatencyMs, n: int, seed: int, known_ids: Collection[str]) -> Planned:
    """Draw `n` different networks, none of `known_ids`; equal arguments give equal networks.

    Returns:
        (group, network): n // 2 of the front first, then random ones, both spread over the predicted latencies.

    Raises:
        SpaceError: The space does not have so many.
    """
    rng = np.random.default_rng((seed, _STREAM))
    front = draw_front(space, predict, rng, n // 2, known_ids)
    random = draw_spread(space, predict, rng, n - len(front), {*known_ids, *(network.id for network in front)})
    if len(front) + len(random) < n:
        raise SpaceError(f"space {space.name}: only {len(front) + len(random)} of {n} networks were found that are not "
                         "in the latency table. Ask for fewer: n=NUMBER.")
    return [(FRONT, network) for network in front] + [(RANDOM, network) for network in random]


def draw_front(space: SearchSpace, predict: LatencyMs, rng: np.random.Generator, n: int,
               known_ids: Collection[str]) -> list[Architecture]:
    """Draw `n` networks, none of `known_ids`, one mutation away from the fronts of capacity against predicted latency;
    fewer if there are no more.

    Capacity is MACs in one front and parameters in the other. The networks are spread over the fronts' latencies.
    """
    if not n:
        return []
    fronts = [evolve_front(space, predict, capacity, rng) for capacity in (macs, params)]

    def draw_mutants(wanted: int) -> np.ndarray:  # SPARE for each wanted network, half from each front
        parents = [_draw_evenly(front, predict, rng, -(-SPARE * wanted // 2)) for front in fronts]
        return space.mutate(np.concatenate(parents), rng)

    return draw_spread(space, predict, rng, n, known_ids, draw_mutants)


def evolve_front(space: SearchSpace, predict: LatencyMs, capacity: Figure, rng: np.random.Generator) -> np.ndarray:
    """Evolve networks towards high capacity, summed over their blocks, and low predicted latency.

    Returns:
        Codes [k, p] of the networks that no other network dominates, fastest first.
    """
    def score(codes: np.ndarray) -> np.ndarray:
        return np.column_stack([space.totals(codes, capacity)[:, 0], predict(codes)])

    # Nothing is dropped: the parents of each generation are chosen from all networks so far.
    codes = np.unique(space.sample(rng, POPULATION), axis=0)
    scores = score(codes)
    for _ in range(GENERATIONS):
        children = np.unique(_breed(space, _choose_parents(codes, scores), rng, POPULATION), axis=0)
        scores = np.concatenate([scores, score(children)])
        codes, first_rows = np.unique(np.concatenate([codes, children]), axis=0, return_index=True)
        scores = scores[first_rows]
    front = non_dominated(scores, (False, True))
    order = np.argsort(scores[front, 1], kind="stable")
    return np.asarray(codes[front][order])


def _choose_parents(codes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the ELITE networks of highest capacity in every bin of log latency: all parts of the front evolve."""
    latency = np.log(scores[:, 1])
    edges = np.linspace(latency.min(), latency.max(), BINS + 1)[1:-1]
    bins = np.searchsorted(edges, latency)
    order = np.lexsort((-scores[:, 0], bins))
    starts = np.searchsorted(bins[order], np.arange(BINS))
    # The rows are sorted by bin, then by falling capacity; `rank` counts from the start of each bin.
    rank = np.arange(len(order)) - starts[bins[order]]
    return np.asarray(codes[order[rank < ELITE]])


def _breed(space: SearchSpace, parents: np.ndarray, rng: np.random.Generator, n: int) -> np.ndarray:
    """Return canonical codes [n, p]: half of them crossed uniformly, all with up to two decisions drawn again."""
    children = parents[rng.integers(0, len(parents), n)].copy()
    others = parents[rng.integers(0, len(parents), n)]
    crossed = (rng.random(children.shape) < 0.5) & (rng.random(n) < 0.5)[:, None]
    children[crossed] = others[crossed]
    return space.mutate(children, rng)


def _draw_evenly(front: np.ndarray, predict: LatencyMs, rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw `n` rows of a front at points that are uniform over its log latencies: dense parts count no more."""
    latency = np.log(predict(front))
    points = rng.uniform(latency[0], latency[-1], n)
    return np.asarray(front[np.abs(latency[None, :] - points[:, None]).argmin(axis=1)])


def draw_spread(space: SearchSpace, figure: LatencyMs, rng: np.random.Generator, n: int, known_ids: Collection[str],
                draw: Callable[[int], np.ndarray] | None = None) -> list[Architecture]:
    """Draw one network, none of `known_ids`, from each of `n` quantiles of `figure` over the codes that `draw(n)`
    returns; by default the codes are random.

    If a quantile had no new network, more codes are drawn. After ROUNDS rounds fewer networks are returned.
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
        if (missing := n - len(networks)) <= 0:
            break
        codes = np.unique(draw(missing) if draw else space.sample(rng, SPARE * missing), axis=0)
        spread(figure(codes), min(missing, len(codes)), partial(take_new, codes))
    return list(networks.values())
