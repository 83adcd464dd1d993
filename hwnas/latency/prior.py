"""Prior: what other tables say, as a start for a calibration with few measurements; cross-validation decides.

The nearest tables are taken together: those of the same runtime and precision, and those of this host for images of the
same shape. Each enters a fit as one more cost that multiplies its entries (features.py). So a host that is faster all
over differs by one number, and the measurements say what each table is worth. The networks at hand judge whether that
helps. A prior is taken only where it predicts left-out networks better than a fit from scratch. It must be better by
more than the standard error of the paired difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.errors import HwnasError, TableError
from hwnas.latency.features import START, Prior, usual_place
from hwnas.latency.model import Fit, FitData, LatencyModel, stored_priors, stored_variances, timed_networks, usable
from hwnas.latency.table import LEAST_NETWORKS, TABLE, LatencyTable, TableKey
from hwnas.space.blocks.block import BlockSpec
from hwnas.system.paths import table_dirs

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace

FEW_NETWORKS = 200  # a calibration with more networks gains too little from a prior to look for one
MOST_OF_KIND, MOST_OF_HOST = 4, 2  # tables of the same runtime and precision, and others of this host
MOST_NETWORKS = 300  # of a foreign table: more add little to a prior and take long
LEAST_TO_CHOOSE = 8  # with fewer networks cross-validation says nothing
FOLDS, REPEATS = 5, 2
# At 1 random entries offered as a prior were never taken (experiments/latency/transfer, `control`).
STANDARD_ERRORS = 1.0

_STEM = re.compile(r"(?P<runtime>.+)-(?P<precision>[a-z0-9]+)-t(?P<threads>all|\d+)-b(?P<batch>\d+)"
                   r"-(?P<sizes>\d+(?:-\d+)*)px-c(?P<channels>\d+)-k\d+")


class TablesPrior:
    """Entries of blocks on other tables, whose names it has; each is looked up once."""

    def __init__(self, fits: dict[str, Fit]) -> None:
        self.names = tuple(fits)
        self._fits = tuple(fits.values())
        self._known: dict[BlockSpec, np.ndarray] = {}

    def block_ms(self, blocks: Sequence[BlockSpec]) -> np.ndarray:
        """Entries of `blocks` there, ms [n, tables], for a place after a pointwise convolution."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._known]
        if new:
            places = [usual_place(block) for block in new]
            entries = np.column_stack([fit.entries(places)[0] for fit in self._fits])
            self._known.update(zip(new, entries, strict=True))
        return np.array([self._known[block] for block in blocks]).reshape(-1, len(self.names))


def fit_of(table: LatencyTable) -> Fit:
    """Fit on at most MOST_NETWORKS of the table's valid networks, of any space; TableError with too few."""
    networks = [network for network in table.networks if network.measurement.valid]
    if len(networks) < LEAST_NETWORKS:
        raise TableError(f"{table.path or table.key}: {len(networks)} networks, fewer than {LEAST_NETWORKS}")
    if len(networks) > MOST_NETWORKS:
        kept = np.random.default_rng(0).choice(len(networks), MOST_NETWORKS, replace=False)
        networks = [networks[int(index)] for index in np.sort(kept)]
    # variances that were tuned beside a prior are of what hosts differ by
    stored = (stored_variances(learnt) for learnt in table.learnt.values() if not stored_priors(learnt))
    variances = next((values for values in stored if values is not None), START)
    return Fit.of(timed_networks(networks, table.quiet_ms), None, variances)


def is_gain(before: np.ndarray, after: np.ndarray) -> bool:
    """Return whether errors [n] of the same networks fall by more than chance gives: the standard error of their
    paired difference."""
    paired = before - after
    return bool(paired.mean() > STANDARD_ERRORS * paired.std(ddof=1) / math.sqrt(len(paired)))


def held_out_errors(timed: FitData, prior: Prior | None, seed: int = 0) -> np.ndarray:
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


def helps(prior: Prior, timed: FitData) -> bool:
    """Return whether left-out networks of `timed` are predicted better by a prior; not if they are too few to tell."""
    return len(timed.measured_ms) >= LEAST_TO_CHOOSE and is_gain(held_out_errors(timed, None),
                                                                 held_out_errors(timed, prior))


def learnt_model(table: LatencyTable, space: SearchSpace, prior: Prior | None) -> tuple[LatencyModel, list[str]]:
    """The model of a table just measured, with notes. It starts from `prior` if it has few networks and that helps."""
    networks = usable(table, space)
    if prior is None or len(networks) >= FEW_NETWORKS or not helps(prior, timed_networks(networks, table.quiet_ms)):
        return LatencyModel.fit(table, space), []
    return LatencyModel.fit(table, space, prior=prior), [
        f"few networks: the fit starts from {len(prior.names)} other tables, the nearest is {prior.names[0]}. They "
        "predict held-out ones better than a fit from scratch"]


def nearest_prior(host_name: str, key: TableKey, space: SearchSpace) -> tuple[TablesPrior | None, list[str]]:
    """The nearest tables at hand that can be used; and notes on those that cannot.

    Nearest: at most MOST_OF_KIND of the same runtime and precision, and MOST_OF_HOST others of this host for images of
    the same shape. Among them: like threads and batch, then this host, then images of like size. The table of `key` on
    `host_name` itself is never among them.
    """
    notes: list[str] = []
    others = sorted(_others(host_name, key), key=lambda path: distance(path, host_name, key))
    of_kind = [path for path in others if _is_of_kind(path, key)]
    of_host = [path for path in others if path not in of_kind and _is_of_host(path, host_name, key)]
    fits = _fits(of_kind, space, notes, MOST_OF_KIND) | _fits(of_host, space, notes, MOST_OF_HOST)
    return TablesPrior(fits) if fits else None, notes


def stored_prior(table: LatencyTable, space: SearchSpace) -> tuple[TablesPrior | None, list[str]]:
    """The prior that a table's model was fitted with, of those of its tables that are at hand, None where it had none;
    and notes on what is missing. TableError where the table names none as it should."""
    learnt, notes = table.learnt.get(space.name, {}), list[str]()
    try:
        names = stored_priors(learnt)
    except ValueError as error:
        raise TableError(f"{table.path or table.key}: learnt: {error}. {TABLE.remedy}") from None
    wanted = {name.split(" of ")[0] for name in names}
    paths = [path for path in _others(table.host_name, table.key, every=True)
             if f"{path.parent.name}/{_stem(path)}" in wanted]
    fits = _fits(paths, space, notes, len(paths))
    kept = {name: fits[name] for name in names if name in fits}
    if missing := [name for name in names if name not in fits]:
        notes.append(f"{table.path}: was fitted starting from {', '.join(missing)} too, which is not at hand; fitted "
                     "without it")
    return TablesPrior(kept) if kept else None, notes


def _fits(paths: Iterable[Path], space: SearchSpace, notes: list[str], most: int) -> dict[str, Fit]:
    """Fits of the first `most` usable tables by name, `<host>/<key> of <date>`; `notes` gets those that are not."""
    fits: dict[str, Fit] = {}
    for path in paths:
        if len(fits) == most:
            break
        try:
            table = LatencyTable.load(path)
            fit = fit_of(table)
            entries, _ = fit.entries([usual_place(block) for block in space.reference.blocks()])
        except (HwnasError, ArithmeticError, np.linalg.LinAlgError, ValueError) as error:
            notes.append(f"not used as a start: {path}: {' '.join(str(error).removeprefix(f'{path}: ').split())}")
            continue
        if not (np.isfinite(entries).all() and entries.sum() > 0):
            notes.append(f"not used as a start: {path}: it says nothing of the blocks of {space.name}")
            continue
        fits[f"{path.parent.name}/{_stem(path)} of {table.created}"] = fit
    return fits


def _others(host_name: str, key: TableKey, *, every: bool = False) -> Iterator[Path]:
    """Files of other tables. Of a user's and a shipped table of one name the user's alone, unless `every` is asked."""
    seen = {(host_name, str(key))}
    for folder in table_dirs():
        for path in sorted([*folder.glob("*/*.json"), *folder.glob("*/*.json.gz")]):
            name = (path.parent.name, _stem(path))
            if name not in seen and _STEM.fullmatch(name[1]):
                if not every:
                    seen.add(name)
                yield path


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".json")


def _is_of_kind(path: Path, key: TableKey) -> bool:
    """Return whether a table is of the same runtime and precision, by its file's name."""
    parts = _parts_of(path)
    return (parts["runtime"], parts["precision"]) == (key.runtime, key.precision)


def _is_of_host(path: Path, host_name: str, key: TableKey) -> bool:
    """Return whether a table is of this host and images of the same shape, by its file's name."""
    parts = _parts_of(path)
    shape = ("-".join(map(str, key.sizes)), str(key.channels))
    return path.parent.name == host_name and (parts["sizes"], parts["channels"]) == shape


def _parts_of(path: Path) -> re.Match[str]:
    parts = _STEM.fullmatch(_stem(path))
    assert parts is not None
    return parts


def distance(path: Path, host_name: str, key: TableKey) -> tuple[bool, bool, float, str, str]:
    """Return how unlike the wanted table another of its rank is, by its name. The weightiest difference comes first."""
    parts = _parts_of(path)
    sizes = [int(size) for size in parts["sizes"].split("-")]
    octaves = abs(math.log2(max(sum(sizes) / len(sizes), 1.0) / (sum(key.sizes) / len(key.sizes))))
    calls = (parts["threads"], parts["batch"]) != (str(key.threads or "all"), str(key.batch))
    return calls, path.parent.name != host_name, octaves, path.parent.name, _stem(path)
