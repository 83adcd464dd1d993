"""Which networks a calibration measures: half drawn from the space, half where a search would look."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hwnas.architecture import Architecture

if TYPE_CHECKING:
    from hwnas.space import SearchSpace

Planned = list[tuple[str, Architecture]]  # origin (known, extreme, random, front) and network
Predict = Callable[[np.ndarray], np.ndarray]
_SLICES = 12
_EXTREMES = 400


class Plan:
    """Draws wave after wave, never a network twice; the same seed and the same predictions give the same waves."""

    def __init__(self, space: SearchSpace, seed: int, held: set[str]) -> None:
        self.space, self.held = space, set(held)
        self._rng = np.random.default_rng([seed, len(held)])
        self._first = self._opening()

    def wave(self, size: int, predict: Predict | None) -> Planned:
        """`size` networks (fewer where the space ends): known and extreme ones first, then random and front by turns.

        `predict` (codes [n, p] -> latency_ms [n]) comes with the first model; until then all are random.
        """
        found = [self._first.pop(0) for _ in range(min(size, len(self._first)))]
        wanted = size - len(found)
        if predict is not None and wanted > 1:
            found += self._front(wanted // 2, predict)
        found += self._random(size - len(found))
        return found

    def _opening(self) -> Planned:
        """The space's known networks, and the smallest and the largest of a sample."""
        found: Planned = [("known", one) for one in self.space.known.values()]
        sample = sorted(self._drawn(_EXTREMES), key=lambda one: one.macs)
        found += [("extreme", one) for one in (sample[0], sample[-1])]
        return [(origin, one) for origin, one in found if self._new(one)]

    def _random(self, n: int) -> Planned:
        """Random ones, spread over the range of MACs: one from each of as many slices as are wanted."""
        if n <= 0:
            return []
        sample = sorted(self._drawn(_SLICES * n), key=lambda one: one.macs)
        picked: Planned = []
        for part in np.array_split(np.arange(len(sample)), n):
            order = self._rng.permutation(part)
            one = next((sample[int(index)] for index in order if self._new(sample[int(index)])), None)
            if one is not None:
                picked.append(("random", one))
        return picked

    def _front(self, n: int, predict: Predict) -> Planned:
        from hwnas.latency.validation import front_networks

        found = front_networks(self.space, predict, self._rng, n, self.held)
        return [("front", one) for one in found if self._new(one)]

    def _drawn(self, n: int) -> list[Architecture]:
        return [self.space.decode(self.space.to_params(row)) for row in self.space.sample(self._rng, n)]

    def _new(self, one: Architecture) -> bool:
        new = one.id not in self.held
        self.held.add(one.id)
        return new

