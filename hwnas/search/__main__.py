"""The main job: find, train, quantise and verify networks for a target: python -m hwnas.search +target=xeon_int8"""

from __future__ import annotations

import sys
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.progress import Console
from hwnas.search.road import SearchResult, search
from hwnas.study.costs import KNOWN

USAGE = """Search, train, quantise and verify networks for a target. Results lie in out=FOLDER
(default runs/<target>-<space>-<dataset>).

    python -m hwnas.search +target=xeon_int8
    python -m hwnas.search +target=xeon_int8 dataset=imagefolder dataset.root=/data/parts space=mnasnet \\
        budget.latency_ms=2.5 n_trials=200

The same command again resumes; in another terminal it joins as a worker. --show-config prints every option."""


def main(config: Any, console: Console) -> None:
    """Search, and say what came of it."""
    conclude(search(config, console), console)


def conclude(result: SearchResult, console: Console) -> None:
    """The result in a few lines; nothing where another process verifies."""
    for row in sorted(result.rows, key=lambda row: row.best_latency_ms or 0.0):
        mark = "*" if row.on_front else " "
        top1 = "-" if row.best_top1 is None else f"{row.best_top1:.2%}"
        latency = "-" if row.best_latency_ms is None else f"{row.best_latency_ms:.3f} ms"
        state = "" if row.verified else f"  not verified{': ' if row.reason else ''}{row.reason}"
        costs = "".join(f"  {KNOWN[one.name].shown(one.best):>10}" for one in row.costs)
        console.say(f"{mark} {row.id:<28} top-1 {top1:>7}  {latency:>10}{costs}{state}")
    for comparison in result.comparisons:
        console.say(str(comparison.get("sentence", "")))
    if result.rows:
        console.say(f"report: {result.run.report}")


if __name__ == "__main__":
    sys.exit(run_command(main, "search", USAGE))
