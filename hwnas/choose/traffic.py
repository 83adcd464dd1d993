"""Traffic: queries a second that a service must answer, as a rate or as the record of a day."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.cli.options import option
from hwnas.errors import ConfigError, DataError
from hwnas.system.tables import read_cells

COLUMNS = ("time", "queries_per_s")
_LONGEST_S = 8 * 86_400


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """Section `traffic`: `rate` or `file`. Queries come independently of each other (Poisson)."""

    rate: float | None = option(None, above=0, high=1e9)
    file: str | None = option(None)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Queries a second at the peak, by which machines are counted, and in the mean, by which an image costs."""

    peak: float
    mean: float

    @classmethod
    def of(cls, options: TrafficOptions) -> Traffic:
        """ConfigError where neither or both of rate and file are given; DataError where the file holds no day."""
        if (options.rate is None) == (options.file is None):
            raise ConfigError("how many queries a second? Add traffic.rate=N, or traffic.file=DAY.csv with columns "
                              f"{','.join(COLUMNS)}.")
        if options.rate is not None:
            return cls(options.rate, options.rate)
        rates = read_day(Path(str(options.file)))
        return cls(float(rates.max()), float(rates.mean()))


def read_day(path: Path) -> NDArray[np.float64]:
    """Queries a second in the equal steps of a CSV with columns `time` (seconds, or ISO dates) and `queries_per_s`.

    DataError names the line of a hole, of a time that does not rise, of a rate below 0, and a record that is longer
    than eight days.
    """
    cells = read_cells(path, COLUMNS, f"a CSV with columns {','.join(COLUMNS)}")
    rates: NDArray[np.float64] = pd.to_numeric(pd.Series(cells["queries_per_s"]), errors="coerce").to_numpy(float)
    texts = pd.Series(cells["time"]).astype(str)
    times = pd.to_numeric(texts, errors="coerce")
    if times.isna().all():
        dates = pd.to_datetime(texts, errors="coerce", utc=True, format="ISO8601")
        times = (dates - dates.iloc[0]).dt.total_seconds() if len(dates) else times
    seconds = times.to_numpy(float)
    for fault, lines in (("no time is read there", ~np.isfinite(seconds)), ("times are of 0 at least", seconds < 0),
                         ("no number is read there", ~np.isfinite(rates)), ("rates are of 0 at least", rates < 0)):
        if lines.any():
            raise DataError(f"{path}, line {int(np.argmax(lines)) + 2}: {fault}. Mend it.")
    steps = np.diff(seconds)
    if len(steps) < 1:
        raise DataError(f"{path} has {len(seconds)} lines of traffic. Give the record of a day, two lines at least.")
    wrong = (steps <= 0) | (np.abs(steps - np.median(steps)) > 0.01 * np.median(steps))
    if wrong.any():
        line = int(np.argmax(wrong)) + 3
        raise DataError(f"{path}, line {line}: {steps[line - 3]:g} s after the line before, where others are "
                        f"{np.median(steps):g} s apart. Give a line for each step, 0 where nothing came.")
    if seconds[-1] - seconds[0] > _LONGEST_S:
        raise DataError(f"{path} covers {(seconds[-1] - seconds[0]) / 86_400:.0f} days. Give a day, or a week.")
    if not rates.max() > 0:
        raise DataError(f"{path}: no query comes in it. Give a day with traffic.")
    return rates
