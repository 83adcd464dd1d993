"""The latency of the quiet machine, estimated from turns on a machine that others use too.

The core probe beside the calls (`hwnas.latency.probes`) shows which of them were disturbed. The model of a point is:

    log time = quiet + copy + core*c + memory*m + cold*h + level + reach*traffic + reload + noise

A point is the median of a turn's calls of one class. A call is slow if the core probe is 12 % or more above its quiet
time, otherwise clear. Both kinds may come shortly after another process cut into the turn, which makes four classes.
Only the time in which this process ran counts. The first calls of a turn, which warm the caches up, are in no point.

c is the logarithm of the core probe over its quiet time in this run. m is the same of the memory probe around the turn,
without the effect of a shared core. h is the slowdown after a cut that emptied all caches, learnt from the first calls
of the network's turns. `level` and `traffic` are the same for all networks of a run. `level` is how much slower the
core was at its quietest than in earlier runs on this host. `traffic` is how much slower the reference was, beyond the
level and the probes. `reload` is for networks that are longer than the reference, if other processes cut into most of
their calls. Each call then loads its weights from memory, which costs more if it reads more weights in a millisecond.

`quiet` has a flat prior. `copy` is the difference between compilations of a network. The slopes core, cold and memory
have the priors of DEFAULTS; core and cold are moved by the networks that were timed together (empirical Bayes). The
memory slope of a network that reads many weights in a millisecond is higher. `reach` is near 1 for networks as long as
the reference, and less certain for others. So clear turns decide, if there are any. If there are none, the slopes
decide, and the interval is as wide as slopes differ. Noise is Student's t with 4 degrees of freedom, fitted by
reweighting (Lange, Little and Taylor, JASA 84, 1989). experiments/in_use compares the model with simpler estimates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hwnas.latency.turn import Turn
from hwnas.stats import student_t

CLEAR = 0.12  # logarithm over the probe's quiet time: below it a call ran alone on its core
SAME_CORE = 1.25  # a run's quiet core probe over that of earlier runs: sessions differ by so much at most
QUIET_CALLS = 0.9  # share of a turn's calls that must be clear for a quiet turn: a reading may be wrong
MODE_WIDTH = 1.10  # the probe's quiet times are within 10 %: the clock varies
COPY_STD = 0.012  # between two compilations of one network
SLOW_STD, CUT_STD = 0.2, 0.3  # of slow and cut points: share of their slowdown that no slope explains
FREEDOM = 4.0  # degrees of freedom of the noise, and of the prior of its size
LEAST_NOISE, MOST_NOISE = 0.004, 0.12
LEVEL_STD = 0.006  # the least standard error, however many points are clear
UNKNOWN_STD = 0.015  # times the share of calls that are not clear
# Per logarithm of a network's latency over the reference's: for every network; and times the share of unclear calls.
BY_LENGTH, UNCLEAR_BY_LENGTH = 0.01, 0.012
LONGEST = 3.0  # the largest of these logarithms: too few longer networks were measured
# If others cut in all the time, networks longer than the reference find empty caches in every call, and no turn shows
# how fast they are otherwise. The slowdown: of all; per logarithm of the weights' GB/s over USUAL_GB_S.
RELOAD, RELOAD_BY_WEIGHTS, USUAL_GB_S = 0.04, 0.04, 2.5
RELOAD_STD = 0.095
LEAST_RATE, MOST_RATE = -1.5, 2.0  # bounds of these logarithms
BUSY_STD = 0.15  # per logarithm of the memory probe over its quiet time: a busy memory costs networks differently
SLOWER_STD, MOST_SLOWER = 0.04, 2.0  # per logarithm of the slowdown of a network's median call; the largest of these
_ROUNDS = 8  # of reweighting
COLD = 0.15  # slowdown of the first call of a network whose turns do not show how it warms up
MEMORY_BY_CORE = 0.55  # slope of the memory probe on the core probe: a shared core slows it too
WARM_CALLS, WARM_MS = 3, 1.0  # caches are warm after both: the call then took 0 to 3 % longer than later ones
SESSION_STD = 0.012  # the reference from one run to the next, beyond what the core probe explains
REACH_STD, REACH_BY_LENGTH = 0.15, 0.15  # of `reach`: for networks like the reference; more per logarithm of length
MEMORY_BY_LENGTH = 0.05  # of the memory slope, per logarithm of a network's length over the reference's
# The same slope per GB/s of weights that are read beyond the core's own cache; and its standard deviation.
MEMORY_BY_RATE, MEMORY_STD_BY_RATE = 0.08, 0.03
OWN_CACHE_MB, MOST_GB_S = 1.0, 12.0
STD_BY_LENGTH = (0.03, 0.1, 0.04)  # of the slopes core, cold and memory, per logarithm of length
LOW_RUN = 0.2  # quantile of earlier runs that counts as the machine at its best: the very least is chance
LEAST_WHOLE = 4  # turns that are needed to learn how a network warms up
FAR = 1 << 20  # calls since the last cut, if there was none


@dataclass(frozen=True, slots=True)
class Slope:
    """Mean and standard deviation of a slope over networks."""

    mean: float
    std: float


class QuietRun(NamedTuple):
    """The record of a run for later runs: the quiet times of the probes, and the reference's latency then."""

    probe_us: float
    reference_ms: float
    memory_us: float = 0.0


@dataclass(frozen=True)
class Conditions:
    """The state of the machine in a run, which `estimate` needs beside a network's own turns.

    Attributes:
        probe_us: Quiet time of the core probe (or of the reference, see `Turn.probe_us`).
        core, memory, cold: The priors of the slopes: the costs of slow moments for the networks of this run.
        memory_us: Quiet time of the memory probe; 0: it was not read.
        noise: Standard deviation of a clear point, in logarithms.
        level: Quiet core probe of this run over that of earlier runs on this host.
        traffic: Logarithm of how much slower the reference was than in earlier runs, beyond `level`.
        traffic_std: Its standard error.
        reference_ms: The reference's latency on the quiet machine; 0: not known.
        cores: The logical cores on which the run was when it ended.
        seat: The same in words, by the machine that timed: which of how many cores, and of which kind.
        throttled: Periods in which a CPU quota stopped the run.
    """

    probe_us: float
    memory_us: float = 0.0
    core: Slope = field(default=Slope(0.9, 0.35))
    memory: Slope = field(default=Slope(0.1, 0.1))
    cold: Slope = field(default=Slope(0.4, 0.4))
    noise: float = 0.03
    level: float = 1.0
    traffic: float = 0.0
    traffic_std: float = 0.0
    reference_ms: float = 0.0
    cores: tuple[int, ...] = ()
    seat: str = ""
    throttled: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a file."""
        return {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conditions:
        """Read what `to_dict` returned; ValueError, KeyError or TypeError for anything else."""
        slopes = {name: Slope(float(data[name]["mean"]), float(data[name]["std"])) for name in _SLOPES}
        numbers = {name: float(data[name]) for name in _NUMBERS}
        positive = [float(data["probe_us"]), numbers["noise"], numbers["level"], *(s.std for s in slopes.values())]
        others = [*numbers.values(), *(slope.mean for slope in slopes.values())]
        if not all(0 < number < math.inf for number in positive) or not all(map(math.isfinite, others)) or min(
                numbers["traffic_std"], numbers["reference_ms"], numbers["memory_us"]) < 0:
            raise ValueError("conditions must be positive and finite")
        if not re.fullmatch(r"[a-z0-9, ]*", seat := data.get("seat", "")):  # another machine's words, for cards
            raise ValueError("seat must be plain words")
        values: dict[str, Any] = {**slopes, **numbers}
        return cls(float(data["probe_us"]), **values, cores=tuple(map(int, data["cores"])), seat=seat,
                   throttled=int(data["throttled"]))


_SLOPES = ("core", "cold", "memory")  # in the order of the columns of `_fit`
_NUMBERS = ("memory_us", "noise", "level", "traffic", "traffic_std", "reference_ms")
DEFAULTS = Conditions(1.0)
NO_TURN = "no turn was timed before the time cap"


@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """The result of `estimate` for a network.

    Attributes:
        quiet: Logarithm of its latency in ms on the quiet machine.
        std: Standard error of that.
        freedom: Degrees of freedom of the standard error.
        quiet_share: Share of the turns in which nearly all calls were clear.
        copies: Logarithms of the latency of each compilation that was timed [k].
    """

    quiet: float
    std: float
    freedom: int
    quiet_share: float
    copies: np.ndarray

    @property
    def half(self) -> float:
        """Half of the 90 % interval of `quiet`."""
        return student_t(0.95, self.freedom) * self.std


def learn_conditions(turns: Mapping[str, Sequence[Turn]], copies: Mapping[str, Sequence[int]], quantile: float, *,
                     reference: str = "", earlier: Sequence[QuietRun] = ()) -> Conditions:
    """Estimate the state of the machine in a run from all of its networks.

    Args:
        turns: The turns of each network by name.
        copies: For each network, the number of the compilation that each of its turns ran.
        quantile: Of the calls of a turn without `first_ms`, as older tables have them.
        reference: The name of the reference among the networks; empty: it is not among them.
        earlier: Runs on this host beside the same reference.
    """
    readings = np.array([reading for of in turns.values() for turn in of for reading in turn.probe_us])
    if not len(readings):
        return DEFAULTS
    probe_us = low_mode(readings)
    best_us = float(np.quantile([run.probe_us for run in earlier], LOW_RUN)) if earlier else probe_us
    # If it is slower than sessions differ, no moment of this run was quiet: the quiet time of earlier runs is taken.
    is_never_quiet = probe_us > SAME_CORE * best_us
    conditions = replace(DEFAULTS, probe_us=best_us) if is_never_quiet else replace(
        DEFAULTS, probe_us=probe_us, level=probe_us / best_us)
    all_turns = [turn for of in turns.values() for turn in of]
    memory_us, earlier_us = quiet_memory_us(all_turns, conditions.probe_us), [
        run.memory_us for run in earlier if run.memory_us]
    best_memory_us = float(np.quantile(earlier_us, LOW_RUN)) if earlier_us else memory_us
    conditions = replace(conditions, memory_us=min(memory_us, best_memory_us))
    # First the noise (from clear points) and a rough latency of the reference, then the slopes, which need both.
    points = {name: _Points.of(of, conditions, copies[name], quantile) for name, of in turns.items() if of}
    conditions = replace(conditions, noise=_noise_of(points.values()))
    if reference in points:
        conditions = replace(conditions, reference_ms=math.exp(float(np.median(points[reference].y))))
    for _ in range(2):  # fit each network, pool the slopes over networks as the new prior, and do both once more
        fits = {name: _fit(each, conditions) for name, each in points.items()}
        slopes, stds = (np.array([getattr(fit, part) for fit in fits.values()]) for part in ("slopes", "slope_stds"))
        conditions = replace(conditions, core=_pool(DEFAULTS.core, conditions.core, slopes[:, 0], stds[:, 0]),
                             cold=_pool(DEFAULTS.cold, conditions.cold, slopes[:, 1], stds[:, 1]))
    return _with_traffic(conditions, fits[reference], earlier) if reference in fits else conditions


def _with_traffic(conditions: Conditions, reference: _Fit, earlier: Sequence[QuietRun]) -> Conditions:
    """Compare the reference with earlier runs. A difference that is usual between runs counts little."""
    # The reference beside the core's quiet time, in this run and in the best earlier ones.
    now_ms = math.exp(reference.quiet)
    conditions = replace(conditions, reference_ms=now_ms / conditions.level)
    if not earlier:
        return conditions
    usual_ratio = np.quantile([run.reference_ms / run.probe_us for run in earlier], LOW_RUN)
    error = math.hypot(reference.std, SESSION_STD)
    slower = math.log(now_ms / (conditions.probe_us * usual_ratio))
    # The share of the difference that counts falls to 0 for differences below its error.
    share = slower**2 / (slower**2 + error**2)
    return replace(conditions, traffic=share * slower, traffic_std=share * error,
                   reference_ms=conditions.reference_ms * math.exp(-share * slower))


def estimate(turns: Sequence[Turn], conditions: Conditions, copies: Sequence[int], quantile: float, *,
             weights_mb: float = 0.0) -> LatencyEstimate:
    """Estimate the latency of a network on the quiet machine from its turns, of which there is at least one.

    Args:
        turns: The turns of the network.
        conditions: The state of the machine in the run.
        copies: The number of the compilation that each turn ran.
        quantile: Of the calls of a turn without `first_ms`, as older tables have them.
        weights_mb: The size of the network's file in megabytes; 0: not known.
    """
    points = _Points.of(turns, conditions, copies, quantile)
    fit = _fit(points, conditions, weights_mb)
    # `shift` is taken off the fitted logarithm: level, traffic, and below the reloading of weights.
    shift = math.log(conditions.level) + conditions.traffic
    log_length = fit.quiet - shift - math.log(conditions.reference_ms) if conditions.reference_ms else 0.0
    length = min(abs(log_length), LONGEST)
    reach_std = abs(conditions.traffic) * (REACH_STD + REACH_BY_LENGTH * length)
    unclear, cut = (float(points.calls[which].sum() / points.calls.sum()) for which in (~points.clear, points.cold > 0))
    by_length = math.hypot(BY_LENGTH, UNCLEAR_BY_LENGTH * unclear) * length
    if weights_mb:  # each call after a cut loads them from memory
        rate = math.log(weights_mb / math.exp(fit.quiet - shift) / USUAL_GB_S)
        reload = RELOAD + RELOAD_BY_WEIGHTS * float(np.clip(rate, LEAST_RATE, MOST_RATE))
        shift += cut**1.5 * float(np.clip(log_length - 0.5, 0, 1)) * reload
    # Errors that the fit cannot show: networks of other lengths react differently to busy moments.
    p50_ms = float(np.median(np.concatenate([turn.samples_ms for turn in turns])))
    slower = float(np.clip(math.log(p50_ms) - fit.quiet + shift, 0, MOST_SLOWER))
    busy = max(float(np.average(points.memory, weights=points.calls)), 0.0)
    by_others = math.hypot(RELOAD_STD * cut, SLOWER_STD * slower, BUSY_STD * busy) * min(length, 1)
    return LatencyEstimate(fit.quiet - shift,
                           math.hypot(fit.std, LEVEL_STD, UNKNOWN_STD * unclear, by_length, by_others,
                                      conditions.traffic_std, reach_std),
                           max(3, len(np.unique(points.turn)) + int(FREEDOM) - 1),
                           float(points.turn_is_quiet.mean()), fit.copies - shift)


def quiet_memory_us(turns: Sequence[Turn], probe_us: float) -> float:
    """Return the memory probe's time on the quiet machine: the median beside clear calls, the lower quartile of all if
    there are fewer than LEAST_WHOLE; 0 if it was not read."""
    logs = np.array([_memory_log(turn, probe_us) for turn in turns if turn.memory_us > 0])
    if not len(logs):
        return 0.0
    clear = logs[logs[:, 1] < CLEAR, 0]
    return float(np.exp(np.median(clear) if len(clear) >= LEAST_WHOLE else np.quantile(logs[:, 0], 0.25)))


def _memory_log(turn: Turn, probe_us: float) -> tuple[float, float]:
    """Return the logarithm of the memory probe's time without the effect of a shared core, and the core's slowdown."""
    core = (math.log(turn.probe_us[0] / probe_us) + math.log(turn.probe_us[-1] / probe_us)) / 2
    return math.log(turn.memory_us) - MEMORY_BY_CORE * core, core


def low_mode(readings: np.ndarray) -> float:
    """Return the centre of the lowest mode of a probe's times: the median of all up to MODE_WIDTH times a low one.

    The low one is the quantile at 2 %, so that one reading that is too low by chance changes nothing.
    """
    low = float(np.quantile(readings, 0.02))
    return float(np.median(readings[readings <= low * MODE_WIDTH]))


@dataclass(frozen=True)
class _Points:
    """The n points of one network's turns, see the module; arrays [n] but for the last."""

    y: np.ndarray  # logarithm of ms
    core: np.ndarray  # c
    cold: np.ndarray  # h
    memory: np.ndarray  # m
    calls: np.ndarray  # number of calls
    copy: np.ndarray  # number of the compilation
    turn: np.ndarray  # index of the turn
    turn_is_quiet: np.ndarray  # [turns]: nearly all calls are clear

    @property
    def clear(self) -> np.ndarray:
        """Return whether each point is of clear calls."""
        return np.asarray((self.core < CLEAR) & (self.cold == 0))

    @classmethod
    def of(cls, turns: Sequence[Turn], conditions: Conditions, copies: Sequence[int], quantile: float) -> _Points:
        rows: list[tuple[float, float, float, float, int, int, int]] = []
        quiet = np.zeros(len(turns), bool)
        warm_calls = calls_to_warm(turns)
        calls_of = [_Calls.of(turn, conditions.probe_us, warm_calls) for turn in turns]
        curve = _warming_curve(turns, calls_of, warm_calls)
        for index, (turn, calls) in enumerate(zip(turns, calls_of, strict=True)):
            busy = 0.0
            if turn.memory_us > 0 and conditions.memory_us > 0:
                busy = _memory_log(turn, conditions.probe_us)[0] - math.log(conditions.memory_us)
            is_slow, is_cut = calls.core >= CLEAR, calls.since < warm_calls
            quiet[index] = bool((~is_slow & ~is_cut).mean() >= QUIET_CALLS)
            # One point for each class: clear, slow, and both after a cut.
            for of_class in (~is_slow & ~is_cut, is_slow & ~is_cut, ~is_slow & is_cut, is_slow & is_cut):
                counted = of_class & calls.counts
                n = int(counted.sum())
                if n:
                    own = np.sort(calls.own[counted])
                    y = float(np.median(own) if turn.first_ms else own[int(quantile * (n - 1))])
                    cold = float(curve[calls.since[counted]].mean()) if is_cut[counted][0] else 0.0
                    rows.append((y, float(calls.core[counted].mean()), cold, busy, n, copies[index], index))
        ys, cores, colds, memories, sizes, copy, of_turn = (np.array(column) for column in zip(*rows, strict=True))
        return cls(ys, cores, colds, memories, sizes, copy, of_turn, quiet)


def calls_to_warm(turns: Sequence[Turn]) -> int:
    """Return how many calls of a network it takes until the caches hold its data."""
    typical_ms = float(np.median([np.median(turn.samples_ms) for turn in turns]))
    least = min(len(turn.samples_ms) for turn in turns)
    return int(np.clip(math.ceil(WARM_MS / typical_ms), WARM_CALLS, max(WARM_CALLS, least // 3)))


class _Calls(NamedTuple):
    """The calls of a turn, arrays [n].

    Attributes:
        own: The logarithm of the time in ms in which the process ran.
        core: The core's slowdown beside the call, in logarithms.
        since: The number of calls since another process cut into the turn (0: into this very call; FAR: never).
        counts: True for calls that count: the caches are warm and, if calls are short, the probe was not read right
            before.
    """

    own: np.ndarray
    core: np.ndarray
    since: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, turn: Turn, probe_us: float, warm_calls: int) -> _Calls:
        own, n = np.log(turn.own_ms()), len(turn.samples_ms)
        logs = np.log(np.array(turn.probe_us) / probe_us)
        if not turn.first_ms or len(logs) < 2:
            return cls(own, np.full(n, logs.mean()), np.full(n, FAR), np.ones(n, bool))
        step, index = turn.calls_in_group, np.arange(n)
        # A call is slow if one of its two readings is slow. Its slowdown is their mean; at least CLEAR for a slow call.
        slower, mean = np.maximum(logs[:-1], logs[1:]), (logs[:-1] + logs[1:]) / 2
        core = np.repeat(np.where((slower >= CLEAR) & (mean < CLEAR), CLEAR, mean), step)[:n]
        # A cut counts from the group that lost time: nobody knows which of its calls was interrupted.
        since, ago = np.full(n, FAR), FAR
        for group, lost in enumerate(turn.lost_ms):
            for call in range(group * step, min((group + 1) * step, n)):
                ago = 0 if lost > 0 else min(ago + 1, FAR)
                since[call] = ago
        counts = index >= min(warm_calls - 1, n - 1)  # `first_ms` was one more
        if step > 1:  # the first call of a group follows a reading of the probe
            counts &= (index % step > 0) | (index == n - 1)
        return cls(own, core, since, counts)


def _warming_curve(turns: Sequence[Turn], calls_of: Sequence[_Calls], warm_calls: int) -> np.ndarray:
    """Return the slowdown of the first calls with empty caches [warm_calls], in logarithms, never below 0.

    It is learnt from turns without a cut whose calls were all clear or all slow.
    """
    ratios = []
    for turn, calls in zip(turns, calls_of, strict=True):
        if turn.first_ms and calls.since.min() == FAR and len(np.unique(calls.core >= CLEAR)) == 1 and (
                len(calls.own) >= warm_calls):
            warm = float(np.median(calls.own[calls.counts]))
            ratios.append([math.log(turn.first_ms) - warm, *(calls.own[: warm_calls - 1] - warm)])
    if len(ratios) < LEAST_WHOLE:
        return COLD * np.exp2(-np.arange(warm_calls))
    return np.asarray(np.maximum(np.median(ratios, axis=0), 0.0))


@dataclass(frozen=True, slots=True)
class _Fit:
    quiet: float
    std: float
    copies: np.ndarray
    slopes: np.ndarray
    slope_stds: np.ndarray


def _fit(points: _Points, conditions: Conditions, weights_mb: float = 0.0) -> _Fit:
    """Fit the model to one network's points: Bayesian linear regression, reweighted for Student's noise."""
    # Columns: `quiet`, one for each compilation, and the three slopes. `quiet` has no prior (precision 0).
    names, copy_index = np.unique(points.copy, return_inverse=True)
    columns = np.column_stack([points.core, points.cold, points.memory])  # as _SLOPES names them
    design = np.column_stack([np.ones(len(points.y)), np.eye(len(names))[copy_index], columns])
    priors = _priors_of(points, conditions, weights_mb)
    mean = np.array([0.0] * (1 + len(names)) + [slope.mean for slope in priors])
    # One compilation cannot show how compilations differ: its own value is kept at 0, and COPY_STD added at the end.
    is_alone = len(names) == 1
    copy_std = COPY_STD if not is_alone else COPY_STD * 1e-3
    precision = np.diag([0.0] + [1 / copy_std**2] * len(names) + [1 / slope.std**2 for slope in priors])
    slow = np.where(points.core < CLEAR, 0.0, points.core)
    own_variance = np.asarray((SLOW_STD * slow) ** 2 + (CUT_STD * points.cold) ** 2)
    variance = conditions.noise**2 * (1 + 1 / points.calls) + own_variance
    # Each round weights the points by their residuals: an outlier of Student's noise counts less.
    weights = np.ones(len(points.y))
    for _ in range(_ROUNDS):
        scaled = design * (weights / variance)[:, None]
        information = design.T @ scaled + precision
        solved = np.linalg.solve(information, scaled.T @ points.y + precision @ mean)
        squares = (points.y - design @ solved) ** 2 / variance
        weights = (FREEDOM + 1) / (FREEDOM + squares)
    # `size` is the variance of the noise over the expected one, with a prior of FREEDOM points at 1.
    size = (FREEDOM + float((weights * squares).sum())) / (FREEDOM + len(points.y))
    posterior = np.linalg.inv(information) * max(size, 0.25)
    stds = np.sqrt(np.diag(posterior))
    copies = solved[0] + solved[1 : 1 + len(names)]
    return _Fit(float(solved[0]), math.hypot(stds[0], COPY_STD * is_alone), copies, solved[1 + len(names):],
                stds[1 + len(names):])


def _priors_of(points: _Points, conditions: Conditions, weights_mb: float) -> list[Slope]:
    """Return the priors of a network's slopes, in the order of _SLOPES.

    The more its length differs from the reference's, the wider they are, and the higher is the memory slope. This slope
    is also higher for a network that reads many weights which its core's own cache cannot hold.
    """
    typical = float(np.median(points.y))
    length = abs(typical - math.log(conditions.reference_ms)) if conditions.reference_ms else 0.0
    rate = min(max(weights_mb - OWN_CACHE_MB, 0.0) / math.exp(typical), MOST_GB_S)
    core, cold, memory = (getattr(conditions, name) for name in _SLOPES)
    memory = Slope(memory.mean + MEMORY_BY_LENGTH * length + MEMORY_BY_RATE * rate,
                   math.hypot(memory.std, MEMORY_STD_BY_RATE * rate))
    return [Slope(slope.mean, math.hypot(slope.std, length * by))
            for slope, by in zip((core, cold, memory), STD_BY_LENGTH, strict=True)]


def _noise_of(every: Iterable[_Points]) -> float:
    """Return the standard deviation of clear points about their network's copies, over all networks of a run."""
    logs = []
    for points in every:
        for copy in np.unique(points.copy):
            mine = points.y[points.clear & (points.copy == copy)] - points.core[points.clear & (points.copy == copy)]
            if len(mine) > 1:
                logs.append((mine - np.median(mine)) * math.sqrt(len(mine) / (len(mine) - 1)))
    if sum(map(len, logs)) < 8:
        return DEFAULTS.noise
    return float(np.clip(1.4826 * np.median(np.abs(np.concatenate(logs))), LEAST_NOISE, MOST_NOISE))


def _pool(prior: Slope, held: Slope, means: np.ndarray, stds: np.ndarray) -> Slope:
    """Return a slope over networks, from the networks whose turns determine it and a prior that counts as three."""
    determined = stds < 0.7 * held.std
    n = int(determined.sum())
    if n < 3:
        return prior
    weights = 1 / (stds[determined] ** 2 + 0.02)
    mean = float((weights * means[determined]).sum() / weights.sum())
    variance = max(0.1**2, float(np.var(means[determined]) - np.mean(stds[determined] ** 2)))
    return Slope((n * mean + 3 * prior.mean) / (n + 3), math.sqrt((n * variance + 3 * prior.std**2) / (n + 3)))
