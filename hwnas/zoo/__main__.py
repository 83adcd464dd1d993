"""Command: which of timm's pretrained networks is the fastest for its published top-1 on this CPU, and how deployed."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, count, show
from hwnas.errors import ConfigError, Unfinished
from hwnas.system.documents import now
from hwnas.system.paths import check_home, temporary_folder, write_atomic
from hwnas.system.run_folder import WorkFolder
from hwnas.system.tables import table_csv
from hwnas.target import Host
from hwnas.zoo.published import select_networks

# What times networks is imported where it begins, so that --help and a wrong option are answered at once.

USAGE = """Which of timm's networks is the fastest for its published ImageNet top-1 on this CPU, in which runtime and
precision? Networks are built with random weights and timed; nothing is downloaded.

    hwnas zoo target=cpu
    hwnas zoo target=xeon_int8 cap_ms=5 minutes=10 names=[mobilenet*,efficientnet*,resnet*]

Timings are kept: the same command again goes on."""
RESERVE_S = 12.0  # for pictures and pages


@dataclass(frozen=True)
class ZooOptions:
    """Options of `conf/zoo.yaml`."""

    target: dict[str, Any]
    names: tuple[str, ...] | None
    cap_ms: float | None = option(above=0)
    minutes: float = option(low=1, high=100_000)
    seed: int = option(low=0)
    out: str | None = option()
    memory_mb: int = option(low=1)


def main(config: Config, console: Console) -> None:
    """Time networks until the minutes are over, then write the front. Unfinished, if none could be timed."""
    start = time.monotonic()
    options = read_command(ZooOptions, config)
    networks = select_networks(options.names)
    name = str(options.target.get("name"))
    if options.target.get("device", "cpu") != "cpu":
        raise ConfigError(f"target={name} runs on a GPU, and hwnas zoo times networks on the CPU. Name another.")
    check_home()
    from hwnas.latency.target_set import read_deployments
    from hwnas.latency.timing import HERE
    from hwnas.pictures import figure_bytes
    from hwnas.zoo.record import ZooRecord
    from hwnas.zoo.result import NOTE, UNTIMED, zoo_figure, zoo_page, zoo_ranks, zoo_rows, zoo_sentences
    from hwnas.zoo.waves import ZooTiming

    targets = [each.target for each in read_deployments(options.target, None, HERE, console, anywhere=True)]
    for target in targets:
        HERE.runtime(target.runtime).check(target)
    folder = WorkFolder(Path(options.out or f"runs/{name}-zoo"), "zoo").take_up()
    with temporary_folder() as place:
        timing = ZooTiming(networks, [ZooRecord.open(target) for target in targets], Path(place), options.memory_mb,
                           options.cap_ms, options.seed)
        kept = sum(timing.measured(pair) is not None for pair in timing.pairs)
        console.say(f"{count(len(networks), 'network')} of timm in {', '.join(target.name for target in targets)}, for "
                    f"{options.minutes:g} min: first those that may be on the front of top-1 and latency. {kept} of "
                    f"{len(timing.pairs)} timings were made before.")
        seconds = 60 * options.minutes - RESERVE_S - (time.monotonic() - start)
        with console.step("time networks", seconds) as report:
            complete = timing.run(seconds, report)
    rows = zoo_rows(timing, complete)
    timed = [row for row in rows if row.latency]
    failed = [row for row in rows if row.reason and not row.reason.startswith(UNTIMED)]
    write_atomic(folder.path / "zoo.csv", table_csv([row.values() for row in rows]))
    if ranks := zoo_ranks(rows):
        write_atomic(folder.path / "ranks.csv", table_csv(ranks))
    if not timed:
        row = next(iter(failed), rows[0])
        raise Unfinished(f"no network could be timed. {row.network.key} in {row.place}: {row.reason}", part=False)
    sentences = [*zoo_sentences(rows, options.cap_ms), f"{len(timed)} of {len(rows)} were timed; " + (
        "no other is expected to be on a front." if complete else "the same command goes on with the others."), NOTE]
    heading, unit = f"timm's networks on {name}", "image" if targets[0].batch == 1 else f"batch of {targets[0].batch}"
    lead = f"latency of one {unit}, measured on {Host.detect().name}, {now()[:10]}"
    write_atomic(folder.path / "front.png", figure_bytes(zoo_figure(rows, heading, lead, options.cap_ms), "png"))
    write_atomic(folder.path / "zoo.html", zoo_page(rows, heading, lead, sentences, options.cap_ms))
    for line in sentences:
        show(line)
    if failed:
        console.say(f"{len(failed)} could not be timed; zoo.csv says why.")
    console.say(f"zoo: {folder.path}/zoo.html, front.png and zoo.csv")


command = partial(run_command, main, "zoo", USAGE)

if __name__ == "__main__":
    sys.exit(command())
