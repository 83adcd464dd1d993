"""LatencyModel: it predicts a space's networks from a table, with intervals calibrated on held-out networks.

The physical costs and the residual that they leave over (both in features.py) are fitted together on whole networks.
The fit gives block entries, latencies of networks, and the held-out error. Blocks timed alone do not add up, see
docs/decisions/latency-model.md. The intervals are conformal, from cross-validated errors. They are wider for a network
that is unlike the measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import MissingLatency, TableError
from hwnas.latency.features import (
    COSTS,
    HOLD_WITH_PRIOR,
    LATER,
    LEVELS,
    NAMES,
    PARTS,
    RUN,
    START_WITH_PRIOR,
    Costs,
    Features,
    Group,
    GroupMember,
    Prior,
    Residual,
    covariance,
    group_members,
    invert,
    kernels,
    members,
    operator_features,
    operators,
    placed,
    position,
    totals,
    tune_variances,
)
from hwnas.latency.table import LEAST_NETWORKS, TABLE, LatencyTable, TimedNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.blocks.block import BlockSpec
from hwnas.stats import Z90, conformal_quantile, spearman
from hwnas.system.documents import WRONG, check_shape

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace


_LEAST_MS = 1e-6  # every share of a network's cost is above 0

Networks = Sequence[Sequence[BlockSpec]]
Placed = tuple[BlockSpec, str]  # a block and the role of the operator before it


@dataclass(frozen=True)
class FitData:
    """The data of a fit: n networks' blocks, latencies [n] in ms and runs [n], each a number (see `timed_networks`)."""

    blocks: Networks
    measured_ms: np.ndarray
    runs: np.ndarray

    def __getitem__(self, chosen: np.ndarray) -> FitData:
        return FitData([self.blocks[int(index)] for index in chosen], self.measured_ms[chosen], self.runs[chosen])


def list_places(networks: Networks) -> tuple[list[Placed], list[list[int]]]:
    """Return all placed blocks that occur in networks, each once; and for each network the indices of its blocks."""
    indices: dict[Placed, int] = {}
    rows = [[indices.setdefault(place, len(indices)) for place in placed(blocks)] for blocks in networks]
    return list(indices), rows


@dataclass(frozen=True)
class _Physical:
    """Costs fitted on n networks, and the covariances from which their excess over these costs is explained."""

    features: Features
    costs: Costs
    base_ms: np.ndarray  # [n]: latencies by the costs alone
    groups: list[dict[str, Group]]
    positions: np.ndarray
    linear: np.ndarray  # [n, columns]: each column over `base_ms` and `scale`
    scale: np.ndarray  # [columns]
    parts: list[np.ndarray]  # [n, n] for each of features.PARTS but the noise

    @classmethod
    def of(cls, timed: FitData, prior: Prior | None) -> _Physical:
        features = Features(prior)
        design = features.design(features.of_networks(timed.blocks))
        costs = Costs.fit(design, timed.measured_ms, features.ridge)
        base = costs.latency_ms(design)
        # Every network is described by its members (operators and blocks) and their shares of its cost, by level.
        places, rows = list_places(timed.blocks)
        place_members = list_members(features, costs, places)
        groups = [group_members([[(member, member.cost_ms / total)
                                  for place in row for member in place_members[place][level]]
                                 for row, total in zip(rows, base, strict=True)]) for level in range(len(LEVELS))]
        positions = position(np.array([totals(blocks) for blocks in timed.blocks]))
        n_unused = (~design[:, len(NAMES) - len(LATER) : len(NAMES)].any(axis=0)).sum()
        # A column of LATER that no network uses does not count, so that old tables are fitted as before it was added.
        scale = (np.sqrt(((design / base[:, None]) ** 2).mean(axis=0)) + 1e-9) * np.sqrt(design.shape[1] - n_unused)
        linear = design / base[:, None] / scale
        return cls(features, costs, base, groups, positions, linear, scale,
                   kernels(groups, positions, linear, timed.runs))


_LEVEL = 0.05  # variance of the excess that all networks of a machine have in common, before one is timed


def most_telling(networks: Networks, prior: Prior, n: int, known: int = 0) -> list[int]:
    """Return the indices of `n` of `networks` to time on a machine with a `prior`. The first `known` are timed already.

    Each choice leaves the least total variance in all networks, if hosts differ by START_WITH_PRIOR (greedy A-optimal
    design).
    """
    entries = Features(prior).of_networks(networks)[:, -len(prior.names):]
    expected_ms = np.maximum((entries / entries.mean(axis=0)).mean(axis=1), 0.01)  # up to the machine's speed
    expected = FitData(networks, expected_ms, np.zeros(len(networks)))
    joint = covariance(START_WITH_PRIOR, _Physical.of(expected, prior).parts) + _LEVEL
    noise, chosen = float(START_WITH_PRIOR[-1]), list[int]()
    joint -= noise * np.eye(len(joint))
    # `joint` is the covariance of the networks' excess, given the networks chosen so far.
    for step in range(min(known + n, len(networks))):
        variance = np.diag(joint) + noise
        reductions = (joint**2).sum(axis=0) / variance
        reductions[chosen] = -1.0
        chosen.append(step if step < known else int(np.argmax(reductions)))
        column = joint[:, chosen[-1]].copy()  # condition on a measurement of the chosen network
        joint -= np.outer(column, column) / variance[chosen[-1]]
    return chosen[known:]


@dataclass(frozen=True)
class Fit:
    """A fitted model: the costs, the residual that they leave over, and the costs as the residual corrects them."""

    features: Features
    costs: Costs
    corrected: np.ndarray
    residual: Residual

    @classmethod
    def of(cls, timed: FitData, prior: Prior | None = None, variances: np.ndarray | None = None) -> Fit:
        """Fit on `timed`. `variances` (of features.PARTS) are tuned if they are None."""
        physical = _Physical.of(timed, prior)
        excess = timed.measured_ms / physical.base_ms - 1
        if variances is None:
            variances = (tune_variances(physical.parts, excess) if prior is None else
                         tune_variances(physical.parts, excess, START_WITH_PRIOR, HOLD_WITH_PRIOR))
        inverse, _ = invert(covariance(variances, physical.parts))
        residual = Residual(variances, physical.groups, physical.positions, timed.runs, inverse @ excess, inverse)
        # The part COSTS of the residual is linear in the columns of the costs, so it is added to the costs themselves.
        correction = variances[COSTS] * (physical.linear.T @ residual.weights) / physical.scale
        return cls(physical.features, physical.costs, physical.costs.values + correction, residual)

    def entries(self, blocks: Sequence[Placed]) -> tuple[np.ndarray, np.ndarray]:
        """Return the time of each of `blocks` in its place of a network in ms [n], and its variance in ms² [n]."""
        sums = self.features.of_blocks([block for block, _ in blocks])
        mean = sums @ self.features.additive(self.corrected)
        variance = np.zeros(len(blocks))
        place_members = list_members(self.features, self.costs, blocks)
        for level in range(len(LEVELS)):  # each level adds its excess, computed for a whole group at once
            groups: dict[str, list[tuple[int, GroupMember]]] = {}
            for row, levels in enumerate(place_members):
                for member in levels[level]:
                    groups.setdefault(member.group, []).append((row, member))
            for name, group_rows in groups.items():
                rows = np.array([row for row, _ in group_rows])
                cost = np.array([member.cost_ms for _, member in group_rows])
                excess, spread = self.residual.excess(level, name, [member for _, member in group_rows])
                np.add.at(mean, rows, cost * excess)
                np.add.at(variance, rows, cost**2 * spread)
        return mean, variance

    def latency_ms(self, sums: np.ndarray, entries_ms: np.ndarray, variance_ms2: np.ndarray,
                   positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return latencies in ms [n] and log standard deviations [n], from features and entries summed over blocks."""
        design = self.features.design(sums)
        base = self.costs.latency_ms(design)
        additive = self.features.additive(self.corrected)
        steps = design @ self.corrected - sums @ additive  # the cache steps, which belong to no single block
        mean = np.maximum(entries_ms + steps + base * self.residual.common(positions), 0.1 * base)
        noise = self.residual.variances[-1]
        relative = design / base[:, None]
        # The fit's share of the variance of each prediction: it is large far from the fitted networks.
        leverage = np.einsum("ij,ij->i", relative @ self.costs.inverse, relative)
        return mean, np.sqrt(noise * (1 + leverage) + variance_ms2 / base**2)

    def networks(self, networks: Networks) -> tuple[np.ndarray, np.ndarray]:
        """Return `latency_ms` of networks that are given by their blocks."""
        places, rows = list_places(networks)
        entries, variance = self.entries(places)
        return self.latency_ms(
            self.features.of_networks(networks), np.array([entries[row].sum() for row in rows]),
            np.array([variance[row].sum() for row in rows]),
            position(np.array([totals(blocks) for blocks in networks])))


def list_members(features: Features, costs: Costs, places: Sequence[Placed]) -> list[list[list[GroupMember]]]:
    """Return the members of each placed block by level, each with its own cost in ms by the additive costs."""
    additive, place_members = features.additive(costs.values), []
    blocks_ms = np.maximum(features.of_blocks([block for block, _ in places]) @ additive, _LEAST_MS)
    for (block, before), block_ms in zip(places, blocks_ms, strict=True):
        times = [max(float(operator_features(operator) @ additive[: len(NAMES)]), _LEAST_MS)
                 for operator in operators(block)]
        if features.prior is not None:  # `block_ms` contains the prior's entries: divide it in the same proportions
            rest = block_ms / sum(times)
            times = [ms * rest for ms in times]
        place_members.append(members(block, before, block_ms, times))
    return place_members


FOLDS = 10
GROUPS = 3  # of predicted latencies, each with interval ends of its own: errors of fast and slow networks differ
LEAST_OF_GROUP = 20  # networks; fewer have no quantile at 5 %
LEAST_OF_ORIGIN = 40  # networks of one origin (random, front), from which on the intervals must cover 90 % of them


@dataclass(frozen=True)
class Ends:
    """Ends of 90 % intervals, in units of a prediction's own standard deviation, by group of predicted latency.

    Attributes:
        edges: The borders between the groups [k - 1], as logarithms of ms.
        low: The lower end of each group [k].
        high: The upper end of each group [k].
    """

    edges: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, scores: np.ndarray, log_mean: np.ndarray, origins: np.ndarray) -> Ends:
        """Compute conformal ends (Vovk et al., Mondrian Confidence Machine, 2003) from held-out networks.

        Networks near a front may have larger errors than random ones. All intervals get wider until they contain nine
        of ten networks of each origin with LEAST_OF_ORIGIN networks or more.

        Args:
            scores: Log errors in units of their own standard deviation [n].
            log_mean: Predictions as logarithms of ms [n].
            origins: The way in which each network was chosen [n].
        """
        edges = np.quantile(log_mean, np.arange(1, GROUPS) / GROUPS)
        groups = np.searchsorted(edges, log_mean, side="right")
        if np.bincount(groups, minlength=GROUPS).min() < LEAST_OF_GROUP - 1:  # one less: a network is left out
            edges, groups = edges[:0], np.zeros(len(scores), int)  # too few networks: one group of all
        k = len(edges) + 1
        low, high = (np.array([conformal_quantile(scores[groups == group], q) for group in range(k)])
                     for q in (0.05, 0.95))
        middle, half = (low + high) / 2, np.maximum((high - low) / 2, 1e-9)
        out = np.abs(scores - middle[groups]) / half[groups]  # above 1: outside its interval
        names = [name for name in np.unique(origins) if (origins == name).sum() >= LEAST_OF_ORIGIN]
        half = half * max([1.0, *(conformal_quantile(out[origins == name], 0.9) for name in names)])
        return cls(*(tuple(map(float, values)) for values in (edges, middle - half, middle + half)))

    def at(self, log_mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and the upper ends for predictions `log_mean` [n]."""
        groups = np.searchsorted(np.array(self.edges), log_mean, side="right")
        return np.array(self.low)[groups], np.array(self.high)[groups]


def interval_ends(low: np.ndarray, high: np.ndarray, log_std: np.ndarray, run_to_run: float
                  ) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances in log units from predictions to both ends of their 90 % intervals.

    Args:
        low: The scores of the lower ends [n], in units of `log_std`; mostly below 0.
        high: The scores of the upper ends [n].
        log_std: The log standard deviation of each prediction [n].
        run_to_run: The log standard deviation between two runs or sessions, which no single calibration can show.
    """
    middle, half = (low + high) / 2 * log_std, np.hypot((high - low) / 2 * log_std, Z90 * run_to_run)
    return middle - half, middle + half


@dataclass(frozen=True)
class HeldOut:
    """Predictions of networks that the fit had not seen, beside their measured latencies; arrays [n]."""

    log_measured: np.ndarray
    log_mean: np.ndarray
    log_std: np.ndarray
    origins: np.ndarray
    run_to_run: float

    @property
    def scores(self) -> np.ndarray:
        """Log errors [n] in units of their own standard deviation."""
        return np.asarray((self.log_measured - self.log_mean) / self.log_std)

    def summary(self) -> dict[str, float]:
        """Return the shares within 5 and 10 %, mean absolute error, rank correlation, coverage and width."""
        error = np.abs(np.exp(self.log_mean - self.log_measured) - 1)
        scores = self.scores
        # A network's own error has no part in the ends of its interval.
        ends = np.array([Ends.of(*(np.delete(values, i) for values in (scores, self.log_mean, self.origins))).at(
            self.log_mean[i]) for i in range(len(scores))])
        low, high = interval_ends(ends[:, 0], ends[:, 1], self.log_std, self.run_to_run)
        errors = self.log_measured - self.log_mean
        inside = (low <= errors) & (errors <= high)
        values = {
            "n": len(error), "mean_error": error.mean(), "within_5": (error <= 0.05).mean(),
            "within_10": (error <= 0.10).mean(), "spearman": spearman(self.log_mean, self.log_measured),
            "coverage": inside.mean(),
            "least_third_coverage": min(inside[third].mean() for third in np.array_split(np.argsort(self.log_mean), 3)),
            "median_half_width": np.median(np.sinh((high - low) / 2))}
        return {name: round(float(value), 5) for name, value in values.items()}


def cross_validate(timed: FitData, origins: np.ndarray, variances: np.ndarray, run_to_run: float, *, apart: bool,
                   prior: Prior | None = None, folds: int = FOLDS) -> HeldOut:
    """Predict each network from a fit on others, at the pace of the wave in which it was measured.

    If each wave had a process of its own (`apart`), whole waves are held out: a process changes like networks alike,
    and no fit knows the process of a later session. The pace of a network's wave is then estimated from the other
    networks of the wave, as a later session's pace is from a panel.
    """
    n, runs, logs = len(timed.measured_ms), np.unique(timed.runs), np.log(timed.measured_ms)
    by_run = apart and len(runs) > 1
    units = np.random.default_rng(0).permutation(len(runs) if by_run else n)  # what is held out: runs or networks
    mean, std = np.zeros(n), np.zeros(n)
    for units_of_fold in np.array_split(units, min(folds, len(units))):
        fold = np.flatnonzero(np.isin(timed.runs, runs[units_of_fold])) if by_run else units_of_fold
        fit = Fit.of(timed[np.setdiff1d(np.arange(n), fold)], prior, variances)
        mean[fold], std[fold] = fit.networks(timed[fold].blocks)
        if not by_run:
            mean[fold] *= 1 + fit.residual.of_runs(timed.runs[fold])
    if by_run:
        paces = logs - np.log(mean)
        for index in range(n):
            beside = (timed.runs == timed.runs[index]) & (np.arange(n) != index)
            mean[index] *= np.exp(np.median(paces[beside])) if beside.any() else 1.0
    return HeldOut(logs, np.log(mean), std, origins, run_to_run)


# Log standard deviation between two runs, for tables with one copy of each network, which cannot show it.
RUN_TO_RUN = 0.02
LEAST_PROCESSES = 3  # processes that timed a table's networks, from which on networks are held out by process
_CHUNK = 8192  # architectures predicted at a time
_BEFORE = ("", "stem", "dense", "pointwise")  # what may come before a segment


@dataclass(frozen=True, slots=True)
class Predictions:
    """Latencies of many architectures in ms, arrays [n]: estimate and 90 % interval. `deployment`: the name of the
    deployment that each is of, if there are several; otherwise None."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    deployment: np.ndarray | None = None

    def of(self, at: int) -> Predictions:
        """Return the prediction of the architecture at an index."""
        part = slice(at, at + 1)
        return Predictions(self.mean[part], self.low[part], self.high[part],
                           None if self.deployment is None else self.deployment[part])


@dataclass(frozen=True)
class LearntValues:
    """The slow results of a fit, as plain numbers for a table. They are valid only while it has `networks` networks.
    `priors` names the tables from which the fit started."""

    networks: int
    variances: tuple[float, ...]
    ends: Ends
    error: dict[str, float]
    priors: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a table."""
        return {"networks": self.networks, "variances": dict(zip(PARTS, self.variances, strict=True)),
                "ends": asdict(self.ends), "error": self.error, "priors": [*self.priors]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LearntValues:
        """Read what `to_dict` returned; ValueError, KeyError or TypeError for anything else."""
        edges, low, high = (tuple(map(float, data["ends"][name])) for name in ("edges", "low", "high"))
        if not len(edges) + 1 == len(low) == len(high):
            raise ValueError("ends of intervals do not belong together")
        check_shape(data.get("priors", []), [str], "priors")
        return cls(int(data["networks"]), tuple(float(data["variances"][part]) for part in PARTS),
                   Ends(edges, low, high), dict(data["error"]), tuple(data.get("priors", [])))


class LatencyModel:
    """A model of the latencies of a space's architectures on a table's host: `fit` it, then `predict` integer codes."""

    def __init__(self, space: SearchSpace, fit: Fit, learnt: LearntValues, run_to_run: float, factor: float = 1.0
                 ) -> None:
        self.space, self._fit, self.learnt, self._run_to_run, self._factor = space, fit, learnt, run_to_run, factor
        self.error = learnt.error
        self._n_sums = fit.features.n_sums
        # A look-up table for `predict`, filled by `_learn`: sums and entries of each segment, and its last operator.
        self._known = np.zeros(space.n_segments, bool)
        self._rows = np.zeros((space.n_segments, self._n_sums + len(totals(()))))
        self._entries = np.zeros((space.n_segments, len(_BEFORE), 2))
        self._after = np.full(space.n_segments, -1)

    @classmethod
    def fit(cls, table: LatencyTable, space: SearchSpace, *, prior: Prior | None = None, folds: int = FOLDS
            ) -> LatencyModel:
        """Fit on the table's networks; MissingLatency if it has too few of this space.

        If the table stores the slow results of an earlier fit on the same networks, they are used again. `prior`:
        models of other hosts, targets or inputs to start from (prior.py chooses them and finds them again).
        """
        networks = usable(table, space)
        timed, run_to_run = timed_networks(networks, table.quiet_ms), between_runs(networks)
        waves = len({network.measurement.quiet_ms for network in networks if network.space == space.name})
        apart = table.processes.get(space.name, 0) >= max(LEAST_PROCESSES, waves)  # each wave in its own
        names, learnt = () if prior is None else prior.names, stored_fit(table, space.name)
        if learnt and (learnt.networks, learnt.priors) == (len(networks), names):
            fit = Fit.of(timed, prior, np.array(learnt.variances))
            return cls(space, fit, learnt, max(run_to_run, float(np.sqrt(learnt.variances[RUN]))))
        fit = Fit.of(timed, prior)
        run_to_run = max(run_to_run, float(np.sqrt(fit.residual.variances[RUN])))
        origins = np.array([network.origin for network in networks])
        held_out = cross_validate(timed, origins, fit.residual.variances, run_to_run, apart=apart, prior=prior,
                                  folds=folds)
        learnt = LearntValues(len(networks), tuple(float(value) for value in fit.residual.variances),
                              Ends.of(held_out.scores, held_out.log_mean, origins), held_out.summary(), names)
        return cls(space, fit, learnt, run_to_run)

    def in_session(self, factor: float, log_std: float) -> LatencyModel:
        """Return the same model for another session of the machine.

        Args:
            factor: The latency in that session over the latency in the table's session.
            log_std: The log standard deviation of networks around that factor, by which intervals get wider.
        """
        return LatencyModel(self.space, self._fit, self.learnt, float(np.hypot(self._run_to_run, log_std)), factor)

    def predict(self, codes: np.ndarray) -> Predictions:
        """Predict the latencies of the architectures that are the rows of `codes` [n, parameters]."""
        segments = self.space.segments(codes)
        self._learn(np.unique(segments[~self._known[segments]]))
        parts = [self._of_segments(segments[start : start + _CHUNK]) for start in range(0, len(segments), _CHUNK)]
        mean, log_std = (np.concatenate(part) for part in zip(*parts, strict=True))
        return self._predictions(mean, log_std)

    def predict_architectures(self, architectures: Sequence[Architecture]) -> Predictions:
        """Predict the latencies of architectures of any space; this is slower than `predict`."""
        return self._predictions(*self._fit.networks([architecture.blocks() for architecture in architectures]))

    def _learn(self, segments: np.ndarray) -> None:
        """Fill in the rows of new segments: their sums, and their entries after each operator that may come before."""
        contents = {int(segment): self.space.segment_blocks(int(segment)) for segment in segments}
        contents = {segment: blocks for segment, blocks in contents.items() if blocks}
        self._known[segments] = True
        if not contents:
            return
        inside = {(segment, context): placed(blocks, before) for segment, blocks in contents.items()
                  for context, before in enumerate(_BEFORE)}
        distinct_places = list(dict.fromkeys(place for blocks in inside.values() for place in blocks))
        entries = np.column_stack(self._fit.entries(distinct_places))
        row_of = {place: index for index, place in enumerate(distinct_places)}
        for (segment, context), places in inside.items():
            self._entries[segment, context] = entries[[row_of[place] for place in places]].sum(axis=0)
        for segment, blocks in contents.items():
            self._rows[segment] = np.concatenate([self._fit.features.of_blocks(blocks).sum(axis=0), totals(blocks)])
            last = operators(blocks[-1])[-1].role
            self._after[segment] = _BEFORE.index(last) if last in _BEFORE else 0

    def _of_segments(self, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Rows add up over segments; a segment's entry depends on the last operator of the segment before it.
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
        ends = interval_ends(*self.learnt.ends.at(np.log(mean)), log_std, self._run_to_run)
        mean = self._factor * mean
        return Predictions(mean, *(mean * np.exp(end) for end in ends))


def usable(table: LatencyTable, space: SearchSpace) -> list[TimedNetwork]:
    """Return the table's valid networks, of any space; MissingLatency if fewer than LEAST_NETWORKS are of `space`."""
    networks = [network for network in table.networks if network.measurement.valid]
    n_of_space = sum(network.space == space.name for network in networks)
    if n_of_space < LEAST_NETWORKS:
        raise MissingLatency(f"{table.path or table.key}: {n_of_space} networks of space {space.name}; at least "
                             f"{LEAST_NETWORKS} are needed. Measure them: hwnas profile target=NAME "
                             f"space={space.name} {table.key.images}")
    return networks


def stored_fit(table: LatencyTable, space_name: str) -> LearntValues | None:
    """Return what a table stores of an earlier fit for a space, None if nothing; TableError if it is damaged."""
    try:
        stored = table.learnt.get(space_name)
        return LearntValues.from_dict(stored) if stored else None
    except WRONG as error:
        raise TableError(f"{table.path or table.key}: learnt: {type(error).__name__}: {error}. {TABLE.remedy}"
                         ) from None


def timed_networks(networks: Sequence[TimedNetwork], quiet_ms: float) -> FitData:
    """Return the data of a fit: latencies at the speed at which the reference takes `quiet_ms`. The reference's time in
    a run identifies the run."""
    return FitData([network.architecture.blocks() for network in networks],
                   np.array([network.measurement.at_ms(quiet_ms) for network in networks]),
                   np.array([network.measurement.quiet_ms for network in networks]))


def between_runs(networks: Sequence[TimedNetwork]) -> float:
    """Return the log standard deviation between two runs, each of which compiles its own copies."""
    spreads = np.array([network.measurement.copy_spread for network in networks])
    if not np.isfinite(spreads).any():
        return RUN_TO_RUN
    # The mean of a run's copies has 1/copies of one copy's variance; the difference of two runs has twice that.
    return float(np.sqrt(np.nanmean(spreads**2) * 2 / networks[0].measurement.protocol.copies))
