"""Run a command beside a busy process on each core: python tests/beside_busy_cores.py COMMAND ...; its exit code."""

from __future__ import annotations

import os
import subprocess
import sys


def main(command: list[str]) -> int:
    """Start the busy processes, run the command, and end them."""
    cores = sorted(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: sum(i * i for i in range(1000))"]) for _ in cores]
    try:
        for process, core in zip(busy, cores, strict=True):
            os.sched_setaffinity(process.pid, {core})
        return subprocess.run(command, check=False).returncode
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
