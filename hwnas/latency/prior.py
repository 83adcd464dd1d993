"""Prior: what other tables say, as a start for a calibration with few measurements; cross-validation decides.

A prior enters a fit as one more cost that multiplies its entries (features.py): a host that is faster all over differs
by one number. The networks at hand judge whether that helps. A prior is taken only where it predicts left-out networks
better than a fit from scratch. It must be better by more than the standard error of the paired difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.errors import HwnasError, TableError
from hwnas.latency.features import START, Prior, usual_place
from hwnas.latency.history import Outcome
from hwnas.latency.model import Fit, LatencyModel, Timed, stored_variances, timed_networks, usable
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TableKey
from hwnas.space.blocks.block import BlockSpec
from hwnas.system.paths import table_dirs

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace

FEW_NETWORKS = 200  # a calibration with more networks gains too little from a prior to look for one
MOST_CANDIDATES = 4
MOST_NETWORKS = 300  # of a foreign table: more add little to a prior and take long
LEAST_TO_CHOOSE = 8  # with fewer networks cross-validation says nothing
FOLDS, REPEATS = 5, 2
# At 1 even random entries offered as a prior did no harm, at 1/2 they did (experiments/latency_transfer, `control`).
STANDARD_ERRORS = 1.0

_STEM = re.compile(r"(?P<runtime>.+)-(?P<precision>[a-z0-9]+)-t(?P<threads>all|\d+)-b(?P<batch>\d+)"
                   r"-(?P<sizes>\d+(?:-\d+)*)px-c\d+-k\d+")


class FittedPrior:
    """Entries of blocks on another table; each is looked up once."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self._known: dict[BlockSpec, tuple[float, float]] = {}

    @classmethod
    def of(cls, table: LatencyTable) -> FittedPrior:
        """Fit on at most MOST_NETWORKS of the table's valid networks, of any space; TableError with too few."""
        networks = [network for network in table.networks if network.measurement.valid]
        if len(networks) < LEAST_NETWORKS:
            raise TableError(f"{table.path or table.key}: {len(networks)} networks, fewer than {LEAST_NETWORKS}")
        if len(networks) > MOST_NETWORKS:
            kept = np.random.default_rng(0).choice(len(networks), MOST_NETWORKS, replace=False)
            networks = [networks[int(index)] for index in np.sort(kept)]
        stored = (stored_variances(learnt) for learnt in table.learnt.values())
        variances = next((values for values in stored if values is not None), START)
        return cls(Fit.of(timed_networks(networks, table.quiet_ms), None, variances))

    def block_ms(self, blocks: Sequence[BlockSpec]) -> tuple[np.ndarray, np.ndarray]:
        """Entries of `blocks` there, ms [n], for a place after a pointwise convolution; their standard deviations."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._known]
        if new:
            mean, variance = self.fit.entries([usual_place(block) for block in new])
            self._known.update(zip(new, zip(mean.tolist(), np.sqrt(variance).tolist(), strict=True), strict=True))
        times = np.array([self._known[block] for block in blocks]).reshape(-1, 2)
        return times[:, 0], times[:, 1]


@dataclass(frozen=True, slots=True)
class Gain:
    """How much smaller the error of left-out networks gets: mean of the paired differences, and its standard error."""

    mean: float
    standard_error: float

    @classmethod
    def between(cls, before: np.ndarray, after: np.ndarray) -> Gain:
        """From errors [n] of the same networks."""
        paired = before - after
        return cls(float(paired.mean()), float(paired.std(ddof=1) / math.sqrt(len(paired))))

    @property
    def sure(self) -> bool:
        """Whether it is more than chance gives."""
        return self.mean > max(STANDARD_ERRORS * self.standard_error, 0.0)


def held_out_errors(timed: Timed, prior: Prior | None, seed: int = 0) -> np.ndarray:
    """Absolute log error of each network [n] when it was left out, the mean of REPEATS divisions into FOLDS."""
    n = len(timed.measured_ms)
    variances = Fit.of(timed, prior).residual.variances
    rng, logs, errors = np.random.default_rng(seed), np.log(timed.measured_ms), np.zeros(n)
    for _ in range(REPEATS):
        order = rng.permutation(n)
        for fold in np.array_split(order, min(FOLDS, n)):
            fit = Fit.of(timed[np.setdiff1d(order, fold)], prior, variances)
            errors[fold] += np.abs(np.log(fit.networks(timed[fold].blocks)[0]) - logs[fold]) / REPEATS
    return errors


def chosen_prior(timed: Timed, candidates: Mapping[str, Prior], seed: int = 0) -> tuple[str | None, Prior | None]:
    """The candidate that predicts left-out networks best; (None, None) where none is surely better than no prior."""
    if len(timed.measured_ms) < LEAST_TO_CHOOSE or not candidates:
        return None, None
    scratch = held_out_errors(timed, None, seed)
    gains = {name: Gain.between(scratch, held_out_errors(timed, prior, seed)) for name, prior in candidates.items()}
    name = best(gains)
    return (None, None) if name is None else (name, candidates[name])


def best(gains: Mapping[str, Gain]) -> str | None:
    """The largest of the sure gains; None where there is none."""
    sure = [name for name, gain in gains.items() if gain.sure]
    return max(sure, key=lambda name: gains[name].mean) if sure else None


def learnt_model(table: LatencyTable, space: SearchSpace) -> tuple[LatencyModel, list[str]]:
    """The model of a table just measured, with notes. With few networks it starts from another table if that helps."""
    networks = usable(table, space)
    if len(networks) >= FEW_NETWORKS:
        return LatencyModel.fit(table, space), []
    candidates, notes = prior_candidates(table.host_name, table.key, space)
    name, prior = chosen_prior(timed_networks(networks, table.quiet_ms), candidates)
    if name is not None:
        notes.append(f"few networks: the fit starts from {name}, which predicts held-out ones better than none")
    return LatencyModel.fit(table, space, prior=prior, prior_name=name or ""), notes


def model_of(table: LatencyTable, space: SearchSpace, history: Sequence[Outcome] = ()
             ) -> tuple[LatencyModel, list[str]]:
    """The model of a stored table, with the prior that it was fitted with and what searches measured since; and notes,
    where that prior is not at hand."""
    name = str(table.learnt.get(space.name, {}).get("prior", ""))
    if not name:
        return LatencyModel.fit(table, space, history=history), []
    candidates, notes = prior_candidates(table.host_name, table.key, space, only=name)
    if name in candidates:
        return LatencyModel.fit(table, space, prior=candidates[name], prior_name=name, history=history), []
    return LatencyModel.fit(table, space, history=history), [
        *notes, f"{table.path}: was fitted starting from {name}, which is not at hand; fitted without it"]


def prior_candidates(host_name: str, key: TableKey, space: SearchSpace, only: str = ""
                     ) -> tuple[dict[str, Prior], list[str]]:
    """Models of the other tables at hand, nearest first, at most MOST_CANDIDATES (or `only` the one of that name); and
    notes on those left out.

    Nearest: same host, runtime and precision (another input), then another precision, another runtime, other hosts.
    Names are `<host>/<key> of <date>`. The table of `key` on `host_name` itself is never among them.
    """
    priors: dict[str, Prior] = {}
    notes: list[str] = []
    for path in sorted(_others(host_name, key), key=lambda path: _distance(path, host_name, key)):
        if len(priors) == MOST_CANDIDATES:
            break
        if only and f"{path.parent.name}/{_stem(path)}" != only.split(" of ")[0]:
            continue
        try:
            table = LatencyTable.load(path)
            prior = FittedPrior.of(table)
            entries, _ = prior.block_ms(space.reference.blocks())
        except (HwnasError, ArithmeticError, np.linalg.LinAlgError, ValueError) as error:
            notes.append(f"not used as a start: {path}: {' '.join(str(error).removeprefix(f'{path}: ').split())}")
            continue
        if not (np.isfinite(entries).all() and entries.sum() > 0):
            notes.append(f"not used as a start: {path}: it says nothing of the blocks of {space.name}")
            continue
        priors[f"{path.parent.name}/{_stem(path)} of {table.created}"] = prior
    return priors, notes


def _others(host_name: str, key: TableKey) -> Iterator[Path]:
    """Files of other tables. Of a user's and a shipped table of one name, the user's."""
    seen = {(host_name, str(key))}
    for folder in table_dirs():
        for path in sorted([*folder.glob("*/*.json"), *folder.glob("*/*.json.gz")]):
            name = (path.parent.name, _stem(path))
            if name not in seen and _STEM.fullmatch(name[1]):
                seen.add(name)
                yield path


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")


def _distance(path: Path, host_name: str, key: TableKey) -> tuple[bool, bool, bool, bool, float, str]:
    """How unlike the wanted table another is, by its name alone. The weightiest difference comes first."""
    parts = _STEM.fullmatch(_stem(path))
    assert parts is not None
    sizes = [int(size) for size in parts["sizes"].split("-")]
    octaves = abs(math.log2(max(sum(sizes) / len(sizes), 1.0) / (sum(key.sizes) / len(key.sizes))))
    calls = (parts["threads"], parts["batch"]) != (str(key.threads or "all"), str(key.batch))
    return (path.parent.name != host_name, parts["runtime"] != key.runtime, parts["precision"] != key.precision,
            calls, octaves, str(path))
