"""The contest: networks that a search found against those people deploy, same recipe for all, as deployed files.

    python experiments/contest/run.py data=fashion_mnist|eurosat|NAME [root=DIR] out=DIR [ours=RUN_FOLDER] \\
        [target=epyc_int8] [seeds=2] [epochs=6] [train_images=10000] [validation_images=2000] [lr=0.005] \\
        [networks=resnet50,…] [bf16=resnet50,…] [image_size=N] [jobs=2] [batch=1] [seconds=200] [setup_seconds=N] \\
        [steps=train,score,time,report] [dataset.KEY=VALUE …]

train    every baseline as stock and with a stride-1 stem and, with `ours`, three networks of that search (picks.py says
         by which rule); seed 0 of all, then the other seeds of ours and of each baseline's better stem;
score    fp32, bf16 and int8 files of each, answers to all test images in the deployment runtime; an int8 file that
         hwnas.compress made of OUT/train/NAME (out=OUT/compressed/NAME train_images=…) counts instead of the plain one;
time     all files of seed 0 together, in interleaved rounds on one quiet machine (at most `seconds` of them);
report   table.csv, table.md, summary.json, contest.png.

Killed at any point the same command goes on. Give `ours` once it is there: what is trained stays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import command
from experiments.contest.networks import Network, baselines
from experiments.contest.options import Options, parse
from experiments.contest.picks import picks_of
from experiments.contest.training import claim, train_all
from hwnas.cli.progress import Console


def main(arguments: list[str] | None = None) -> None:
    """The steps asked for, in order."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return
    os.environ.setdefault("OPENVINO_TELEMETRY_OPTOUT", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options, console = parse(given), Console()
    claim(options)
    networks = entrants(options)
    if "train" in options.steps:
        failed = train_all(networks, options, console)
        console.say(f"{len(failed)} trainings failed: {', '.join(failed)}" if failed else "all is trained")
    if "score" in options.steps:
        from experiments.contest.scoring import score_all

        score_all(networks, options, console)
    if "time" in options.steps:
        from experiments.contest.timing import time_all

        time_all(networks, options, console)
    if "report" in options.steps:
        from experiments.contest.report import write_all

        print(write_all(networks, options, picks_of(options)))


def entrants(options: Options) -> list[Network]:
    """Ours, where there are any, then the baselines, cheapest first."""
    picks = picks_of(options)
    return [*(picks.networks() if picks else ()), *baselines(options.networks)]


if __name__ == "__main__":
    try:
        command(main)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here.", file=sys.stderr)
        sys.exit(130)
