"""Beside a peer: held-out networks predicted by isolated blocks, FLOPs, forests on kernels, and this project's model.

    python experiments/latency/peers/run.py --table T.json --validation v.json --space mnasnet_small --out DIR

Times blocks and kernels alone on this host (the table's), which takes minutes; what was timed is kept in
DIR/isolated.jsonl, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from itertools import zip_longest
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import (
    Stored,
    circumstances,
    command,
    load_validation,
    networks_of,
    save_csv,
    save_json,
    space_of,
)
from experiments.latency.peers.isolated import Isolated, isolated, time_parts
from experiments.latency.peers.methods import Method, flops_regression, forests, isolated_sums, ours
from experiments.latency.peers.parts import CALL, Block, Kernel, sampled_kernels
from experiments.latency.peers.report import describe, evaluated, picture
from hwnas.errors import ConfigError
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable, TimedNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.target import Host

SAMPLED_NETWORKS = 200  # that kernels to be timed are drawn from


def main(arguments: list[str] | None = None) -> None:
    """Time what is missing, predict, write `peers.csv`, `peers.json`, `peers.png`."""
    options = _parser().parse_args(arguments)
    table, held_out = LatencyTable.load(options.table), load_validation(options.validation)
    _check(table, held_out, options.space)
    space = space_of(options.space, table)
    networks = networks_of(table, space.name)
    held = [one for one in held_out.networks if one.measurement.valid]
    n = options.isolated or len(networks)
    drawn, blocks = drawn_networks(held, n)
    kernels = sampled_kernels(_sampled(space), n)
    known = isolated(options.out / "isolated.jsonl", table)
    by_turns = (part for pair in zip_longest(blocks, kernels) for part in pair if part is not None)
    time_parts([CALL, *by_turns], table, known, options.minutes * 60)
    untimed = sum(part.key not in known.ms for part in {CALL, *blocks, *kernels})
    methods = _methods(table, space, known, blocks, kernels)
    print(f"{len(drawn)} of {len(held)} held-out networks drawn for isolated blocks: {len(blocks)} different blocks, "
          f"{len(kernels)} kernels{f'; {untimed} not timed, the same command goes on' if untimed else ''}")
    found = evaluated(methods, held, {one.architecture.id for one in drawn}, table.quiet_ms)
    save_csv(options.out / "peers.csv", found.rows)
    save_json(options.out / "peers.json", {**circumstances(table), "space": space.name,
                                           "validated_at": held_out.report["measured_at"], "failed": known.failed,
                                           "methods": found.summaries})
    (options.out / "peers.png").write_bytes(picture(found, f"{table.key.runtime} {table.key.precision}", space.name,
                                                    table.host_name))
    print(describe(found))


def drawn_networks(held: list[TimedNetwork], n: int, seed: int = 0) -> tuple[list[TimedNetwork], list[Block]]:
    """Held-out networks in random order as long as their different blocks are at most `n`; and these blocks."""
    drawn: list[TimedNetwork] = []
    blocks: dict[Block, None] = {}
    for index in np.random.default_rng(seed).permutation(len(held)):
        one = held[int(index)]
        more = {**blocks, **{Block(spec): None for spec in one.architecture.blocks()}}
        if len(more) <= n:
            drawn.append(one)
            blocks = more
    if len(drawn) < 3:
        raise ConfigError(f"--isolated {n}: too few for the blocks of three held-out networks.")
    return drawn, list(blocks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True, help="latency table of this host (.json or .json.gz)")
    parser.add_argument("--validation", type=Path, required=True, help="JSON file that hwnas.validate wrote")
    parser.add_argument("--space", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--isolated", type=int, default=0,
                        help="most blocks, and as many kernels, timed alone (default: as many as the table's networks)")
    parser.add_argument("--minutes", type=float, default=5.5, help="most time for measuring")
    return parser


def _check(table: LatencyTable, held_out: Stored, space: str) -> None:
    here = Host.detect().name
    report = held_out.report
    for what, has, wanted in (("host", table.host_name, here),
                              ("validation of", report["host"]["name"], table.host_name),
                              ("key", report["table"]["key"], str(table.key)),
                              ("space", report["space"]["name"], space)):
        if has != wanted:
            raise ConfigError(f"{what} {has}, expected {wanted}: table, validation and this host must belong together.")
    known = {one.architecture.id for one in table.networks}
    if any(one.architecture.id in known for one in held_out.networks):
        raise ConfigError(f"{table.path} holds networks of the validation: they are not held out.")


def _sampled(space: SearchSpace) -> list[Architecture]:
    return [space.decode(space.to_params(row)) for row in space.sample(np.random.default_rng(1), SAMPLED_NETWORKS)]


def _methods(table: LatencyTable, space: SearchSpace, known: Isolated, blocks: list[Block], kernels: list[Kernel],
             ) -> list[Method]:
    networks = networks_of(table, space.name)
    seconds = table.spent_s.get(space.name, float("nan"))
    return [*isolated_sums(known, blocks), flops_regression(networks, table, seconds),
            *forests(known, kernels, networks, table, seconds),
            ours(LatencyModel.fit(table, space), len(networks), seconds)]


if __name__ == "__main__":
    command(main)
