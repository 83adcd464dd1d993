"""NAS-Bench-Macro on this host: accuracies as published, latencies predicted for all and measured for some.

    python experiments/latency/macro/run.py +target=NAME benchmark=nas_bench_macro.csv out=DIR [random=100] \\
        [near=0.02] [seed=7] [seconds=45] [measure=true]

All networks are predicted by the table that this host has for the target. Measured are the predicted front, those that
are on it when predictions err by the share `near`, and `random` others; before them a panel of the table's networks.
`seconds` caps a wave of 24. Every finished wave is kept in DIR/measured.partial.json: the same command goes on from
there, and times again what was INVALID. Writes table.csv, summary.json and, where measured, measured.json and .png.
With measure=false nothing is timed, and what an earlier run has timed is left out.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import command, load_validation, save_csv, save_json
from experiments.latency.macro.benchmark import CHANNELS, CLASSES, SPACE, Benchmark
from experiments.latency.macro.choice import Chosen, chosen_networks
from experiments.latency.macro.options import Options, parse
from experiments.latency.macro.report import Outcome, describe, rows_of, summary_of
from hwnas import validate
from hwnas.cli.options import read_command
from hwnas.cli.progress import Console
from hwnas.errors import MissingLatency
from hwnas.latency.deployment import key_of
from hwnas.latency.held_out_networks import TimedOne
from hwnas.latency.table import find_table
from hwnas.latency.timing import WAVE


def main(arguments: list[str] | None = None) -> None:
    """Predict all, measure those that are chosen and not measured yet, write the results, print them."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return
    os.environ.setdefault("OPENVINO_TELEMETRY_OPTOUT", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    options, console = parse(given), Console()
    job = job_of(options, console)
    benchmark = Benchmark.load(options.benchmark, job.space)
    predictions = job.model.predict(benchmark.codes_of)
    chosen = chosen_networks(benchmark, predictions.mean, job.table, near=options.near, n_random=options.random,
                             seed=options.seed)
    measured = measure(job, chosen, options, console) if options.measure else None
    outcome = Outcome(job, benchmark, predictions, chosen, *(measured or ([], None)))
    save_csv(options.out / "table.csv", rows_of(outcome))
    save_json(options.out / "summary.json", summary_of(outcome))
    print(describe(outcome))


def job_of(options: Options, console: Console) -> validate.Job:
    """Table and model of this host; MissingLatency where it was not calibrated for the space, which takes longer."""
    asked = read_command(validate.ValidateOptions, options.config)
    deployment, space = asked.deployment(console), asked.search_space()
    key = key_of(deployment, space)
    table = find_table(deployment.host_name, key)
    if table is None or SPACE not in table.spaces():
        raise MissingLatency(f"no latency table of {deployment.host_name} for {key} with networks of {SPACE}. Measure "
                             f"it: python -m hwnas.profile +target={deployment.target.name} space={SPACE} "
                             f"channels={CHANNELS} classes={CLASSES}")
    return validate.prepare_job(asked, deployment, console)


def measure(job: validate.Job, chosen: Chosen, options: Options, console: Console
            ) -> tuple[list[TimedOne], dict[str, Any]]:
    """Measurements of the chosen ones, and the report of hwnas.validate on those that the table does not hold."""
    out, partial = options.out / "measured.json", options.out / "measured.partial.json"
    timed = validate.read_partial(partial, job.identity["table"], job.table.protocol)
    waiting = len({one.id for _, one in chosen} - {*timed})
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    if waiting:
        minutes = -(-waiting // WAVE) * options.seconds / 60
        console.say(f"{waiting} networks to measure, {WAVE} at a time: at most {minutes:.1f} minutes of timing")
    elif out.is_file():
        measured_at = load_validation(out).report["measured_at"]
    session = validate.find_session(job, console)
    found = validate.measure_networks(job, chosen, options.seed, options.seconds, partial, console)
    measuring = {"seed": options.seed, "measured_at": measured_at, "n_failed": len(chosen) - len(found)}
    report = validate.write_report(job, found, session, measuring, out)
    validate.tell(report, out, console)
    return found, report


if __name__ == "__main__":
    command(main)
