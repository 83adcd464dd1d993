"""Lets every turn of a measurement count, however busy the machine is, and waits for no measurement outside of TMPDIR,
in each process that starts with this folder on PYTHONPATH: for tests of whole commands. What noise does to a
measurement is tested on a virtual clock.
"""

from __future__ import annotations

import numpy as np

import hwnas.target
from hwnas.latency.measurement import Measurement

ROUNDS = 6  # more than copies, so that there is an interval


def accept(measurement: type[Measurement]) -> None:
    """No turn is disturbed, and a network is done after the least number of rounds."""
    measurement.good = property(lambda self: np.ones(len(self.turns), bool))  # type: ignore[assignment]
    measurement.converged = property(  # type: ignore[assignment,method-assign]
        lambda self: len(self.turns) >= min(self.protocol.min_rounds, ROUNDS))


hwnas.target.LOCK_FOLDERS = ()
accept(Measurement)
