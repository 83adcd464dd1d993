"""An estimator of one's own: accuracies looked up in a table of networks that others trained."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd

from hwnas.accuracy.estimator import Estimate
from hwnas.cli.options import Config, option, read_options
from hwnas.errors import ConfigError, DataError, SpaceError
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace

KEYS = ("codes", "id", "text")


@dataclass(frozen=True, slots=True)
class TabularOptions:
    """Which columns of which file hold networks and accuracies."""

    path: Path = option(what="given", help="a .csv file")
    value_column: str = option(what="given", help="of accuracies")
    key: str = option("codes", choices=KEYS, help="what key_column holds")
    key_column: str = option("arch", what="given", help="that names the network")
    std_column: str | None = option(None, help="of standard deviations (null: none)")
    percent: bool = option(True, help="whether accuracies are given in percent")


@dataclass(eq=False, slots=True)
class Tabular:
    """An AccuracyEstimator that reads published accuracies from a CSV file.

    `key` says what `key_column` holds: `codes` (the index of each choice, joined: `01220121`), `id`
    (`Architecture.id`) or `text` (`str(architecture)`). If several codes decode to one network, their mean counts.
    """

    path: Path
    name_of: Callable[[Architecture], str]
    rows: Mapping[str, tuple[float, float]] = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Names the table's content."""
        return hashlib.sha256(repr(sorted(self.rows.items())).encode()).hexdigest()[:12]

    def evaluate(self, architecture: Architecture, seed: int = 0) -> Estimate:
        """The table's accuracy and standard deviation; DataError when it has no such network."""
        name = self.name_of(architecture)
        if name not in self.rows:
            raise DataError(f"no network {name!r} ({architecture}) in {self.path} ({len(self.rows)} networks). Search "
                            "the space that the table was made of, or use accuracy=proxy.")
        value, std = self.rows[name]
        return Estimate.of_top1(value, std, "published")


def _by_id(rows: Mapping[str, tuple[float, float]], path: Path, space: SearchSpace | None
           ) -> dict[str, tuple[float, float]]:
    """The same rows, with the keys changed from codes to `Architecture.id`."""
    if space is None:
        raise ConfigError("tabular.key=codes needs a search space; use tabular.key=id or text.")
    groups: dict[str, list[tuple[float, float]]] = {}
    for codes, row in rows.items():
        try:
            architecture = space.decode(space.to_params(np.array([int(digit) for digit in codes])))
        except (ValueError, IndexError, SpaceError) as error:
            raise DataError(f"{path}: {codes!r} is no network of the search space ({error}). Give the space that the "
                            "table was made of.") from error
        groups.setdefault(architecture.id, []).append(row)
    return {name: (fmean(v for v, _ in group), fmean(s for _, s in group)) for name, group in groups.items()}


def _read(options: TabularOptions) -> dict[str, tuple[float, float]]:
    path = options.path
    columns = [name for name in (options.key_column, options.value_column, options.std_column) if name]
    try:
        cells = pd.read_csv(path, dtype=str, na_filter=False, usecols=columns)
    except (OSError, ValueError) as error:  # a missing column is one, too
        raise DataError(f"{path}: cannot be read ({error}). Give tabular.path=FILE.csv.") from error
    scale = 0.01 if options.percent else 1.0
    rows: dict[str, tuple[float, float]] = {}
    for number, record in enumerate(zip(*(cells[name] for name in columns), strict=True), 2):
        try:
            value, std = (float(text) * scale for text in [*record[1:], 0.0][:2])
        except ValueError:
            raise DataError(f"{path}, row {number}: not a number in {list(record[1:])}. Mend the row.") from None
        if not 0 <= value <= 1 or not std >= 0:
            raise DataError(f"{path}, row {number}: an accuracy must lie in 0..1, got {value:g} ± {std:g} with "
                            f"tabular.percent={options.percent}. Set tabular.percent or mend the row.")
        if rows.setdefault(str(record[0]), (value, std)) != (value, std):
            raise DataError(f"{path}, row {number}: {record[0]!r} is there twice with different values.")
    if not rows:
        raise DataError(f"{path}: no rows. Give tabular.path=FILE with at least one network.")
    return rows


def load(*, dataset: object, space: SearchSpace | None, config: Config) -> Tabular:
    """The entry point. ConfigError for an option, DataError for a file that is missing, torn or not a table."""
    options = read_options(TabularOptions, config, "tabular")
    rows = _read(options)
    if options.key == "codes":
        rows = _by_id(rows, options.path, space)
    return Tabular(options.path, str if options.key == "text" else attrgetter("id"), rows)
