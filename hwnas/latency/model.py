"""LatencyModel: predicts whole networks of a space from a table, with intervals calibrated on held-out networks.

Physical costs (features.py) and what they leave over (residual.py) are fitted on whole networks. Blocks timed alone do
not add up, see docs/decisions/latency-model.md. A network unlike those measured gets a wider interval; intervals are
conformal, from cross-validated errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import MissingLatency
from hwnas.latency.features import Prior, operators, placed, usual_place
from hwnas.latency.fit import FOLDS, Fit, Timed, cross_validate, interval_end, interval_scores
from hwnas.latency.residual import PARTS, RUN, position, totals
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TimedNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace

# Log standard deviation between two runs, for tables that hold one copy of each network and so cannot tell it.
RUN_TO_RUN = 0.02
_CHUNK = 8192  # architectures predicted at a time
_BEFORE = ("", "stem", "dense", "pointwise")  # what may come before a segment


@dataclass(frozen=True, slots=True)
class Predictions:
    """Latencies of many architectures in ms, arrays [n]: estimate, 90 % interval, standard deviation."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    std: np.ndarray


@dataclass(frozen=True)
class Learnt:
    """The slow results of a fit, as plain numbers for the table; they hold for `networks` networks only.

    `prior` names the table that the fit started from; empty: none.
    """

    networks: int
    variances: tuple[float, ...]
    ends: tuple[float, float]
    spread: float
    error: dict[str, float]
    prior: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"networks": self.networks, "variances": dict(zip(PARTS, self.variances, strict=True)),
                "ends": list(self.ends), "spread": self.spread, "error": self.error, "prior": self.prior}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Learnt:
        """Inverse of `to_dict`."""
        low, high = data["ends"]
        return cls(int(data["networks"]), tuple(float(data["variances"][part]) for part in PARTS),
                   (float(low), float(high)), float(data["spread"]), dict(data["error"]),
                   str(data.get("prior", "")))


class LatencyModel:
    """Latency of a space's architectures on a table's host: `fit` it, then ask `predict` with integer codes."""

    def __init__(self, space: SearchSpace, fit: Fit, learnt: Learnt, run_to_run: float) -> None:
        self.space, self._fit, self.learnt, self._run_to_run = space, fit, learnt, run_to_run
        self.error = learnt.error
        self._n_sums = fit.features.n_sums
        self._known = np.zeros(space.n_segments, bool)
        self._rows = np.zeros((space.n_segments, self._n_sums + len(totals(()))))
        self._entries = np.zeros((space.n_segments, len(_BEFORE), 2))
        self._after = np.full(space.n_segments, -1)

    @classmethod
    def fit(cls, table: LatencyTable, space: SearchSpace, *, prior: Prior | None = None, prior_name: str = "",
            folds: int = FOLDS) -> LatencyModel:
        """Fit on the table's networks; MissingLatency when it holds too few of this space.

        What the table has stored of an earlier fit on the same networks is used again. `prior`: a model of another
        host, target or input to start from (prior.py chooses it and finds it again).
        """
        networks = usable(table, space)
        timed, run_to_run = timed_networks(networks, table.quiet_ms), between_runs(networks)
        stored = table.learnt.get(space.name)
        if stored and stored["networks"] == len(networks) and stored.get("prior", "") == prior_name:
            learnt = Learnt.from_dict(stored)
            run_to_run = max(run_to_run, float(np.sqrt(learnt.variances[RUN])))
            return cls(space, Fit.of(timed, prior, np.array(learnt.variances)), learnt, run_to_run)
        fit = Fit.of(timed, prior)
        run_to_run = max(run_to_run, float(np.sqrt(fit.residual.variances[RUN])))
        halves = np.array([network.measurement.halves_ms() for network in networks])
        origins = np.array([network.origin for network in networks])
        held_out = cross_validate(timed, halves, origins, fit.residual.variances, run_to_run, prior=prior, folds=folds)
        scores = held_out.scores
        learnt = Learnt(len(networks), tuple(float(value) for value in fit.residual.variances),
                        interval_scores(scores, origins), float(np.std(scores)),
                        held_out.summary(), prior_name)
        return cls(space, fit, learnt, run_to_run)

    def predict(self, codes: np.ndarray) -> Predictions:
        """Latency of the architectures that rows of `codes` [n, parameters] stand for."""
        segments = self.space.segments(codes)
        self._learn(np.unique(segments[~self._known[segments]]))
        parts = [self._of_segments(segments[start : start + _CHUNK]) for start in range(0, len(segments), _CHUNK)]
        mean, log_std = (np.concatenate(part) for part in zip(*parts, strict=True))
        return self._predictions(mean, log_std)

    def predict_architectures(self, architectures: Sequence[Architecture]) -> Predictions:
        """The same for architectures of any origin; slower."""
        return self._predictions(*self._fit.networks([architecture.blocks() for architecture in architectures]))

    def block_ms(self, blocks: Sequence[BlockSpec]) -> tuple[np.ndarray, np.ndarray]:
        """The table's entries: what each of `blocks` takes inside a network, ms [n], and its standard deviation.

        Inferred from whole networks, for a place after a pointwise convolution. Costs that only whole networks have
        (caches passed, see features.py) are not part.
        """
        mean, variance = self._fit.entries([usual_place(block) for block in blocks])
        return mean, np.sqrt(variance)

    def _learn(self, segments: np.ndarray) -> None:
        """Fill in the rows of segments met for the first time: sums, and entries for whatever may come before."""
        contents = {int(segment): self.space.segment_blocks(int(segment)) for segment in segments}
        contents = {segment: blocks for segment, blocks in contents.items() if blocks}
        self._known[segments] = True
        if not contents:
            return
        inside = {(segment, context): placed(blocks, before) for segment, blocks in contents.items()
                  for context, before in enumerate(_BEFORE)}
        every = list(dict.fromkeys(place for blocks in inside.values() for place in blocks))
        entries = np.column_stack(self._fit.entries(every))
        where = {place: index for index, place in enumerate(every)}
        for (segment, context), here in inside.items():
            self._entries[segment, context] = entries[[where[place] for place in here]].sum(axis=0)
        for segment, blocks in contents.items():
            self._rows[segment] = np.concatenate([self._fit.features.of_blocks(blocks).sum(axis=0), totals(blocks)])
            last = operators(blocks[-1])[-1].role
            self._after[segment] = _BEFORE.index(last) if last in _BEFORE else 0

    def _of_segments(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows, before = self._rows[segments[:, 0]], np.zeros(len(segments), int)
        entries = self._entries[segments[:, 0], before]
        for column in range(1, segments.shape[1]):
            after = self._after[segments[:, column - 1]]
            before = np.where(after >= 0, after, before)  # a segment without blocks changes nothing
            rows = rows + self._rows[segments[:, column]]
            entries = entries + self._entries[segments[:, column], before]
        n = self._n_sums
        return self._fit.latency_ms(rows[:, :n], entries[:, 0], entries[:, 1], position(rows[:, n:]))

    def _predictions(self, mean: np.ndarray, log_std: np.ndarray) -> Predictions:
        low, high = (mean * np.exp(interval_end(end, log_std, self._run_to_run)) for end in self.learnt.ends)
        return Predictions(mean, low, high, mean * np.hypot(log_std * self.learnt.spread, self._run_to_run))


def usable(table: LatencyTable, space: SearchSpace) -> list[TimedNetwork]:
    """The table's valid networks; MissingLatency when fewer than LEAST_NETWORKS are of `space`."""
    networks = [network for network in table.networks if network.measurement.valid]
    ours = sum(network.space == space.name for network in networks)
    if ours < LEAST_NETWORKS:
        raise MissingLatency(f"{table.path or table.key}: {ours} networks of space {space.name}; at least "
                             f"{LEAST_NETWORKS} are needed. Measure them: python -m hwnas.profile +target=… "
                             f"space={space.name}")
    return networks


def timed_networks(networks: Sequence[TimedNetwork], quiet_ms: float) -> Timed:
    """What a fit takes of them: latencies at the speed at which the reference takes `quiet_ms`."""
    return Timed([network.architecture.blocks() for network in networks],
                 np.array([network.measurement.at_ms(quiet_ms) for network in networks]),
                 np.array([network.measurement.quiet_ms for network in networks]))


def between_runs(networks: Sequence[TimedNetwork]) -> float:
    """Log standard deviation between two runs: each compiles copies of its own of the reference."""
    spreads = np.array([network.measurement.copy_spread for network in networks])
    if not np.isfinite(spreads).any():
        return RUN_TO_RUN
    return float(np.sqrt(np.nanmean(spreads**2) * 2 / networks[0].measurement.protocol.copies))
