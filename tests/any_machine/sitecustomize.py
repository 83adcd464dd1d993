"""Gives every network a number after a few rounds, however busy the machine is, and waits for no measurement outside of
TMPDIR, in each process that starts with this folder on PYTHONPATH: for tests of whole commands. What noise does to a
measurement is tested on a virtual clock.
"""

from __future__ import annotations

import math

import hwnas.latency.measurement
import hwnas.target
from hwnas.latency.measurement import Measurement

ROUNDS = 6  # more than copies, so that there is an interval


def accept(measurement: type[Measurement]) -> None:
    """No interval is too wide, and a network is done after the least number of rounds."""
    hwnas.latency.measurement.WIDEST = math.inf
    measurement.converged = property(  # type: ignore[assignment,method-assign]
        lambda self: len(self.turns) >= min(self.protocol.min_rounds, ROUNDS))


hwnas.target.LOCK_FOLDERS = ()
accept(Measurement)
