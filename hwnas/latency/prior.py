"""Prior: the entries of other tables, as a start for a calibration with few measurements.

The nearest tables of the same runtime and precision are taken together. Each enters a fit as one more cost that
multiplies its entries (features.py). So a host that is faster all over differs by one number, and the measurements
decide the weight of each table. The experiment experiments/latency/transfer drew 10 to 50 networks of 30 tables, 516
times. In 511 draws such a start was better than a fit from scratch, or nearly as good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.errors import HwnasError, TableError
from hwnas.latency.features import START, usual_place
from hwnas.latency.model import Fit, stored_fit, timed_networks
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TableKey, list_tables
from hwnas.space.blocks.block import BlockSpec

if TYPE_CHECKING:
    from hwnas.space.search_space import SearchSpace

FEW_NETWORKS = 200  # a calibration with more networks gains too little from a prior to look for one
MOST_TABLES = 4
MOST_NETWORKS = 300  # of a foreign table: more add little to a prior and take long
NamedPath = tuple[str, Path]  # <host>/<key>, and the file


class TablesPrior:
    """Entries of blocks in other tables, which are called `names`. Each block is predicted once."""

    def __init__(self, fits: dict[str, Fit]) -> None:
        self.names = tuple(fits)
        self._fits = tuple(fits.values())
        self._known: dict[BlockSpec, np.ndarray] = {}

    def block_ms(self, blocks: Sequence[BlockSpec]) -> np.ndarray:
        """Return the entries of `blocks` in each table, ms [n, tables], each in its `usual_place`."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._known]
        if new:
            places = [usual_place(block) for block in new]
            entries = np.column_stack([fit.entries(places)[0] for fit in self._fits])
            self._known.update(zip(new, entries, strict=True))
        return np.array([self._known[block] for block in blocks]).reshape(-1, len(self.names))


def fit_of(table: LatencyTable) -> Fit:
    """Fit on at most MOST_NETWORKS valid networks of the table, of any space; TableError if there are too few."""
    networks = [network for network in table.networks if network.measurement.valid]
    if len(networks) < LEAST_NETWORKS:
        raise TableError(f"{table.path or table.key}: {len(networks)} networks, fewer than {LEAST_NETWORKS}")
    if len(networks) > MOST_NETWORKS:
        sampled = np.random.default_rng(0).choice(len(networks), MOST_NETWORKS, replace=False)
        networks = [networks[int(index)] for index in np.sort(sampled)]
    # Variances that were tuned beside a prior describe the differences between hosts, so they are not used here.
    stored = (stored_fit(table, name) for name in table.learnt)
    variances = next((np.array(learnt.variances) for learnt in stored if learnt and not learnt.priors), START)
    return Fit.of(timed_networks(networks, table.quiet_ms), None, variances)


def nearest_prior(host_name: str, key: TableKey, space: SearchSpace) -> tuple[TablesPrior | None, list[str]]:
    """Return a prior of the nearest usable tables, at most MOST_TABLES (None: of no table), and notes on unusable ones.

    They are of the same runtime and precision. Tables with the same threads and batch come first, then tables of this
    host, then tables with images of like size. The table of `key` on `host_name` itself is never among them. If a
    user's and a shipped table have one name, the user's is taken.
    """
    others: dict[tuple[str, TableKey], Path] = {}
    for host, other, path in list_tables():
        if (other.runtime, other.precision) == (key.runtime, key.precision) and (host, other) != (host_name, key):
            others.setdefault((host, other), path)
    nearest = sorted(others, key=lambda each: distance(each[0], each[1], host_name, key))
    fits, notes = _fit_tables(((f"{host}/{other}", others[host, other]) for host, other in nearest), space, MOST_TABLES)
    return TablesPrior(fits) if fits else None, notes


def stored_prior(table: LatencyTable, space: SearchSpace) -> tuple[TablesPrior | None, list[str]]:
    """Return the prior with which a table's model was fitted, from the tables that are still at hand, or None; and
    notes on missing ones. TableError if the stored fit is damaged."""
    learnt = stored_fit(table, space.name)
    names = learnt.priors if learnt else ()
    prior_tables = {name.split(" of ")[0] for name in names}
    files = [(f"{host}/{key}", path) for host, key, path in list_tables() if f"{host}/{key}" in prior_tables]
    fits, notes = _fit_tables(files, space, len(files))
    # The order of the names is that of the fit's columns; a table that has changed has another date in its name.
    fits_in_order = {name: fits[name] for name in names if name in fits}
    if missing := [name for name in names if name not in fits]:
        notes.append(f"{table.path}: was fitted starting from {', '.join(missing)} too, which is not at hand; fitted "
                     "without it")
    return TablesPrior(fits_in_order) if fits_in_order else None, notes


def _fit_tables(files: Iterable[NamedPath], space: SearchSpace, most: int) -> tuple[dict[str, Fit], list[str]]:
    """Return fits of the first `most` usable tables by name, `<host>/<key> of <date>`, and notes on unusable ones."""
    fits, notes = dict[str, Fit](), list[str]()
    for name, path in files:
        if len(fits) == most:
            break
        try:  # no fault of a table may stop the calibration of another: it becomes a note
            table = LatencyTable.load(path)
            fit = fit_of(table)
            # Predict the space's reference: entries that are no numbers, or all 0, are of no use.
            entries, _ = fit.entries([usual_place(block) for block in space.reference.blocks()])
        except (HwnasError, ArithmeticError, np.linalg.LinAlgError, ValueError) as error:
            notes.append(f"not used as a start: {path}: {' '.join(str(error).removeprefix(f'{path}: ').split())}")
            continue
        if not (np.isfinite(entries).all() and entries.sum() > 0):
            notes.append(f"not used as a start: {path}: it says nothing of the blocks of {space.name}")
            continue
        fits[f"{name} of {table.created}"] = fit
    return fits, notes


def distance(host: str, other: TableKey, host_name: str, key: TableKey) -> tuple[bool, bool, float, str, str]:
    """Return how unlike the table of `key` on `host_name` another one is. The most important difference comes first."""
    octaves = abs(math.log2(max(float(np.mean(other.sizes)), 1.0) / float(np.mean(key.sizes))))
    calls = (other.threads, other.batch) != (key.threads, key.batch)
    return calls, host != host_name, octaves, host, str(other)
