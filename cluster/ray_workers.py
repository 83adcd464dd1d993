"""Workers of one search as tasks of Ray: python cluster/ray_workers.py RUN --workers 2 --cpus 4

RUN is the run folder, under the same path on every machine. HWNAS_STORAGE holds the URL of its study. Ray places the
tasks; nothing is tried again here, since hwnas takes up the trials of dead workers itself. The command ends with the
largest exit code of its workers.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

try:
    import ray
except ImportError:
    print("ray_workers: no module ray. Install it: pip install 'hwnas[ray]'.", file=sys.stderr)
    sys.exit(2)

from hwnas.system.processes import start


def work(run: str, storage: str | None, cpus: int) -> tuple[int, str]:
    """Run one worker to its end: its exit code, its host and its last line.

    The worker gets the URL through a pipe, so no list of processes shows it, and it ends with this task.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(cpus)}
    worker = start("hwnas.worker", [f"run={run}"], unseen=[f"storage={storage}"] if storage else [], env=environment,
                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = ""
    for line in worker.stdout or ():
        last = line.strip() or last
    return worker.wait(), f"{socket.gethostname()}: {last[:300]}"


def main() -> int:
    """Start the workers, say how each ended, and return the largest exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the run folder of the search")
    parser.add_argument("--workers", type=int, default=2, help="how many tasks (default: 2)")
    parser.add_argument("--cpus", type=int, default=1, help="cores of each task (default: 1)")
    parser.add_argument("--address", help="of the Ray cluster, e.g. auto (default: RAY_ADDRESS, else this machine)")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no machine reports anywhere
    ray.init(address=options.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    task = ray.remote(work).options(num_cpus=options.cpus, max_retries=0, scheduling_strategy="SPREAD")
    run, storage = str(Path(options.run).absolute()), os.environ.get("HWNAS_STORAGE")
    waiting = [task.remote(run, storage, options.cpus) for _ in range(options.workers)]
    codes = []
    while waiting:
        done, waiting = ray.wait(waiting)
        try:
            code, said = ray.get(done[0])
        except ray.exceptions.RayError as error:  # its machine or its process is gone
            code, said = 1, f"lost: {str(error).splitlines()[0]}"
        codes.append(code if code >= 0 else 128 - code)  # as a shell counts signals
        print(f"worker {len(codes)} of {options.workers} ended with {codes[-1]}, {said}", flush=True)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
