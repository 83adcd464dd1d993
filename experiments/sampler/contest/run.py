"""A contest of samplers: how much of a finite space's front each finds with how few evaluations.

    python experiments/sampler/contest/run.py table=FILE parameters=[a,b,c] accuracy=COLUMN latency=COLUMN out=DIR \\
        [arch_digits=COLUMN] [duplicates_by=COLUMN] [features=[d,e]] [evals=400] [seeds=10] [samplers=[hwnas,nsga2]] \\
        [jobs=1]

The table (CSV or Parquet) holds every architecture of the space; nothing is trained or measured. `arch_digits` stands
in place of `parameters`: a column of digit strings, one parameter a digit. Finished runs are kept in DIR/runs.jsonl,
the same command goes on from there. Writes contest.csv, curves.csv, summary.csv, summary.json, contest.png.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import command, save_csv, save_json
from experiments.sampler.contest.options import NAMES, Options, parse
from experiments.sampler.contest.picture import picture
from experiments.sampler.contest.replay import Run, replay
from experiments.sampler.contest.report import describe, verdict
from experiments.sampler.contest.samplers import SLOW, limited, version
from experiments.sampler.contest.scores import WRITTEN, Scores, curve_rows, rows_at, scored
from experiments.sampler.contest.store import Store
from experiments.sampler.contest.table import Table
from hwnas.errors import UserError
from hwnas.target import Host

Job = tuple[str, int, int]  # sampler, seed, evaluations
Replay = Callable[[str, int, int], Run]
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main(arguments: list[str] | None = None) -> None:
    """Replay what is not finished, write the results, print them."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return
    options = parse(given)
    table = Table.load(options)
    evals = min(options.evals, len(table.accuracy))
    notes = [*table.notes, *_limits(options, evals)]
    print("\n".join([f"{options.table.name}: {len(table.codes)} of {table.combinations} combinations of parameters, "
                     f"{len(table.accuracy)} different networks", *notes]))
    store = Store(options.out / "runs.jsonl", header(options, table, evals), version)
    if store.outdated:
        print(f"{store.outdated} runs are of another version of their sampler and do not count")
    wanted = _jobs(options, evals)
    play([job for job in wanted if job[:2] not in store.runs], partial(replay, table), store, options.jobs)
    runs = [store.runs[job[:2]] for job in wanted]
    found, wide = scored(table, runs), scored(table, runs, wide=True)
    _write(options, table, found, wide, {**store.header, "notes": notes})
    print(describe(found, wide))


def _limits(options: Options, evals: int) -> list[str]:
    notes = []
    if evals < options.evals:
        notes.append(f"evals={options.evals} limited to the {evals} networks that there are")
    for name, (seeds, most) in SLOW.items():
        if name in options.samplers and (options.seeds > seeds or evals > most):
            notes.append(f"{name} takes long: {min(seeds, options.seeds)} seeds, {min(most, evals)} evaluations")
    return notes


def header(options: Options, table: Table, evals: int) -> dict[str, Any]:
    """What runs must have in common to be compared."""
    return {"contest": 1, "table": options.table.name, "sha256": table.fingerprint,
            "parameters": list(options.parameters), "arch_digits": options.arch_digits, "accuracy": options.accuracy,
            "latency": options.latency, "duplicates_by": options.duplicates_by, "features": list(options.features),
            "evals": evals}


def _jobs(options: Options, evals: int) -> list[Job]:
    names = [name for name in NAMES if name in options.samplers]
    return [(name, seed, limited(name, options.seeds, evals)[1]) for name in names
            for seed in range(limited(name, options.seeds, evals)[0])]


def play(jobs: Sequence[Job], replay: Replay, store: Store, processes: int) -> None:
    """Run each job in a process and keep what comes of it."""
    for index, run in enumerate(_runs(jobs, replay, processes), 1):
        store.add(run)
        print(f"\r{index} of {len(jobs)} runs", end="", file=sys.stderr, flush=True)
    if jobs:
        print(file=sys.stderr)


def _runs(jobs: Sequence[Job], replay: Replay, processes: int) -> Iterator[Run]:
    """Runs as they finish, each on one thread."""
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # read by what loads later: numpy in children, torch
    if processes == 1 or len(jobs) < 2:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

        for job in jobs:
            with threadpool_limits(1):
                yield replay(*job)
        return
    try:
        with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=get_context("spawn")) as pool:
            pending = [pool.submit(replay, *job) for job in jobs]
            try:
                for one in as_completed(pending):
                    yield one.result()
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        raise UserError("a process was killed, perhaps for want of memory. Finished runs are kept: give the same "
                        "command again, with jobs=1.") from error


def _write(options: Options, table: Table, found: Sequence[Scores], wide: Sequence[Scores],
           circumstances: dict[str, Any]) -> None:
    out = options.out
    rows = [one.summary() for one in found]
    save_csv(out / "contest.csv", rows_at(found, WRITTEN))
    save_csv(out / "curves.csv", curve_rows(found))
    save_csv(out / "summary.csv", rows)
    save_json(out / "summary.json", {
        **circumstances, "computed_on": Host.detect().name, "networks": len(table.accuracy),
        "reference": {"accuracy": table.reference[0], "latency_ms": 2 ** table.reference[1]},
        "true_hypervolume": table.hypervolume, "samplers": rows, "verdict": verdict(found),
        "wide": {"reference": {"accuracy": table.wide_reference[0], "latency_ms": 2 ** table.wide_reference[1]},
                 "samplers": [one.summary() for one in wide], "verdict": verdict(wide)}})
    subtitle = (f"{options.accuracy} and {options.latency}, {len(table.accuracy)} networks · mean of up to "
                f"{options.seeds} seeds, band: one standard error")
    (out / "contest.png").write_bytes(picture(found, f"Samplers on {options.table.stem}", subtitle))


if __name__ == "__main__":
    command(main)
