"""Load curves: what p99 a deployment keeps at a load, by measured runs and by simulation between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwnas.choose.load import Offered
from hwnas.choose.simulation import QUERIES, simulate
from hwnas.errors import StudyError
from hwnas.system.documents import Document

_RUN = {"rate": float, "served": float, "p50_ms": float, "p90_ms": float, "p99_ms": float, "valid": bool, "reason": str,
        "calls_s": {"*": [float]}}


def _check_whole(data: Mapping[str, Any]) -> None:
    """ValueError where parts are missing that a simulation needs."""
    busy = {str(number) for number in range(1, data["streams"] + 1)}
    if len(data["saturation"]) != 2 or min(data["saturation"], default=0) <= 0:
        raise ValueError("saturation must be two numbers above 0")
    if not all(data["calls_s"].get(each) for each in busy):
        raise ValueError("calls_s must have calls for every number of streams")
    rates = [run["rate"] for run in data["runs"]]
    if not rates or rates != sorted(rates) or any(run.keys() != _RUN.keys() for run in data["runs"]):
        raise ValueError("runs must be some, by rising rate")


CURVE = Document("hwnas-load", 1, "a load curve", "Remove it: hwnas choose measures it again.", StudyError, shape={
    "id": str, "target": str, "host": str, "runtime": str, "file": str, "streams": int, "batch": int, "fault": str,
    "seconds": float, "measured_at": str, "saturation": [float], "calls_s": {"*": [float]}, "runs": [_RUN]},
    rule=_check_whole)
_FEW = 50  # measured calls, under which those at saturation stand in
LEAST, _POINTS = 0.02, 20  # of saturation: next to no load; rates up to saturation at which p99 is simulated
_NEARLY = 0.97  # of saturation: beyond it a queue grows without end


@dataclass(frozen=True)
class LoadCurve:
    """One deployment of a network under load.

    `saturation`: queries a second that it answers at most, before the runs and after them; `fault`: why these are no
    numbers. `runs`: LoadGen's, by rising rate. `calls_s`: seconds of calls at saturation, by how many streams were
    busy.
    """

    streams: int
    batch: int
    saturation: tuple[float, float]
    calls_s: Mapping[int, Sequence[float]]
    runs: tuple[Offered, ...]
    fault: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadCurve:
        """The content of a document of CURVE."""
        runs = tuple(Offered(**{**run, "calls_s": _by_busy(run["calls_s"])}) for run in data["runs"])
        before, after = data["saturation"]
        return cls(data["streams"], data["batch"], (before, after), _by_busy(data["calls_s"]), runs,
                   data["fault"])

    @property
    def most(self) -> float:
        """Queries a second at saturation, the mean of both measurements."""
        return sum(self.saturation) / 2

    @property
    def drift(self) -> float:
        """By what share saturation differed before and after the runs: what the machine's restlessness is worth."""
        return abs(self.saturation[0] - self.saturation[1]) / self.most

    @property
    def invalid(self) -> str:
        """Why the curve cannot be used; empty where LoadGen called all runs VALID."""
        return self.fault or next((f"at {run.rate:.0f} queries/s: {run.reason}" for run in self.runs
                                   if not run.valid), "")

    def p99_ms(self, rate: float, gaps: NDArray[np.float64] | None = None) -> float:
        """p99 at `rate` queries a second: as measured where a run was at that rate, otherwise simulated.

        The simulation takes the calls of the two runs around the rate, and is stretched as those two were beside what
        LoadGen measured of them. `gaps` are the times between arrivals at a rate of 1, Poisson's where None. Infinite
        beyond saturation.
        """
        if rate >= _NEARLY * self.most:
            return float("inf")
        rates = [run.rate for run in self.runs]
        above = int(np.clip(np.searchsorted(rates, rate), 1, len(rates) - 1)) if len(rates) > 1 else 0
        pair = sorted({max(0, above - 1), above})
        logs = [np.log(self._simulated(self.runs[each], rate, gaps) * self._stretch(self.runs[each])) for each in pair]
        at = float(np.clip(rate, rates[pair[0]], rates[pair[-1]]))
        return float(np.exp(np.interp(at, [rates[each] for each in pair], logs)))

    def told_by(self, rate: float, gaps: NDArray[np.float64] | None = None) -> str:
        """Where p99 at `rate` comes from: a run of LoadGen there, a simulation between two, or one outside of them."""
        rates = [run.rate for run in self.runs]
        if gaps is None and any(abs(each - rate) <= 1e-6 * rate for each in rates):
            return "measured"
        if rates[0] <= rate <= rates[-1]:
            return "simulated between measured loads"
        return f"simulated {'below' if rate < rates[0] else 'above'} the measured loads"

    def capacity(self, p99_ms: float, gaps: NDArray[np.float64] | None = None) -> float:
        """The most queries a second up to which p99 stays within `p99_ms`; 0 where it does at no load."""
        rates, values = self._rising(gaps)
        over = np.flatnonzero(values > p99_ms)
        if len(over) == 0:
            return float(rates[-1])
        if over[0] == 0:
            return 0.0
        two = slice(over[0] - 1, over[0] + 1)
        return float(np.interp(np.log(p99_ms), np.log(values[two]), rates[two]))

    def _rising(self, gaps: NDArray[np.float64] | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """p99 at some rates from next to nothing to saturation, each simulated once."""
        kind = "poisson" if gaps is None else "given"  # a command knows one kind of arrivals
        if kind not in self._grids:
            rates = np.linspace(LEAST, _NEARLY - 0.001, _POINTS) * self.most
            self._grids[kind] = rates, np.array([self.p99_ms(rate, gaps) for rate in rates])
        return self._grids[kind]

    def _simulated(self, run: Offered, rate: float, gaps: NDArray[np.float64] | None) -> float:
        arrivals = np.cumsum(self._gaps if gaps is None else gaps) / rate
        calls = self._calls(run)
        rng = np.random.default_rng(0)
        took = simulate(arrivals, calls, self.streams, self.batch, self._overhead_s(run), rng)
        return float(np.quantile(took, 0.99)) * 1e3

    def _stretch(self, run: Offered) -> float:
        """LoadGen's p99 of a run beside the simulated one: what stalls the machine between calls, too."""
        known = self._stretches.get(run.rate)
        if known is None:
            known = self._stretches[run.rate] = run.p99_ms / self._simulated(run, run.rate, None)
        return known

    def _calls(self, run: Offered) -> dict[int, Sequence[float]]:
        return {busy: calls if len(calls := run.calls_s.get(busy, ())) >= _FEW else self.calls_s[busy]
                for busy in range(1, self.streams + 1)}

    def _overhead_s(self, run: Offered) -> float:
        """What a query takes beside waiting and its call: what the run's median has more than a simulation's."""
        known = self._overheads.get(run.rate)
        if known is None:
            arrivals = np.cumsum(self._gaps) / run.rate
            took = simulate(arrivals, self._calls(run), self.streams, self.batch, 0.0, np.random.default_rng(0))
            known = self._overheads[run.rate] = max(0.0, run.p50_ms / 1e3 - float(np.median(took)))
        return known

    @cached_property
    def _grids(self) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        return {}

    @cached_property
    def _overheads(self) -> dict[float, float]:
        return {}

    @cached_property
    def _stretches(self) -> dict[float, float]:
        return {}

    @cached_property
    def _gaps(self) -> NDArray[np.float64]:
        return np.random.default_rng(0).exponential(1.0, QUERIES)


def _by_busy(data: Mapping[Any, Sequence[float]]) -> dict[int, Sequence[float]]:
    return {int(busy): calls for busy, calls in data.items()}
