"""The command that measures this host for a target and a search space, and stores the latency table."""

from __future__ import annotations

import sys
from functools import partial

from hwnas.cli.command import run_command
from hwnas.face import call
from hwnas.latency.deployment import profile

USAGE = """Measure this host for a target and a search space (a latency table in $HWNAS_HOME/latency_tables).

    hwnas profile target=xeon_int8 space=mnasnet image_size=128 channels=3 budget.minutes=10"""


command = partial(run_command, profile, "profile", USAGE)

call(__name__, "profile")  # hwnas.profile(…) of hwnas/api.py

if __name__ == "__main__":
    sys.exit(command())
