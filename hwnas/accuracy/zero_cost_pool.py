"""Zero-cost scores of a pool of networks, scored once: what a sampler learns a space's scores from.

A sampler looks at thousands of settings an ask, and a score takes a tenth of a second or more: so POOL random networks
are scored, and the scores of others are read from those (`hwnas.samplers.informed.Scored`). Kept in
`scores-<fingerprint>.json` and shared by all who ask for the same: format "hwnas-scores/1", `scores`: by architecture
id and name (null: the network has none), `seconds`: what they took.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hwnas.accuracy.dataset import Dataset, digest
from hwnas.accuracy.zero_cost_batch import Scorer
from hwnas.errors import CandidateError, DataError, UserError
from hwnas.latency.locks import file_lock
from hwnas.paths import home, write_atomic

if TYPE_CHECKING:
    from hwnas.progress import Console
    from hwnas.space import SearchSpace

FORMAT = "hwnas-scores/1"
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

        with file_lock(self.path.with_suffix(".lock"), waiting):
            found, self.seconds = _read(self.path)
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
        write_atomic(self.path, json.dumps({"format": FORMAT, "seconds": self.seconds, "scores": found}))


def _read(path: Path) -> tuple[dict[str, dict[str, float | None]], float]:
    """Scores by id and name, and their seconds; DataError for another file."""
    try:
        content: Any = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r} instead of {FORMAT!r}")
        scores = {str(one): {str(name): None if value is None else float(value) for name, value in row.items()}
                  for one, row in content["scores"].items()}
        return scores, float(content["seconds"])
    except FileNotFoundError:
        return {}, 0.0
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error}). Make it readable or delete it.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the scores that were kept there ({type(error).__name__}: {error}). Delete it, "
                        "and they are computed again.") from None
