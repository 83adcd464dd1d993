"""Networks to time: wave after wave of a calibration, and those on which a latency model is judged.

Some are random, some lie near a front. A search keeps what a predictor calls fast, so its finalists lie where the
predictor errs towards fast. Their accuracy is not known beforehand; capacity (MACs or parameters) stands in for it:
larger networks of a family score higher.
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
SPARE = 6  # candidates drawn for each network wanted
ROUNDS = 40  # rounds of drawing before a space counts as exhausted
EXTREMES = 400  # networks, the smallest and the largest of which are timed
TO_TELL = 300  # networks, of which the first wave are those that tell most beside a prior
_STREAM = 0x6C6174  # sets draws of held-out networks apart from those of a calibration with the same seed


class TimingPlan:
    """Draws wave after wave of a calibration and no network twice. The same seed, predictions and prior give the same
    waves.

    `prior`: the entries of other machines' tables; the first wave then tells how this one differs.
    """

    def __init__(self, space: SearchSpace, seed: int, held: Collection[str], prior: Prior | None = None) -> None:
        self.space, self._held, self._prior = space, set(held), prior
        self._rng = np.random.default_rng([seed, len(held)])
        sample = sorted(self._sample(EXTREMES), key=lambda network: network.macs)
        self._first = self._take([*(("known", network) for network in space.known.values()),
                                  ("extreme", sample[0]), ("extreme", sample[-1])])

    def wave(self, size: int, predict: LatencyMs | None) -> Planned:
        """`size` networks (fewer if the space ends): known and extreme ones first, then random and front ones by
        turns.

        `predict` (codes [n, p] -> latency_ms [n]) comes with the first model; until then none is of the front. If
        there is a prior, half of the first wave and more are telling ones.
        """
        most = size if self._prior is None else size // 2
        planned, self._first = self._first[:most], self._first[most:]
        wanted = size - len(planned)
        if self._prior is not None:  # those of a sample that tell most once the planned ones are known
            new = {network.id: network for network in self._sample(TO_TELL) if network.id not in self._held}
            sample = [*(network for _, network in planned), *new.values()]
            chosen = most_telling([network.blocks() for network in sample], self._prior, wanted, known=len(planned))
            planned += self._take([("telling", sample[index]) for index in chosen])
            self._prior = None
        if predict is not None:
            front = draw_front(self.space, predict, self._rng, wanted // 2, self._held)
            planned += self._take([(FRONT, network) for network in front])
        random = draw_spread(self.space, lambda codes: self.space.totals(codes, macs)[:, 0], self._rng,
                             size - len(planned), self._held)
        return planned + self._take([(RANDOM, network) for network in random])

    def _sample(self, n: int) -> list[Architecture]:
        return [self.space.decode(self.space.to_params(row)) for row in self.space.sample(self._rng, n)]

    def _take(self, planned: Planned) -> Planned:
        """Those that were not planned before, which count as planned from now on."""
        new: Planned = []
        for origin, network in planned:
            if network.id not in self._held:
                self._held.add(network.id)
                new.append((origin, network))
        return new


def draw_held_out(space: SearchSpace, predict: LatencyMs, n: int, seed: int, known_ids: Collection[str]) -> Planned:
    """Draw `n` different networks, none of `known_ids`; equal arguments give equal networks.

    Returns:
        (group, network): first n // 2 of the front, then random ones, both spread over the predicted latencies.

    Raises:
        SpaceError: the space does not hold so many.
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

    Capacity is MACs for one front and parameters for the other. The networks are spread over the fronts' latencies.
    """
    if not n:
        return []
    fronts = [evolve_front(space, predict, capacity, rng) for capacity in (macs, params)]

    def draw_mutants(wanted: int) -> np.ndarray:
        parents = [_draw_evenly(front, predict, rng, -(-SPARE * wanted // 2)) for front in fronts]
        return space.mutate(np.concatenate(parents), rng)

    return draw_spread(space, predict, rng, n, known_ids, draw_mutants)


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


def draw_spread(space: SearchSpace, figure: LatencyMs, rng: np.random.Generator, n: int, known_ids: Collection[str],
                draw: Callable[[int], np.ndarray] | None = None) -> list[Architecture]:
    """Draw one network, none of `known_ids`, from each of `n` quantiles of a figure of what `draw(n)` gives: by default
    random ones.

    More are drawn as long as some quantile had none. Fewer are returned after ROUNDS of it.
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
