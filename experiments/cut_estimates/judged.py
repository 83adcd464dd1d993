"""How well each estimate of `run` ranks cuts, from its networks.csv."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwnas.stats import LEVEL, kendall_tau, log_odds, percentiles

Array = NDArray[np.float64]
ORDER = ("inherited", "whole_first", "shared", "probe", "additive")
RESAMPLES = 2000
MANY = 40  # networks that a search of minutes tries


def judged(folder: Path) -> dict[str, list[float]]:
    """Of each arm: tau given latency with its interval, the interval of its difference from the default's, plain tau,
    CPU seconds of a network, of the setup, and of both for MANY networks."""
    rows = pd.read_csv(folder / "networks.csv").dropna(subset="top1_test")
    wide = rows.pivot(index="id", columns="arm", values="estimate").dropna()
    facts = rows.drop_duplicates("id").set_index("id").loc[wide.index]
    every = np.vstack([np.arange(len(wide)), np.random.default_rng(0).integers(0, len(wide), (RESAMPLES, len(wide)))])
    truth, cost = log_odds(facts["top1_test"].to_numpy()), np.log(facts["latency_ms"].to_numpy())

    def given(arm: str) -> Array:
        """tau given latency of all networks, then of each resample."""
        values = log_odds(wide[arm].to_numpy())
        return np.array([float(kendall_tau(_rest(values[pick], cost[pick]), _rest(truth[pick], cost[pick])))
                         for pick in every])

    taus = {arm: given(arm) for arm in ORDER if arm in wide}
    told = {}
    for arm, tau in taus.items():
        of = rows[rows["arm"] == arm]
        each, setup = float(of["cpu_seconds"].mean()), float(of["setup_cpu_seconds"].iloc[0])
        told[arm] = [float(tau[0]), *percentiles(tau[1:], LEVEL), *percentiles((tau - taus["inherited"])[1:], LEVEL),
                     float(kendall_tau(wide[arm].to_numpy(), truth)), each, setup, setup + MANY * each]
    return told


def _rest(values: Array, cost: Array) -> Array:
    """What a straight line in `cost` leaves of `values`."""
    return np.asarray(values - np.polyval(np.polyfit(cost, values, 1), cost))
