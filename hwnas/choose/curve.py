"""Load curves: p99 of a deployment by load, as LoadGen measured it and on lines between the measured loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hwnas.choose.load import LoadFigures
from hwnas.errors import StudyError
from hwnas.system.documents import Document

_RUN = {"rate": float, "served": float, "p50_ms": float, "p90_ms": float, "p99_ms": float, "valid": bool, "reason": str}


def _check_whole(data: Mapping[str, Any]) -> None:
    """Raise ValueError if parts are missing or runs are not in order."""
    if len(data["saturation"]) != 2 or min(data["saturation"], default=0) <= 0:
        raise ValueError("saturation must be two numbers above 0")
    rates = [run["rate"] for run in data["runs"]]
    if not rates or rates != sorted(rates) or any(run.keys() != _RUN.keys() for run in data["runs"]):
        raise ValueError("runs must be some, by rising rate")


CURVE = Document("hwnas-load", 2, "a load curve", "Remove it: hwnas choose measures it again.", StudyError, shape={
    "id": str, "target": str, "host": str, "runtime": str, "file": str, "streams": int, "batch": int, "fault": str,
    "seconds": float, "measured_at": str, "saturation": [float], "runs": [_RUN]}, rule=_check_whole)


@dataclass(frozen=True)
class LoadCurve:
    """A deployment of a network under load.

    Attributes:
        streams, batch: Calls at a time, and images of a call at most.
        saturation: Queries a second that it answers at most, before the runs and after them.
        runs: LoadGen's, by rising rate. The first load is so low that calls come after pauses, as at lower loads.
        fault: The reason why the saturation cannot be used; empty if it can.
    """

    streams: int
    batch: int
    saturation: tuple[float, float]
    runs: tuple[LoadFigures, ...]
    fault: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadCurve:
        """Return the content of a document of CURVE."""
        before, after = data["saturation"]
        return cls(data["streams"], data["batch"], (before, after), tuple(LoadFigures(**run) for run in data["runs"]),
                   data["fault"])

    @property
    def most(self) -> float:
        """The queries a second at saturation, the mean of both measurements."""
        return sum(self.saturation) / 2

    @property
    def drift(self) -> float:
        """The relative difference of the saturations before and after the runs: how restless the machine is."""
        return abs(self.saturation[0] - self.saturation[1]) / self.most

    @property
    def invalid(self) -> str:
        """The reason why the curve cannot be used; empty if LoadGen called all runs VALID."""
        return self.fault or next((f"at {run.rate:.0f} queries/s: {run.reason}" for run in self.runs
                                   if not run.valid), "")

    def p99_ms(self, rate: float) -> float:
        """Return p99 at `rate` queries a second: as measured there, or on a line between the two runs around it.

        The line is straight in the logarithm of p99. Below the first run, p99 is that of the first run. Above the last
        one it is infinite, as nothing was measured there.
        """
        rates, p99_ms = [run.rate for run in self.runs], [run.p99_ms for run in self.runs]
        return float("inf") if rate > rates[-1] else float(np.exp(np.interp(rate, rates, np.log(p99_ms))))

    def told_by(self, rate: float) -> str:
        """Return the source of p99 at `rate`: a run of LoadGen there, a line between two, or the lowest run."""
        rates = [run.rate for run in self.runs]
        if any(abs(each - rate) <= 1e-6 * rate for each in rates):
            return "measured"
        return "interpolated between measured loads" if rate > rates[0] else "measured at a higher load"

    def capacity(self, p99_ms: float) -> float:
        """Return the most queries a second at which p99 stays within `p99_ms`; 0 if it does at no load."""
        rates, values = [run.rate for run in self.runs], [run.p99_ms for run in self.runs]
        within = [index for index, value in enumerate(values) if value <= p99_ms]
        if not within:
            return 0.0
        last = within[-1]  # p99 may also fall with the load, so the highest load within the limit counts
        if last == len(rates) - 1:
            return rates[-1]
        logs = np.log(values[last : last + 2])
        return float(np.interp(np.log(p99_ms), logs, rates[last : last + 2]))


def add_curves(fast: LoadCurve, accurate: LoadCurve, share: float) -> LoadCurve:
    """Return the computed curve of a machine that serves a pair, of whose queries a `share` goes on to `accurate`.

    A query occupies the machine for its mean time. Its p99 is the worst case: the sum of both networks' p99, each at
    the same share of its saturation.
    """
    def rate(first: float, second: float) -> float:  # queries a second of both networks together
        return 1 / (1 / first + share / second)

    runs = [LoadFigures(rate(quick.rate, slow.rate), rate(quick.served, slow.served), quick.p50_ms + slow.p50_ms,
                        quick.p90_ms + slow.p90_ms, quick.p99_ms + slow.p99_ms, quick.valid and slow.valid)
            for quick, slow in zip(fast.runs, accurate.runs, strict=False)]
    before, after = (rate(*ends) for ends in zip(fast.saturation, accurate.saturation, strict=True))
    return LoadCurve(fast.streams, fast.batch, (before, after), tuple(runs))
