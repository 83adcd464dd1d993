"""Measurements: raw samples of one network, with the protocol that took them.

Statistics are computed when a file is read; they are never stored instead of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hwnas.cli.options import option, read_options
from hwnas.errors import TableError
from hwnas.latency.quiet import NO_TURN, Conditions, LatencyEstimate, estimate
from hwnas.latency.turn import Turn, positive_ms, turns_from_dict, turns_to_dict
from hwnas.system.documents import WRONG

P90_SAMPLES, P99_SAMPLES = 64, 662  # MLPerf LoadGen's least sample counts for a percentile
PAUSE_S = 0.02  # as between the frames of a camera
WIDEST = 0.25  # half-width of the 90 % interval, as a share of the latency, beyond which a network is INVALID
_GONE = ("drift", "run_drift", "steal")  # options of protocols that threw disturbed turns away


@dataclass(frozen=True)
class Protocol:
    """The rules by which latency is timed.

    A round gives every candidate a turn, in a new random order, `block` at a time. A fixed reference network has a turn
    before each block. A turn makes calls for about `round_ms` (between `min_calls` and `max_calls`), with probes beside
    them (`hwnas.latency.probes`). `quantile` is for turns of older tables, which counted as this quantile of the calls.

    A candidate is done after `min_rounds` turns if the half-width of its 90 % interval is at most `half_width`. It is
    done at the latest after `max_rounds` undisturbed turns; all end after `max_seconds`. Then each makes `paused_calls`
    calls with a pause of PAUSE_S before each: networks that are called now and then are slower than back to back.
    """

    warmup_calls: int = 10
    round_ms: float = 5.0
    min_calls: int = 4
    max_calls: int = 64
    quantile: float = option(0.25, low=0, high=1)
    copies: int = option(4, low=1)
    min_rounds: int = option(12, low=1)
    max_rounds: int = 24
    half_width: float = 0.02
    block: int = 6
    max_seconds: float = 60.0
    paused_calls: int = option(0, low=0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for tables and reports."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Protocol:
        """Read what `to_dict` returned; ConfigError for a value of another type, UnknownName for another key."""
        return read_options(cls, {key: value for key, value in data.items() if key not in _GONE}, "protocol")


@dataclass(frozen=True)
class Measurement:
    """All turns of one network in one run, and the state of the machine in it.

    Turn i is of copy i mod `protocol.copies`. `latency_ms` is the latency on the quiet machine, by the model of
    `hwnas.latency.quiet`: the mean over the copies; `latency_ms_low`/`_high` bound it with 90 % confidence.

    Attributes:
        turns: In the order in which they were timed.
        quiet_ms: Latency of the reference network on the quiet machine, in the same run. Runs are compared by it.
        protocol: The rules by which they were timed.
        conditions: The state of the machine; None if only the reference beside each turn shows it, as in older tables.
        paused_ms: The times of calls after a pause of PAUSE_S.
        weights_mb: Size of the file that was timed; 0: not known.
    """

    turns: tuple[Turn, ...]
    quiet_ms: float
    protocol: Protocol
    conditions: Conditions | None = None
    paused_ms: tuple[float, ...] = ()
    weights_mb: float = 0.0

    @cached_property
    def _usable(self) -> dict[int, Turn]:
        """The turns that no GPU's heat or power supply slowed, by their place among all turns."""
        return {place: turn for place, turn in enumerate(self.turns) if not turn.slowed}

    @cached_property
    def estimate(self) -> LatencyEstimate | None:
        """The estimate from the turns; None if no turn counts."""
        if not self._usable:
            return None
        conditions = self.conditions or Conditions(1e3 * self.quiet_ms)
        return estimate([*self._usable.values()], conditions, [place % self.protocol.copies for place in self._usable],
                        self.protocol.quantile, weights_mb=self.weights_mb)

    def at_ms(self, quiet_ms: float) -> float:
        """Return `latency_ms` at the speed at which the reference takes `quiet_ms`: runs differ least in the ratio to
        the reference."""
        return self.latency_ms * quiet_ms / self.quiet_ms

    @property
    def reason(self) -> str:
        """The reason why it is INVALID; empty if it is valid."""
        if not self.turns:
            return NO_TURN
        if self.estimate is None:
            return f"heat or the power supply held the GPU down in all {len(self.turns)} turns"
        if self._half > WIDEST:
            return (f"its latency is known to ± {self._half:.0%} only: {self.estimate.quiet_share:.0%} of "
                    f"{len(self.turns)} turns were undisturbed, and networks ran {self.slowdown:.1f} times slower at "
                    "the median")
        return ""

    @property
    def valid(self) -> bool:
        """Return whether the latency is known well enough for a number."""
        return not self.reason

    @property
    def latency_ms(self) -> float:
        """The estimate; NaN if it is INVALID."""
        return math.exp(self.estimate.quiet) if self.estimate and self.valid else math.nan

    @property
    def copy_spread(self) -> float:
        """Standard deviation from one copy to the next, as a share of the latency; NaN with fewer than two copies."""
        if self.estimate is None or not self.valid or len(self.estimate.copies) < 2:
            return math.nan
        return float(np.exp(self.estimate.copies).std(ddof=1) / self.latency_ms)

    @property
    def _half(self) -> float:
        """Half of the 90 % interval, in logarithms."""
        return self.estimate.half if self.estimate else math.inf

    @property
    def latency_ms_low(self) -> float:
        """Lower end of the 90 % interval."""
        return self.latency_ms * math.exp(-self._half)

    @property
    def latency_ms_high(self) -> float:
        """Upper end of the 90 % interval."""
        return self.latency_ms * math.exp(self._half)

    @property
    def half_width(self) -> float:
        """Half of the 90 % interval, as a share of the estimate."""
        return math.sinh(self._half) if self.valid else math.inf

    @property
    def quiet_share(self) -> float:
        """Share of the turns that nothing disturbed; 0 if there is none."""
        return self.estimate.quiet_share if self.estimate else 0.0

    @property
    def slowdown(self) -> float:
        """The time of a call over that on the quiet machine, at the median of all calls; NaN: no turn."""
        p50_ms = self.percentile_ms(0.5)
        return p50_ms / math.exp(self.estimate.quiet) if self.estimate and p50_ms else math.nan

    @property
    def pause_factor(self) -> float | None:
        """The time of a call after a pause over that of calls back to back, at the medians; None: not timed."""
        p50_ms = self.percentile_ms(0.5)
        return float(np.median(self.paused_ms)) / p50_ms if self.paused_ms and p50_ms else None

    @property
    def converged(self) -> bool:
        """Return whether no more turns are needed: the interval is narrow enough, or all rounds are spent."""
        n, clear = len(self._usable), self.quiet_share * len(self._usable)
        return n >= self.protocol.min_rounds and (
            self.half_width <= self.protocol.half_width or clear >= self.protocol.max_rounds)

    def percentile_ms(self, q: float) -> float | None:
        """Return a quantile (p50, p90, p99) over every call, as the machine was; None if there are too few samples."""
        calls = [ms for turn in self.turns for ms in turn.samples_ms]
        needed = P99_SAMPLES if q > 0.9 else P90_SAMPLES if q > 0.5 else 1
        return float(np.quantile(calls, q)) if len(calls) >= needed else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a table; times in microseconds with two decimals, because some networks take ten."""
        return {"quiet_us": round(self.quiet_ms * 1e3, 2),
                **({"conditions": self.conditions.to_dict()} if self.conditions else {}), **turns_to_dict(self.turns),
                **({"weights_mb": round(self.weights_mb, 3)} if self.weights_mb else {}),
                **({"paused_us": [round(ms * 1e3, 2) for ms in self.paused_ms]} if self.paused_ms else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], protocol: Protocol, where: str) -> Measurement:
        """Read what `to_dict` returned; TableError, which names the place, for negative, zero or missing times."""
        try:
            conditions = Conditions.from_dict(data["conditions"]) if "conditions" in data else None
            paused_ms = positive_ms(data["paused_us"]) if "paused_us" in data else ()
            weights_mb = float(data.get("weights_mb", 0))
            if not 0 <= weights_mb < math.inf:
                raise ValueError("weights_mb must be positive")
            return cls(turns_from_dict(data), positive_ms([data["quiet_us"]])[0], protocol, conditions, paused_ms,
                       weights_mb)
        except WRONG as error:
            raise TableError(f"{where}: {error or 'times are missing'}") from None


IN_USE = 1.05  # times slower at the median: from there on a line says that the machine was in use
LEVEL = 1.03  # times slower in a run's quietest moments than in the best on this host: from there on a line says so


def describe_machine(measurements: Iterable[Measurement]) -> str:
    """Describe the machine while networks were timed, in some sentences; empty if none was timed."""
    timed = [each for each in measurements if each.turns]
    if not timed:
        return ""
    slower = float(np.median([each.slowdown for each in timed]))
    halves = [each.half_width for each in timed if each.valid]
    width = f", ± {np.median(halves):.1%}" if halves else ""
    sentences = [f"The machine was quiet{width}."]
    if slower >= IN_USE:
        sentences = [f"The machine was in use (networks ran {slower:.2g} times slower at the median); latencies are "
                     f"those of the quiet machine{width}."]
    conditions = [each.conditions for each in timed if each.conditions]
    if conditions and (level := max(each.level for each in conditions)) >= LEVEL:
        sentences.append(f"At its quietest its core was {level - 1:.0%} slower than the best seen on this host.")
    if conditions and (throttled := max(each.throttled for each in conditions)):
        sentences.append(f"A CPU quota stopped the run in {throttled} periods, which count in no latency.")
    if conditions and conditions[0].seat:
        sentences.append(f"Timed on {conditions[0].seat}.")
    return " ".join(sentences)


def robust_error(values: np.ndarray) -> float:
    """Return the standard error of a median, from the median absolute deviation (normal factors 1.4826 and 1.2533);
    infinite for fewer than two values."""
    if len(values) < 2:
        return float("inf")
    deviation = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * deviation / float(np.sqrt(len(values)))
