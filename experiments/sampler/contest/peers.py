"""Two peers that know latency as ours does, so that the contest shows more than what that knowledge is worth.

A peer is a generator: it gives a parameter row that it has not evaluated yet, and is sent that row's accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.stats import layers

Codes = NDArray[np.int64]
Peer = Generator[int, float, None]
BINS = 10
FIRST, STEP = 25, 10  # evaluations before the first regressor, and between two
POPULATION, GENERATIONS = 50, 20
_FOLDS = 5


def stratified(codes: Codes, entry: Codes, latency_ms: np.ndarray, seed: int) -> Peer:
    """Random search: one row of each latency bin after the other, bins of equal numbers of rows in random order."""
    rng = np.random.default_rng(seed)
    edges = np.quantile(np.log(latency_ms), np.linspace(0, 1, BINS + 1)[1:-1])
    bin_of = np.searchsorted(edges, np.log(latency_ms), side="right")
    unseen = np.ones(len(entry), bool)
    while unseen.any():
        for number in rng.permutation(BINS):
            rows = np.flatnonzero(unseen & (bin_of == number))
            if len(rows):
                row = int(rng.choice(rows))
                unseen[entry == entry[row]] = False
                yield row


def linas(codes: Codes, entry: Codes, latency_ms: np.ndarray, seed: int) -> Peer:
    """Random rows first; then, again and again, a regressor on accuracy, NSGA-II on what it predicts and the true
    latency, and the front of that, spread over latency (after Cummings et al., LINAS, 2022)."""
    loop = _Loop(codes, entry, latency_ms, np.random.default_rng(seed))
    while loop.unseen.any():
        for row in loop.random(FIRST) if not loop.rows else loop.proposed():
            accuracy = yield row
            loop.rows.append(row)
            loop.accuracies.append(accuracy)


PEERS: dict[str, Callable[[Codes, Codes, np.ndarray, int], Peer]] = {"stratified": stratified, "linas": linas}


@dataclass
class _Loop:
    """State of LINAS: what was evaluated so far."""

    codes: Codes
    entry: Codes
    latency_ms: np.ndarray
    rng: np.random.Generator
    rows: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unseen = np.ones(len(self.entry), bool)
        self._row_of = {row.tobytes(): index for index, row in enumerate(self.codes)}
        self._encoded = one_hot(self.codes)

    def random(self, n: int) -> list[int]:
        """At most `n` unseen rows, each another network; they are seen from now on."""
        found: list[int] = []
        while len(found) < n and self.unseen.any():
            found.append(self._take(int(self.rng.choice(np.flatnonzero(self.unseen)))))
        return found

    def proposed(self) -> list[int]:
        """The next rows to evaluate; random ones where evolution found too few."""
        predict = fitted(self._encoded[self.rows], np.array(self.accuracies), int(self.rng.integers(2**31)))
        met = self._evolved(predict)
        points = self._points(predict, met)
        found: list[int] = []
        for layer in layers(points, (False, True)):
            rows = self._different(met[layer])
            found += [self._take(row) for row in spread(rows, self.latency_ms, STEP - len(found))]
            if len(found) >= STEP:
                break
        return found + self.random(STEP - len(found))

    def _evolved(self, predict: Callable[[np.ndarray], np.ndarray]) -> Codes:
        """All rows that NSGA-II meets when it starts from what was evaluated best and from random rows."""
        start = np.concatenate([self.rows, self.rng.integers(0, len(self.codes), POPULATION)])
        population = np.unique(start)
        population = population[survivors(self._points(predict, population), POPULATION)]
        met = population
        for _ in range(GENERATIONS):
            both = np.union1d(population, self._children(population))
            met = np.union1d(met, both)
            population = both[survivors(self._points(predict, both), POPULATION)]
        return np.asarray(met)

    def _points(self, predict: Callable[[np.ndarray], np.ndarray], rows: Codes) -> np.ndarray:
        """Predicted accuracy and true log latency [n, 2]."""
        return np.column_stack([predict(self._encoded[rows]), np.log(self.latency_ms[rows])])

    def _children(self, parents: Codes) -> Codes:
        """Uniform crossings of the parents, each parameter mutated at a rate of one a child; those in the table."""
        n, p = POPULATION, self.codes.shape[1]
        left, right = (self.codes[parents[self.rng.integers(0, len(parents), n)]] for _ in range(2))
        children = np.where(self.rng.random((n, p)) < 0.5, left, right)
        other = self.rng.integers(0, self.codes.max(axis=0) + 1, (n, p))
        children = np.where(self.rng.random((n, p)) < 1 / p, other, children)
        rows = [self._row_of.get(child.tobytes()) for child in children]
        return np.array([row for row in rows if row is not None], int)

    def _different(self, rows: Codes) -> Codes:
        """Unseen ones, one of each network."""
        rows = rows[self.unseen[rows]]
        return np.asarray(rows[np.unique(self.entry[rows], return_index=True)[1]])

    def _take(self, row: int) -> int:
        self.unseen[self.entry == self.entry[row]] = False
        return int(row)


def one_hot(codes: Codes) -> np.ndarray:
    """A column a choice of each parameter [n, c]."""
    return np.column_stack([column[:, None] == np.arange(column.max() + 1) for column in codes.T]).astype(float)


def fitted(inputs: np.ndarray, accuracy: np.ndarray, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """Ridge, support vectors or boosted trees, whichever cross-validates best, on all that is known."""
    from sklearn.model_selection import KFold, cross_val_score

    centre, scale = accuracy.mean(), accuracy.std() or 1.0
    values = (accuracy - centre) / scale
    folds = KFold(min(_FOLDS, len(values)), shuffle=True, random_state=seed)
    models = _regressors(seed)
    scores = [cross_val_score(model, inputs, values, cv=folds, scoring="neg_mean_squared_error").mean()
              for model in models]
    best = models[int(np.argmax(scores))].fit(inputs, values)
    return lambda rows: np.asarray(best.predict(rows) * scale + centre)


def _regressors(seed: int) -> list[Any]:
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.linear_model import Ridge
    from sklearn.svm import SVR

    return [Ridge(1.0), SVR(C=10.0), GradientBoostingRegressor(random_state=seed)]


def survivors(points: np.ndarray, n: int) -> np.ndarray:
    """NSGA-II's selection: layer by layer, of the last one the least crowded (first objective up, second down)."""
    found: list[int] = []
    for layer in layers(points, (False, True)):
        left = n - len(found)
        if len(layer) > left:
            layer = layer[np.argsort(-crowding(points[layer]), kind="stable")[:left]]
        found += layer.tolist()
        if len(found) >= n:
            break
    return np.array(found)


def crowding(points: np.ndarray) -> np.ndarray:
    """Crowding distance [n] within one layer; its ends are the least crowded."""
    total = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        width = np.ptp(column) or 1.0
        total[order[[0, -1]]] = np.inf
        total[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / width
    return total


def spread(rows: Codes, latency_ms: np.ndarray, n: int) -> list[int]:
    """At most `n` of the rows, evenly over their order in latency, the ends among them."""
    ordered = rows[np.argsort(latency_ms[rows], kind="stable")]
    places = np.linspace(0, len(ordered) - 1, min(n, len(ordered))).round().astype(int)
    return [int(row) for row in ordered[places]]
