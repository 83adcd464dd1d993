"""How much memory a long study takes: the whole command on digits, 200 trials of one epoch. Takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

N_TRIALS = 200
LIMIT_BYTES = 2 * 2**30
SHORT = ("calibration.networks=16", "calibration.minutes=0.3", "+proxy.epochs=1", "finalists.k=1",
         "+finalists.recipe.epochs=1", "baselines=[]", "verification.seconds=5")


def peak_bytes(folder: Path) -> int:
    """Peak resident memory of the largest process of a search."""
    command = [sys.executable, "-m", "hwnas.search", "+target=xeon_int8", "dataset=digits", f"n_trials={N_TRIALS}",
               f"out={folder / 'run'}", *SHORT]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (folder / "log").read_text()
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_memory_of_a_long_study(benchmark: Any, tmp_path: Path) -> None:
    peak = benchmark.pedantic(peak_bytes, args=(tmp_path,), rounds=1)
    benchmark.extra_info.update(limit_bytes=LIMIT_BYTES, peak_bytes=peak)
    assert peak <= LIMIT_BYTES, f"{peak / 2**20:.0f} MiB, limit {LIMIT_BYTES / 2**20:.0f} MiB"
