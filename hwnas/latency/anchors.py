"""Anchors: networks of a calibration that a later run measures again, to tell how fast that run was as a whole.

One reference network cannot tell it well: where its buffers land in a process shifts its own latency by some per cent,
and with it every ratio to it. The median over anchors is shifted by a fraction of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hwnas.architecture import Architecture
from hwnas.latency.measurement import Measurement, robust_error
from hwnas.latency.table import LatencyTable

LEAST = 5  # valid ones, below which the reference alone has to do


@dataclass(frozen=True, slots=True)
class Pace:
    """A run's latencies over those of the calibration, both held against the reference; `n` anchors tell (0: none)."""

    factor: float
    standard_error: float
    n: int


def chosen_anchors(table: LatencyTable, space_name: str, n: int) -> list[Architecture]:
    """`n` networks of the table spread evenly over its latencies."""
    valid = sorted((one for one in table.networks if one.space == space_name and one.measurement.valid),
                   key=lambda one: one.measurement.latency_ms)
    if not n:
        return []
    picked = np.unique(np.linspace(0, len(valid) - 1, min(n, len(valid)) + 2)[1:-1].round().astype(int))
    return [valid[int(index)].architecture for index in picked]


def pace(table: LatencyTable, again: Mapping[str, Measurement]) -> Pace:
    """From the anchors' measurements in a later run, by architecture id."""
    before = {one.architecture.id: one.measurement for one in table.networks}
    logs = [np.log(one.at_ms(table.quiet_ms) / before[name].at_ms(table.quiet_ms)) for name, one in again.items()
            if one.valid and name in before and before[name].valid]
    if len(logs) < LEAST:
        return Pace(1.0, float("nan"), 0)
    return Pace(float(np.exp(np.median(logs))), robust_error(np.array(logs)), len(logs))
