"""Time every network of timm's list until the minutes are over, those of few multiply-adds first.

    python -m experiments.zoo.all_networks TARGET MINUTES OUT
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hwnas.cli.command import compose
from hwnas.cli.options import read_command
from hwnas.cli.progress import Console
from hwnas.latency.target_set import read_deployments
from hwnas.latency.timing import HERE
from hwnas.system.tables import table_csv
from hwnas.zoo.__main__ import ZooOptions
from hwnas.zoo.published import published_networks
from hwnas.zoo.record import ZooRecord
from hwnas.zoo.result import zoo_rows
from hwnas.zoo.waves import Pair, ZooTiming

WAVE = 16  # networks that are timed together


class CheapestFirst(ZooTiming):
    """All networks in the order of their multiply-adds, whatever they may add to a front."""

    def _choose(self) -> list[Pair]:
        left = [pair for pair in self.pairs if self.measured(pair) is None and not self.reason(pair)]
        return sorted(left, key=lambda pair: (pair[0].gmacs, pair[0].key))[:WAVE]


def main(target: str, minutes: float, out: Path) -> None:
    """Time, and write the rows that `hwnas zoo` would write."""
    options, console = read_command(ZooOptions, compose("zoo", [f"target={target}"])), Console()
    targets = [each.target for each in read_deployments(options.target, None, HERE, console, anywhere=True)]
    with TemporaryDirectory() as folder, console.step("time networks", 60 * minutes) as report:
        timing = CheapestFirst(published_networks(), [ZooRecord.open(each) for each in targets], Path(folder),
                               options.memory_mb, None, options.seed)
        complete = timing.run(60 * minutes, report)
    out.write_text(table_csv([row.values() for row in zoo_rows(timing, complete)]))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
