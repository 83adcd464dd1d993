"""One sampler against the table: asked until it has evaluated as many networks as it may."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.samplers._ga import BaseGASampler
from optuna.trial import TrialState

from experiments.sampler.contest.options import AWARE
from experiments.sampler.contest.peers import PEERS
from experiments.sampler.contest.samplers import make, version
from experiments.sampler.contest.table import Table

MOST_FREE = 50  # asks in a row that evaluate nothing, before a random unseen row is drawn


@dataclass
class Run:
    """What one sampler did: networks in the order of their first evaluation; asks in all; asks for rows that the table
    lacks; rows drawn for it because it asked for nothing new; seconds that its asks took together."""

    sampler: str
    seed: int
    version: str
    networks: list[int] = field(default_factory=list)
    asks: int = 0
    outside: int = 0
    drawn: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a line of JSON."""
        return {**asdict(self), "seconds": round(self.seconds, 4)}


def replay(table: Table, name: str, seed: int, evals: int) -> Run:
    """Run `name` on `table`; `evals` is at most its number of networks."""
    run = Run(name, seed, version(name))
    if name in AWARE:
        _by_peer(table, run, evals)
    else:
        ask_optuna(table, make(name, table, seed), run, evals)
    return run


def _by_peer(table: Table, run: Run, evals: int) -> None:
    """Peers propose rows that are new only, so none of their asks is free."""
    peer = PEERS[run.sampler](table.codes, table.entry, table.latency_ms[table.entry], run.seed)
    accuracy: float | None = None
    while len(run.networks) < evals:
        start = time.perf_counter()
        row = next(peer) if accuracy is None else peer.send(accuracy)
        run.seconds += time.perf_counter() - start
        run.asks += 1
        network = int(table.entry[row])
        accuracy = float(table.accuracy[network])
        run.networks.append(network)


def ask_optuna(table: Table, sampler: BaseSampler, run: Run, evals: int) -> None:
    """Fill `run` with what an Optuna sampler asks for, told `table`."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    rng = np.random.default_rng((run.seed, 1))
    space, seen, free = table.distributions, set[int](), 0
    while len(seen) < evals:
        if free >= MOST_FREE:
            study.enqueue_trial(table.params(_unseen(table, run.networks, rng)))
            run.drawn += 1
        start = time.perf_counter()
        trial = study.ask(space)
        run.seconds += time.perf_counter() - start
        run.asks += 1
        if free >= MOST_FREE and isinstance(sampler, BaseGASampler):
            # Optuna leaves queued trials out of every generation: nothing would be learnt from them
            sampler.get_trial_generation(study, study._storage.get_trial(trial._trial_id))
        network = _told(table, study, trial)
        run.outside += network is None
        free = free + 1 if network is None or network in seen else 0
        if not free and network is not None:
            seen.add(network)
            run.networks.append(network)


def _told(table: Table, study: optuna.Study, trial: optuna.Trial) -> int | None:
    """Tell what the table says of a trial, and its network; a row that is not in the table fails."""
    row = table.row_of(trial.params)
    if row is None:
        study.tell(trial, state=TrialState.FAIL)
        return None
    network = int(table.entry[row])
    study.tell(trial, (float(table.accuracy[network]), float(np.log2(table.latency_ms[network]))))  # as it is scored
    return network


def _unseen(table: Table, networks: Sequence[int], rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(~np.isin(table.entry, networks))))
