"""Where the entries of blocks come from: profiles of whole networks, or whole networks alone. The evidence.

    python experiments/block_entries/run.py --table T.json --space mnasnet_small --out DIR

Nothing is measured: the table must hold networks that were profiled block by block (`block_us`). Three ways, ten folds:
(i) a network is the sum of its blocks' mean profiled times; (ii) profiled blocks are added to the fit, as networks of
one block each, with a weight; (iii) the fit sees whole networks only, as hwnas does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.block_entries.ways import Profiled, profile_sums, whole_networks, with_profiles
from experiments.common import circumstances, command, figures, networks_of, percent, save_json, text_table, timed_of
from hwnas.errors import TableError
from hwnas.latency.model import Fit, Timed
from hwnas.latency.table import LatencyTable

FOLDS = 10
WEIGHTS = (0.01, 0.1, 1.0)  # of a profiled block, beside 1 for a whole network
LEAST_PROFILED = 3


def main(arguments: list[str] | None = None) -> None:
    """Cross-validate the three ways and write `block_entries.json`."""
    options = _parser().parse_args(arguments)
    table = LatencyTable.load(options.table)
    networks = networks_of(table, options.space)
    timed = timed_of(table, options.space)
    profiled = [Profiled.of(one, table.quiet_ms) if one.block_ms else None for one in networks]
    n_profiled = sum(one is not None for one in profiled)
    if n_profiled < LEAST_PROFILED:
        raise TableError(f"{options.table}: {n_profiled} profiled networks, {LEAST_PROFILED} are needed. Measure with "
                         "them: python -m hwnas.profile +target=… calibration.profiles=24 fresh=true")
    found = {}
    for n in dict.fromkeys((len(networks), *(n for n in options.few if n_profiled <= n < len(networks)))):
        rows = _kept(profiled, n)
        some = timed[rows]
        predicted = cross_validated(some, [profiled[int(row)] for row in rows], options.folds)
        found[n] = {name: figures(values, some.measured_ms) for name, values in predicted.items()}
        print(f"{describe(found[n], n, n_profiled)}\n")
    save_json(options.out / "block_entries.json", {**circumstances(table), "space": options.space,
              "profiled": n_profiled, "folds": options.folds, "ways_by_networks": found,
              **_spread([one for one in profiled if one is not None])})


def _kept(profiled: Sequence[Profiled | None], n: int) -> np.ndarray:
    """Rows of all profiled networks, and of others up to `n`."""
    order = np.random.default_rng(1).permutation(len(profiled))
    first = sorted(order, key=lambda row: profiled[int(row)] is None)
    return np.sort(np.array(first[:n]))


def cross_validated(timed: Timed, profiled: Sequence[Profiled | None], folds: int) -> dict[str, np.ndarray]:
    """Predictions [n] in ms of every way for networks in folds that it had not seen (nor their profiles)."""
    n = len(timed.measured_ms)
    order = np.random.default_rng(0).permutation(n)
    variances = Fit.of(timed).residual.variances
    names = ["sum of profiled blocks", "sum of profiled blocks, scaled", "whole networks only",
             *(f"and profiled blocks, weight {weight:g}" for weight in WEIGHTS)]
    predicted = {name: np.zeros(n) for name in names}
    for index, fold in enumerate(np.array_split(order, folds)):
        rest = np.setdiff1d(order, fold)
        seen = [one for row in rest if (one := profiled[int(row)]) is not None]
        wanted = timed[fold].blocks
        plain, scaled = profile_sums(seen, timed[rest], wanted)
        found = [plain, scaled, whole_networks(timed[rest], variances, wanted),
                 *(with_profiles(seen, timed[rest], variances, weight, wanted) for weight in WEIGHTS)]
        for name, values in zip(names, found, strict=True):
            predicted[name][fold] = values
        print(f"\rfold {index + 1} of {folds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return predicted


def describe(found: dict[str, dict[str, float | None]], n: int, n_profiled: int) -> str:
    """The table, and which way is best."""
    rows = [["way", "mean error", "within 5 %", "within 10 %", "Spearman", "Kendall"]]
    for name, one in found.items():
        rows.append([name, *(percent(one[key]) for key in ("mean_error", "within_5", "within_10")),
                     f"{one['spearman'] or float('nan'):.4f}", f"{one['kendall'] or float('nan'):.4f}"])
    best = min(found, key=lambda name: float(found[name]["mean_error"] or np.inf))
    return f"{n} networks, {n_profiled} of them profiled\n{text_table(rows)}\n\nsmallest mean error: {best}"


def _spread(profiled: Sequence[Profiled]) -> dict[str, Any]:
    """How alike one block's profiled times are from network to network, and how much time no block owns."""
    times: dict[Any, list[float]] = {}
    for one in profiled:
        for block, ms in zip(one.blocks, one.block_ms, strict=True):
            times.setdefault(block, []).append(ms)
    spreads = [float(np.std(some, ddof=1) / np.mean(some)) for some in times.values()
               if len(some) > 1 and np.mean(some) > 0]
    return {"profiled_blocks": len(times), "median_spread_of_a_block": float(np.median(spreads)) if spreads else None,
            "median_share_of_no_block": float(np.median([one.other_ms / one.total_ms for one in profiled]))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--space", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--few", type=int, nargs="*", default=[40, 100],
                        help="also with so few networks, all profiled ones among them")
    parser.add_argument("--folds", type=int, default=FOLDS)
    return parser


if __name__ == "__main__":
    command(main)
