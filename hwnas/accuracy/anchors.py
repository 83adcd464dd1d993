"""Networks trained once to give scores a unit (anchors), and untrained ones that tell how scores spread (pool)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.scores import Scorer
from hwnas.data.dataset import Dataset, digest
from hwnas.errors import CandidateError, ConfigError, DataError
from hwnas.space.architecture import Architecture
from hwnas.system.documents import Document
from hwnas.system.locks import hold
from hwnas.system.paths import home, write_atomic

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.space.search_space import SearchSpace


ANCHORS = Document("hwnas-anchors", 1, "trained anchors", "Delete it, and they are trained again.", DataError)
_DRAWN = 1024  # random networks that the anchors are chosen from


@dataclass(frozen=True, slots=True)
class Anchor:
    """One network: its short training (top-1 as a fraction) and its scores; `failed` says why it has none."""

    id: str
    top1: float = 0.0
    std: float = 0.0
    seconds: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    score_seconds: dict[str, float] = field(default_factory=dict)
    failed: str = ""


def chosen(space: SearchSpace, n: int, seed: int, option: str = "zero_cost.anchors") -> list[Architecture]:
    """`n` different random networks, one from each n-th of the space's range of MACs, in random order; ConfigError,
    which names `option`, where the space has fewer."""
    rng = np.random.default_rng(seed)
    codes = np.unique(space.sample(rng, max(_DRAWN, 8 * n)), axis=0)
    found = {one.id: one for one in (space.decode(space.to_params(row)) for row in codes)}
    if len(found) < n:
        raise ConfigError(f"{n} anchors are wanted, and space {space.name} gave {len(found)} different networks. Set "
                          f"{option}={len(found)} or less.")
    ranked = sorted(found.values(), key=lambda one: (one.macs, one.id))
    places = ((np.arange(n) + rng.random(n)) / n * len(ranked)).astype(int)
    for i in range(1, n):  # neighbours share the network that both of their parts have a share of
        places[i] = max(places[i], places[i - 1] + 1)
    return [ranked[place] for place in rng.permutation(places)]


def anchors(path: Path, networks: Sequence[Architecture], measure: Callable[[Architecture], Anchor], console: Console
            ) -> list[Anchor]:
    """What `measure` says of each network, from `path` where it is there. One process works, others wait for it."""
    def waiting() -> None:
        console.note(f"another process trains the {len(networks)} anchors; waiting for it")

    with hold(path.with_suffix(".lock"), waiting):
        found = _read(path, networks)
        if len(found) == len(networks):
            return found
        with console.step(f"train {len(networks)} anchors") as report:
            for network in networks[len(found):]:
                found.append(measure(network))
                write_atomic(path, json.dumps({**ANCHORS.header, "networks": [asdict(one) for one in found]}, indent=1))
                report(len(found) / len(networks), f"{len(found)} of {len(networks)} anchors")
    return found


def _read(path: Path, networks: Sequence[Architecture]) -> list[Anchor]:
    """The anchors that are there, in order; DataError for a file that is not of these networks."""
    content = ANCHORS.find(path)
    if content is None:
        return []
    with ANCHORS.reading(path):
        found = [_anchor(one) for one in content["networks"]]
        if [one.id for one in found] != [network.id for network in networks[: len(found)]]:
            raise ValueError("its networks are others")
    return found


def _anchor(row: dict[str, Any]) -> Anchor:
    one = Anchor(**row)
    numbers = [one.top1, one.std, one.seconds, *one.scores.values(), *one.score_seconds.values()]
    if not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers) or not 0 <= one.top1 <= 1:
        raise ValueError(f"anchor {one.id}: {row}")
    return one

SCORES = Document("hwnas-scores", 1, "scores of networks", "Delete it, and they are computed again.", DataError)
POOL = 256  # networks; about the number from which more tell little more of the others
IMAGES = 32
_EVERY = 8  # networks between two writes: a kill loses seconds


class Pool:
    """Scores `names` of up to `size` random networks of a space; `codes` [n, p] are their settings."""

    def __init__(self, dataset: Dataset, space: SearchSpace, names: Sequence[str], size: int = POOL, threads: int = 1
                 ) -> None:
        self.space, self.names = space, tuple(names)
        self._scorer = Scorer(dataset, min(IMAGES, len(dataset.train)), threads=threads)
        codes = space.sample(np.random.default_rng(0), 4 * size)
        first = np.unique(codes, axis=0, return_index=True)[1]
        self.codes = codes[np.sort(first)][:size]
        self.seconds = 0.0

    @property
    def path(self) -> Path:
        """Where the scores are kept."""
        return home() / "zero_cost" / f"scores-{digest(self.space.fingerprint, self._scorer.fingerprint)}.json"

    def scores(self, console: Console) -> NDArray[np.float64]:
        """Scores [n, len(names)], nan where a network has none. One process works, others wait for it."""
        networks = [self.space.decode(self.space.to_params(row)) for row in self.codes]

        def waiting() -> None:
            console.note("sampler: another process computes zero-cost scores; waiting for it")

        with hold(self.path.with_suffix(".lock"), waiting):
            found, self.seconds = _read_pool(self.path)
            open_ones = [(one, name) for one in networks for name in self.names if name not in found.get(one.id, {})]
            if open_ones:
                with console.step(f"score {len(networks)} networks ({', '.join(self.names)})") as report:
                    for done, (network, name) in enumerate(open_ones, 1):
                        try:
                            values, seconds = self._scorer.scores(network, (name,))
                        except CandidateError:
                            values, seconds = {}, {}
                        found.setdefault(network.id, {})[name] = values.get(name)
                        self.seconds += seconds.get(name, 0.0)
                        if done % _EVERY == 0 or done == len(open_ones):
                            self._write(found)
                        report(done / len(open_ones))
        return np.array([[found[one.id][name] for name in self.names] for one in networks], float)

    def _write(self, found: dict[str, dict[str, float | None]]) -> None:
        write_atomic(self.path, json.dumps({**SCORES.header, "seconds": self.seconds, "scores": found}))


def _read_pool(path: Path) -> tuple[dict[str, dict[str, float | None]], float]:
    """Scores by id and name, and their seconds; DataError for another file."""
    content = SCORES.find(path)
    if content is None:
        return {}, 0.0
    with SCORES.reading(path):
        scores = {str(one): {str(name): None if value is None else float(value) for name, value in row.items()}
                  for one, row in content["scores"].items()}
        return scores, float(content["seconds"])
