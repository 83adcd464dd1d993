"""Which networks of the benchmark are measured: the predicted front, those near it, random ones."""

from __future__ import annotations

import numpy as np

from experiments.latency.macro.benchmark import SPACE, Benchmark
from hwnas.errors import ConfigError
from hwnas.latency.held_out_networks import FRONT, RANDOM
from hwnas.latency.table import LatencyTable
from hwnas.space.architecture import Architecture
from hwnas.stats import non_dominated

NEAR = "near"
Chosen = list[tuple[str, Architecture]]


def chosen_networks(benchmark: Benchmark, predicted_ms: np.ndarray, table: LatencyTable, *, near: float, n_random: int,
                    seed: int) -> Chosen:
    """(group, network), each network once. `predicted_ms` [m] is of the benchmark's networks.

    Near are those that are on the front when predictions err by the share `near`; random ones are neither of these
    nor in the table. ConfigError when there are not so many.
    """
    front = front_of(benchmark.accuracy, predicted_ms)
    beside = near_front(benchmark.accuracy, predicted_ms * (1 - near), predicted_ms * (1 + near)) & ~front
    known = calibrated_on(table)
    held_out = np.array([one.id not in known for one in benchmark.networks])
    left = np.flatnonzero(~front & ~beside & held_out)
    if n_random > len(left):
        raise ConfigError(f"random must be at most {len(left)}, the networks that are neither near the front nor in "
                          f"the latency table, got {n_random}.")
    drawn = np.sort(np.random.default_rng(seed).choice(left, n_random, replace=False))
    found = {benchmark.networks[index].id: (group, benchmark.networks[index])
             for group, where in ((FRONT, np.flatnonzero(front)), (NEAR, np.flatnonzero(beside)), (RANDOM, drawn))
             for index in where.tolist()}
    return list(found.values())


def calibrated_on(table: LatencyTable) -> set[str]:
    """Ids of the networks that predictions were fitted on."""
    return {one.architecture.id for one in table.networks if one.space == SPACE}


def front_of(accuracy: np.ndarray, latency_ms: np.ndarray) -> np.ndarray:
    """Mask [m] of what nothing beats in both; NaN is never on it."""
    return non_dominated(np.column_stack([accuracy, latency_ms]), (False, True))


def near_front(accuracy: np.ndarray, low_ms: np.ndarray, high_ms: np.ndarray) -> np.ndarray:
    """Mask [m] of what may be on the front while latencies lie in [low, high]: nothing is sure to beat it."""
    more, as_much = accuracy[None] > accuracy[:, None], accuracy[None] == accuracy[:, None]
    faster, as_fast = high_ms[None] < low_ms[:, None], high_ms[None] == low_ms[:, None]
    return np.asarray(~((more & (faster | as_fast)) | (as_much & faster)).any(axis=1))
