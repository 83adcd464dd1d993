"""A new host with few measurements: what another target's table is worth as a start, and whether it can do harm.

    python experiments/latency_transfer/run.py --space mnasnet_small --tables A.json B.json … --out DIR

Nothing is measured: few networks are drawn from the destination's table, others of it are predicted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import circumstances, command, save_csv, save_json, timed_of
from experiments.latency_transfer.report import describe, picture, summaries
from experiments.latency_transfer.study import CONTROL, RandomPrior, study
from hwnas.errors import ConfigError
from hwnas.latency.features import Prior
from hwnas.latency.prior import FittedPrior
from hwnas.latency.table import LatencyTable

Row = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    """Read the tables, draw, fit, write `transfer.csv`, `transfer.json`, `transfer.png`."""
    options = _parser().parse_args(arguments)
    if len(options.tables) < 2:
        raise ConfigError("transfer needs two tables or more: --tables A.json B.json")
    tables = {name: LatencyTable.load(path) for name, path in named(options.tables).items()}
    jobs = [(options, name, seed) for name in tables for seed in range(options.seeds)]
    rows: list[Row] = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for index, found in enumerate(pool.map(_draws, jobs)):
            rows += found
            print(f"\r{index + 1} of {len(jobs)} draws", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    found = summaries(rows)
    save_csv(options.out / "transfer.csv", rows)
    save_json(options.out / "transfer.json", {"space": options.space, "seeds": options.seeds, "summaries": found,
                                              "tables": [circumstances(table) for table in tables.values()]})
    (options.out / "transfer.png").write_bytes(picture(found, options.space, options.seeds))
    print(describe(found))


def named(paths: Sequence[Path]) -> dict[str, Path]:
    """Tables by their keys, with the host where two have the same one."""
    stems = [path.name.removesuffix(".gz").removesuffix(".json") for path in paths]
    return {stem if stems.count(stem) == 1 else f"{path.parent.name}/{stem}": path
            for stem, path in zip(stems, paths, strict=True)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", required=True)
    parser.add_argument("--tables", type=Path, nargs="+", required=True, help="each is a source and a destination")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 20, 50, 100], help="measurements drawn")
    parser.add_argument("--seeds", type=int, default=20, help="draws of each size")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    return parser


_priors: dict[str, FittedPrior] = {}  # of this process


def _draws(job: tuple[argparse.Namespace, str, int]) -> list[Row]:
    """All sizes and sources for one destination and seed."""
    options, destination, seed = job
    timed = None
    for name, path in named(options.tables).items():
        if name == destination:
            timed = timed_of(LatencyTable.load(path), options.space)
        if name not in _priors:
            _priors[name] = FittedPrior.of(LatencyTable.load(path))
    assert timed is not None
    sources: dict[str, Prior] = {name: prior for name, prior in _priors.items() if name != destination}
    sources[CONTROL] = RandomPrior(seed)
    return [dict(row) for n in options.sizes for row in study(timed, sources, n, seed).rows(destination)]


if __name__ == "__main__":
    command(main)
