"""Latency: measured, kept in tables, predicted with an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.latency.harness import measure as measure
    from hwnas.latency.measurement import Measurement as Measurement
    from hwnas.latency.model import LatencyModel as LatencyModel
    from hwnas.latency.table import LatencyTable as LatencyTable

__getattr__, __dir__ = face(__name__, {
    "LatencyModel": "model", "LatencyTable": "table", "Measurement": "measurement", "measure": "harness"})
