"""What each ingredient of the known-objective sampler brings: contests of it against itself with one taken out.

    python experiments/sampler_ablation/run.py table=FILE parameters=[a,b,c] accuracy=COLUMN latency=COLUMN out=DIR \\
        [arch_digits=COLUMN] [duplicates_by=COLUMN] [features=[d,e]] [noisy=[COLUMN,COLUMN]] [noise_times=1] \\
        [drawn_noise=1] [evals=100] [seeds=10] [variants=[no_features,no_warp]] [jobs=1]

As experiments/sampler_contest; equal seeds start with equal networks, so differences are paired. `noisy`: columns of
single trainings, one of which (by seed and network) is told in place of `accuracy`, its distance from that taken
`noise_times`. `drawn_noise`: made-up normal noise of this standard deviation in its place, of a third of the networks
(other ones with each seed) ROUGHER times it. Hypervolume counts the true accuracy. Finished runs are kept in
DIR/runs.jsonl. Writes ablation.csv, summary.csv, summary.json.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments.common import command, save_csv, save_json, text_table
from experiments.sampler_ablation.variants import VARIANTS, make, names
from experiments.sampler_contest.options import OURS, Options, parse
from experiments.sampler_contest.replay import Run, ask_optuna
from experiments.sampler_contest.run import header, play
from experiments.sampler_contest.samplers import version
from experiments.sampler_contest.scores import Scores, mean_and_error, rows_at, scored
from experiments.sampler_contest.store import Store
from experiments.sampler_contest.table import Table
from hwnas.errors import ConfigError, UnknownName
from hwnas.target import Host

MARKS = (25, 50, 100, 200, 400)
ROUGHER = 4  # times the drawn noise of the others: a third of the networks, as trainings that were ended early


@dataclass(frozen=True)
class Ablation(Options):
    """Those of a contest, and which ingredients are taken out, and what noise is told."""

    evals: int = 100
    variants: tuple[str, ...] = tuple(VARIANTS)
    noisy: tuple[str, ...] = ()
    noise_times: int = 1
    drawn_noise: int = 0


def main(arguments: list[str] | None = None) -> None:
    """Replay what is not finished, write the results, print them."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*given}:
        print(__doc__)
        return
    options = parse(given, Ablation)
    for name in options.variants:
        if name not in VARIANTS:
            raise UnknownName("variant", name, VARIANTS)
    table = Table.load(options)
    if options.noisy and options.drawn_noise:
        raise ConfigError("give either noisy=[COLUMN,…] or drawn_noise=POINTS.")
    told_of = partial(told, table, _trainings(options, table), options.drawn_noise)
    evals = min(options.evals, len(table.accuracy))
    store = Store(options.out / "runs.jsonl", {**header(options, table, evals), "noisy": list(options.noisy),
                                               "noise_times": options.noise_times,
                                               "drawn_noise": options.drawn_noise}, _version)
    print("\n".join([f"{options.table.name}: {len(table.accuracy)} different networks", *table.notes]))
    jobs = [(name, seed, evals) for name in names(options.variants) for seed in range(options.seeds)]
    play([job for job in jobs if job[:2] not in store.runs], partial(replay, table, told_of), store, options.jobs)
    found = scored(table, [store.runs[job[:2]] for job in jobs])
    rows = [_row(one, found[0]) for one in found]
    save_csv(options.out / "ablation.csv", rows_at(found, MARKS))
    save_csv(options.out / "summary.csv", rows)
    save_json(options.out / "summary.json", {**store.header, "computed_on": Host.detect().name, "variants": rows})
    print(describe(found))


def replay(table: Table, told_of: Callable[[int], tuple[np.ndarray, np.ndarray]], name: str, seed: int, evals: int
           ) -> Run:
    """One variant on the table; `told_of` says what a seed is told, see `told`."""
    run = Run(name, seed, _version(name))
    accuracy, stds = told_of(seed)
    ask_optuna(replace(table, accuracy=accuracy), make(table, name, seed, stds), run, evals)
    return run


def told(table: Table, trainings: np.ndarray, drawn_noise: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies of all networks as they are told with a seed, and the standard deviations of their noise [networks].

    `trainings` [networks, k]: one of each network's is told; k = 0: the true accuracies and, where it is not 0, drawn
    noise.
    """
    n = len(table.accuracy)
    rng = np.random.default_rng((seed, 2))
    if trainings.shape[1]:
        std = float(np.sqrt(np.mean((trainings - table.accuracy[:, None]) ** 2)))
        return trainings[np.arange(n), rng.integers(0, trainings.shape[1], n)], np.full(n, std)
    stds = drawn_noise * np.where(rng.random(n) < 1 / 3, ROUGHER, 1.0)
    return table.accuracy + stds * rng.normal(size=n), stds


def _version(name: str) -> str:
    source = (Path(__file__).parent / "variants.py").read_bytes()
    return f"{version(OURS)}-{hashlib.sha256(source).hexdigest()[:8]}"


def _trainings(options: Ablation, table: Table) -> np.ndarray:
    """Accuracies of single trainings [networks, k], their distance from the mean taken `noise_times`."""
    if not options.noisy:
        return np.zeros((len(table.accuracy), 0))
    if options.duplicates_by or len(table.accuracy) != len(table.codes):
        raise ConfigError("noisy= needs a table without duplicates.")
    found = [Table.load(replace(options, accuracy=name)).accuracy for name in options.noisy]
    if any(len(one) != len(table.accuracy) for one in found):
        raise ConfigError(f"noisy=[{','.join(options.noisy)}]: a column lacks networks that {options.accuracy} has.")
    return table.accuracy[:, None] + options.noise_times * (np.column_stack(found) - table.accuracy[:, None])


def _row(one: Scores, whole: Scores) -> dict[str, Any]:
    """Shares at the marks, and how far they lie from the whole sampler's, seed by seed."""
    row: dict[str, Any] = {"variant": one.sampler, "without": VARIANTS[one.sampler].what, "seeds": len(one.runs)}
    for mark in [mark for mark in MARKS if mark <= one.evals]:
        difference, error = mean_and_error(one.shares[:, mark - 1] - whole.shares[:, mark - 1])
        row |= {f"mean_{mark}": round(float(one.shares[:, mark - 1].mean()), 6),
                f"difference_{mark}": round(difference, 6), f"error_{mark}": error and round(error, 6)}
    asks = sum(run.asks for run in one.runs)
    return {**row, "seconds_an_ask": round(sum(run.seconds for run in one.runs) / asks, 5)}


def describe(found: Sequence[Scores]) -> str:
    """The whole sampler's shares; for each variant, what is lost (±: standard error of the paired difference)."""
    whole = found[0]
    marks = [mark for mark in MARKS if mark <= whole.evals]
    rows = [["points lost without", *map(str, marks), "s an ask"]]
    for one in found:
        row = _row(one, whole)
        if one is whole:
            name, cells = "(the whole sampler)", [f"{100 * row[f'mean_{mark}']:.1f} %" for mark in marks]
        else:
            name = row["without"]
            cells = [f"{-100 * row[f'difference_{mark}']:+.1f} ± {100 * (row[f'error_{mark}'] or 0):.1f}"
                     for mark in marks]
        rows.append([name, *cells, f"{row['seconds_an_ask']:.4f}"])
    return text_table(rows)


if __name__ == "__main__":
    command(main)
