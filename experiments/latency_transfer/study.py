"""Few measurements on a new host: held-out error with and without what another table says, over many draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.common import figures
from hwnas.latency.features import Prior
from hwnas.latency.model import Fit, Timed
from hwnas.latency.prior import Gain, best, held_out_errors
from hwnas.space.blocks.block import BlockSpec

ANY = "any"  # whichever of all the sources the gate takes
CONTROL = "control"  # random entries, which say nothing: a gate must refuse them
HELD_OUT = 200  # networks judged on, of those not drawn


@dataclass(frozen=True)
class Drawn:
    """One draw of few networks: error on the others from scratch and with each source; the gains seen beforehand."""

    n: int
    seed: int
    scratch: dict[str, float | None]
    scratch_errors: np.ndarray
    ungated: dict[str, dict[str, float | None]]
    ungated_errors: dict[str, np.ndarray]
    gains: dict[str, Gain]

    def rows(self, destination: str) -> Iterator[dict[str, object]]:
        """As written to CSV: one a source, and one for the gate over all of them."""
        for source in self.gains:
            yield self._row(destination, source, {source: self.gains[source]})
        real = {source: gain for source, gain in self.gains.items() if source != CONTROL}
        if len(real) > 1:
            yield self._row(destination, ANY, real)

    def _row(self, destination: str, source: str, gains: Mapping[str, Gain]) -> dict[str, object]:
        taken = best(gains)
        gated = self.scratch if taken is None else self.ungated[taken]
        ungated = self.ungated.get(source, dict.fromkeys(self.scratch))
        loss, noise = self._loss(taken)
        return {"destination": destination, "source": source, "n": self.n, "seed": self.seed, "taken": taken or "",
                **{f"{name}_{way}": values[name] for way, values in
                   (("scratch", self.scratch), ("ungated", ungated), ("gated", gated))
                   for name in ("mean_error", "within_10", "spearman")},
                "loss": round(loss, 6), "loss_noise": round(noise, 6)}

    def _loss(self, taken: str | None) -> tuple[float, float]:
        """By how much the gated choice is worse on the held-out networks, and the standard error of that."""
        if taken is None:
            return 0.0, 0.0
        gain = Gain.between(self.scratch_errors, self.ungated_errors[taken])
        return -gain.mean, gain.standard_error


class RandomPrior:
    """Entries drawn at random, each block's always the same."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._known: dict[BlockSpec, float] = {}

    def block_ms(self, blocks: Sequence[BlockSpec]) -> tuple[np.ndarray, np.ndarray]:
        """Entries of `blocks`, ms [n], and as much for their standard deviations."""
        found = np.array([self._known.setdefault(block, float(self._rng.exponential(0.02))) for block in blocks])
        return found, found


def study(timed: Timed, sources: Mapping[str, Prior], n: int, seed: int) -> Drawn:
    """Draw `n` of the destination's networks; judge on HELD_OUT of the rest."""
    order = np.random.default_rng((seed, n)).permutation(len(timed.measured_ms))
    drawn, rest = timed[order[:n]], timed[order[n : n + HELD_OUT]]
    scratch, scratch_errors = _judged(drawn, None, rest)
    left_out = held_out_errors(drawn, None, seed)
    ungated, errors, gains = {}, {}, {}
    for name, prior in sources.items():
        ungated[name], errors[name] = _judged(drawn, prior, rest)
        gains[name] = Gain.between(left_out, held_out_errors(drawn, prior, seed))
    return Drawn(n, seed, scratch, scratch_errors, ungated, errors, gains)


def _judged(drawn: Timed, prior: Prior | None, rest: Timed) -> tuple[dict[str, float | None], np.ndarray]:
    predicted, _ = Fit.of(drawn, prior).networks(rest.blocks)
    return figures(predicted, rest.measured_ms), np.abs(np.log(predicted / rest.measured_ms))
