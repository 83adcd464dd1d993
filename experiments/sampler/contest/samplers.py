"""The samplers by name: ours, and Optuna's with their best documented settings."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler

import hwnas.samplers.loading
from experiments.sampler.contest import peers
from experiments.sampler.contest.options import AWARE, OURS
from experiments.sampler.contest.table import Table
from hwnas.samplers.known import KnownFunctions, KnownObjectiveSampler

# Most seeds and evaluations of samplers that take long: gp in every ask, tpe in asking for the same ten times over.
SLOW = {"gp": (3, 200), "tpe": (3, 200)}
_OF_SEARCHES = ("__init__.py", "informed.py", "loading.py")  # in hwnas.samplers; nothing here needs them


def make(name: str, table: Table, seed: int) -> BaseSampler:
    """An Optuna sampler for `table`; only ours is told its latencies, features where there are any, and, as the two
    peers are, which settings are one network."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return _ours(table, seed) if name == OURS else _OPTUNA[name](seed)


def limited(name: str, seeds: int, evals: int) -> tuple[int, int]:
    """Seeds and evaluations that a sampler gets of those asked for."""
    most_seeds, most_evals = SLOW.get(name, (seeds, evals))
    return min(seeds, most_seeds), min(evals, most_evals)


def version(name: str) -> str:
    """Changes when a sampler may ask differently than it did: a run of another version is not comparable."""
    if name == OURS:
        folder = Path(next(iter(hwnas.samplers.__path__)))
        here = Path(__file__)
        told_by = (here, here.with_name("table.py"), here.with_name("replay.py"))
        return _sources(*told_by, *(path for path in folder.glob("*.py") if path.name not in _OF_SEARCHES))
    return _sources(Path(peers.__file__)) if name in AWARE else f"optuna {optuna.__version__}, told log2"


def _sources(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:12]


def _ours(table: Table, seed: int) -> BaseSampler:
    functions = KnownFunctions(table.known_latency, table.known_features if table.features.shape[1] else None,
                               canonical=table.canonical)
    return KnownObjectiveSampler(table.distributions, functions, seed=seed)


_OPTUNA: dict[str, Callable[[int], BaseSampler]] = {
    "tpe": lambda seed: TPESampler(seed=seed),
    "tpe_multivariate": lambda seed: TPESampler(multivariate=True, group=True, n_startup_trials=10, seed=seed),
    "nsga2": lambda seed: NSGAIISampler(population_size=50, seed=seed),
    "nsga2_small": lambda seed: NSGAIISampler(population_size=20, seed=seed),
    "gp": lambda seed: GPSampler(seed=seed),
    "random": lambda seed: RandomSampler(seed=seed),
}
