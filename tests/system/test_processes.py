"""Processes that a script without a guard may start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_pool_does_not_run_the_callers_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
from hwnas.system.processes import Pool

print("once")
with Pool(2) as pool:
    print([job.result() for job in [pool.submit(abs, -1), pool.submit(abs, -2)]], __name__)
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.splitlines() == ["once", "[1, 2] __main__"], done.stderr
