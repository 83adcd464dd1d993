"""Find which of timm's pretrained networks is the fastest for its published top-1 on this CPU, and how deployed."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.cli.command import run_command
from hwnas.cli.options import Config, option, read_command
from hwnas.cli.progress import Console, count, show
from hwnas.errors import ConfigError, Unfinished
from hwnas.networks.weights import PretrainedOptions
from hwnas.system.paths import check_home, temporary_folder, write_atomic
from hwnas.system.run_folder import WorkFolder
from hwnas.system.tables import table_csv
from hwnas.target import Host
from hwnas.zoo.published import select_networks

if TYPE_CHECKING:
    from hwnas.zoo.result import ZooRow

# Modules that time networks are imported when they are needed, so that --help and a wrong option are answered at once.

USAGE = """Which of timm's networks is the fastest for its published ImageNet top-1 on this CPU, in which runtime and
precision? Networks are built with random weights and timed; nothing is downloaded.

    hwnas zoo target=cpu
    hwnas zoo target=xeon_int8 cap_ms=5 minutes=10 names=[mobilenet*,efficientnet*,resnet*]

Timings are kept: the same command again goes on. With images of ImageNet's classes and pretrained weights the files are
scored as they are deployed:

    hwnas zoo target=xeon_int8 dataset=imagefolder dataset.root=/images pretrained.folder=/weights"""
RESERVE_S = 12.0  # for pictures and pages
TIMING = 0.5  # share of the seconds for timing, if files are scored after it


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
    pretrained: PretrainedOptions = option(PretrainedOptions())
    dataset: dict[str, Any] | None = option(None)


def main(config: Config, console: Console) -> None:
    """Time networks until the minutes are over, score the ones that have weights, then write the front. Raises
    Unfinished if none could be timed or scored."""
    start = time.monotonic()
    options = read_command(ZooOptions, config)
    networks = select_networks(options.names)
    if options.target.get("device", "cpu") != "cpu":
        raise ConfigError(f"target={options.target['name']} runs on a GPU, and hwnas zoo times networks on the CPU. "
                          "Name another.")
    if options.dataset is None and options.pretrained.asked:
        raise ConfigError("pretrained weights are for scoring, and there are no images to score them on. Add "
                          "dataset=NAME dataset.root=DIR with images of ImageNet's classes, or leave pretrained out.")
    check_home()
    from hwnas.latency.target_set import read_deployments
    from hwnas.latency.timing import HERE
    from hwnas.zoo.record import ZooRecord
    from hwnas.zoo.result import zoo_rows
    from hwnas.zoo.scoring import Scoring, networks_with_weights
    from hwnas.zoo.waves import ZooTiming

    if options.dataset is not None:
        networks = networks_with_weights(networks, options.pretrained, console)
    targets = [each.target for each in read_deployments(options.target, None, HERE, console, anywhere=True)]
    for target in targets:
        HERE.runtime(target.runtime).check(target)
    folder = WorkFolder(Path(options.out or f"runs/{options.target.get('name')}-zoo"), "zoo").take_up()
    with temporary_folder() as place:
        records = [ZooRecord.open(target) for target in targets]
        scoring = None if options.dataset is None else Scoring(options.dataset, options.pretrained, options.seed,
                                                               Path(place), console, records)
        timing = ZooTiming(networks, records, Path(place), options.memory_mb, options.cap_ms, options.seed)
        stored = sum(timing.measured(pair) is not None for pair in timing.pairs)
        console.say(f"{count(len(networks), 'network')} of timm in {', '.join(target.name for target in targets)}, for "
                    f"{options.minutes:g} min: first those that may be on the front of top-1 and latency. {stored} of "
                    f"{len(timing.pairs)} timings were made before.")
        end = start + 60 * options.minutes - RESERVE_S
        # With images, the first part of the time is for timing and the second for scoring.
        seconds = (end - time.monotonic()) * (1 if scoring is None else TIMING)
        with console.step("time networks", seconds) as report:
            complete = timing.run(seconds, report)
        rows = zoo_rows(timing, complete)
        if scoring is not None:
            with console.step("score files", end - time.monotonic()) as report:
                rows = scoring.score(rows, options.cap_ms, end - time.monotonic(), report)
    _write(rows, complete, options, folder.path, console)


def _write(rows: Sequence[ZooRow], complete: bool, options: ZooOptions, folder: Path, console: Console) -> None:
    """Write and print the result. `complete`: no other network is expected to be on a front."""
    from hwnas.pictures import figure_bytes
    from hwnas.zoo.result import NOTE, SCORED, UNTIMED, mark_front, zoo_figure, zoo_page, zoo_ranks, zoo_sentences
    from hwnas.zoo.scoring import OVER_CAP, UNSCORED

    rows = mark_front(rows, options.cap_ms)
    shown = [row for row in rows if row.latency and (row.scored or options.dataset is None)]
    failed = [row for row in rows if row.reason and not row.reason.startswith((UNTIMED, UNSCORED, OVER_CAP))]
    write_atomic(folder / "zoo.csv", table_csv([row.values() for row in rows]))
    if ranks := zoo_ranks(rows):
        write_atomic(folder / "ranks.csv", table_csv(ranks))
    # Nothing to show: the reason of the first failure says why.
    if not shown:
        row, verb = next(iter(failed), rows[0]), "timed" if options.dataset is None else "scored"
        raise Unfinished(f"no network could be {verb}. {row.network.key} in {row.place}: {row.reason}", part=False)
    timed = sum(bool(row.latency) for row in rows)
    rest = "no other is expected to be on a front" if complete else "the same command goes on with the others"
    sentences = [*zoo_sentences(rows, options.cap_ms), f"{timed} of {len(rows)} were timed; {rest}."]
    sentences += [NOTE] if options.dataset is None else [
        f"{len(shown)} of these were scored" + ("." if all(row.reason != UNSCORED for row in rows) else
                                                ": more minutes are needed for the others."), SCORED]
    heading = f"timm's networks on {options.target.get('name')}"
    batch = shown[0].target.batch
    lead = (f"latency of one {'image' if batch == 1 else f'batch of {batch}'}, measured on {Host.detect().name}")
    write_atomic(folder / "front.png", figure_bytes(zoo_figure(shown, heading, lead, options.cap_ms), "png"))
    write_atomic(folder / "zoo.html", zoo_page(shown, heading, lead, sentences, options.cap_ms))
    for line in sentences:
        show(line)
    if failed:
        console.say(f"{len(failed)} could not be timed{'' if options.dataset is None else ' or scored'}; zoo.csv says "
                    "why.")
    console.say(f"zoo: {folder}/zoo.html, front.png and zoo.csv")


command = partial(run_command, main, "zoo", USAGE)

if __name__ == "__main__":
    sys.exit(command())
