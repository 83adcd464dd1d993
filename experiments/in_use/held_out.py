"""What is taken off for emptied caches, and the widths, fitted to three deployments and judged by the fourth.

    python -m experiments.in_use.held_out

Reads rows.csv, writes held_out.csv: the control of the constants in hwnas/latency/quiet.py, which were fitted to all.
`covers`: intervals of the fitted widths; `covers_as_coded`: of those in quiet.py, which are wider.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import t as student

from experiments.common import arguments_of, command, table_lines
from hwnas.latency import quiet

HERE = Path(__file__).parent
START = (quiet.RELOAD, quiet.RELOAD_BY_WEIGHTS, *np.log([quiet.BY_LENGTH, quiet.UNCLEAR_BY_LENGTH, quiet.RELOAD_STD,
                                                         quiet.SLOWER_STD]))
Values = NDArray[np.float64]


def errors_and_stds(rows: pd.DataFrame, constants: Values) -> tuple[Values, Values]:
    """Return errors and standard deviations in logarithms, as `quiet.estimate` makes them with these constants."""
    reload, by_weights, *stds = constants
    by_length, unclear_by_length, reload_std, slower_std = np.exp(stds)
    rate = np.log(rows.weights_mb / np.exp(rows.plain) / quiet.USUAL_GB_S).clip(quiet.LEAST_RATE, quiet.MOST_RATE)
    shift = rows.cut**1.5 * (rows.longer - 0.5).clip(0, 1) * (reload + by_weights * rate)
    length = rows.longer.abs().clip(upper=quiet.LONGEST)
    slower = (np.log(rows.p50_ms) - rows.plain + shift).clip(0, quiet.MOST_SLOWER)
    others = np.hypot(reload_std * rows.cut, slower_std * slower) * length.clip(upper=1)
    std = np.sqrt(rows.base_std**2 + (np.hypot(by_length, unclear_by_length * rows.unclear) * length) ** 2 + others**2)
    return np.asarray(rows.plain - shift - np.log(rows.truth_ms)), np.asarray(std)


def fit_constants(rows: pd.DataFrame) -> Values:
    """Return the constants of greatest likelihood."""
    def loss(constants: Values) -> float:
        error, std = errors_and_stds(rows, constants)
        std = np.hypot(std, rows.truth_error)
        return -float((student.logpdf(error / std, 6) - np.log(std)).sum())

    return np.asarray(minimize(loss, START, method="Nelder-Mead", options={"maxiter": 8000, "maxfev": 8000}).x)


def main() -> None:
    arguments_of(None, (), __doc__)
    rows = pd.read_csv(HERE / "rows.csv")
    parts = []
    for deployment in rows.deployment.unique():
        held = rows.deployment == deployment
        fitted = fit_constants(rows[~held])
        error, std = errors_and_stds(rows[held], fitted)
        _, coded_std = errors_and_stds(rows[held], np.array([*fitted[:2], *START[2:]]))
        half, coded = (student.ppf(0.95, rows[held].freedom) * each for each in (std, coded_std))
        parts.append(rows.loc[held, ["host", "state", "kind"]].assign(
            error=np.abs(error), covers=np.abs(error) <= half, coded=np.abs(error) <= coded, half=coded))
    table = pd.concat(parts).sort_values("host", kind="stable").groupby(
        ["host", "state", "kind"], sort=False).agg(
        n=("error", "size"), median_error=("error", "median"), covers=("covers", "mean"),
        covers_as_coded=("coded", "mean"), half_width_as_coded=("half", "median")).round(4).reset_index()
    table.to_csv(HERE / "held_out.csv", index=False)
    print("\n".join(table_lines([list(table.columns), *table.astype(str).values.tolist()], words=(0, 1, 2))))


if __name__ == "__main__":
    command(main)
