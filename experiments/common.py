"""What the experiments share: a table's networks as arrays, figures of merit, tables in text, the look of pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from hwnas.cli.progress import number
from hwnas.cli.progress import text_table as table_lines
from hwnas.errors import ConfigError, DataError, HwnasError, TableError, UnknownName
from hwnas.latency.measurement import Measurement, Protocol
from hwnas.latency.table import LEAST_NETWORKS, LatencyTable, TimedNetwork
from hwnas.space.architecture import Architecture
from hwnas.space.search_space import SearchSpace
from hwnas.stats import kendall_tau, non_dominated, spearman
from hwnas.system.documents import WRONG
from hwnas.system.paths import write_atomic
from hwnas.system.tables import finite
from hwnas.target import Host
from hwnas.validate import VALIDATION

COLOURS = ("#8fb3e6", "#0e9384", "#98a2b3", "#e9a23b", "#c2410c", "#7a5af8", "#1f5fbf", "#d444f1")


def command(main: Callable[[], None]) -> None:
    """Run it; an error that the user can mend is one line."""
    try:
        main()
    except HwnasError as error:
        sys.exit(f"error: {error}")


def read_cells(path: Path, columns: Sequence[str], usage: str) -> dict[str, list[Any]]:
    """These columns of a CSV (all cells text) or Parquet file (with its types). DataError, which ends with `usage`;
    UnknownName for a column that is not there."""
    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_table

            cells = read_table(path).to_pydict()
        else:
            cells = pd.read_csv(path, dtype=str, na_filter=False, index_col=False).to_dict("list")
    except (OSError, ValueError) as error:  # those of pandas and pyarrow are ValueErrors
        raise DataError(f"{path}: cannot be read ({error}). {usage}") from error
    missing = [column for column in columns if column not in cells]
    if len(missing) == 1:
        raise UnknownName(f"column of {path}", missing[0], map(str, cells))
    if missing:
        raise DataError(f"{path} has no columns {', '.join(missing)}. It has: {', '.join(map(str, cells))}.")
    return {column: cells[column] for column in columns}


@dataclass(frozen=True)
class Stored:
    """A report of hwnas.validate as it was read, and what it says was measured."""

    report: Mapping[str, Any]
    networks: list[TimedNetwork]


def load_validation(path: Path) -> Stored:
    """Read a report; TableError names file, place and what is wrong with it."""
    report = VALIDATION.read(path)
    try:
        protocol = Protocol.from_dict(report["protocol"])
        networks = [TimedNetwork(report["space"]["name"],
                                 Architecture.from_dict(entry["architecture"], f"networks[{index}]"),
                                 Measurement.from_dict(entry, protocol, f"networks[{index}]"), entry["group"])
                    for index, entry in enumerate(report["networks"])]
    except (*WRONG, HwnasError) as error:
        raise TableError(f"{path}: {error} ({type(error).__name__}). {VALIDATION.remedy}") from None
    return Stored(report, networks)


def hypervolume_2d(top1: ArrayLike, latency_ms: ArrayLike, reference: tuple[float, float]) -> float:
    """Area between the front and `reference` (top-1, latency in ms); top-1 is maximised, latency minimised.

    Points that do not beat the reference in both coordinates add nothing.
    """
    worst_top1, worst_latency = reference
    points = np.column_stack([np.asarray(top1, dtype=np.float64), np.asarray(latency_ms, dtype=np.float64)])
    points = points[(points[:, 0] > worst_top1) & (points[:, 1] < worst_latency)]
    if not len(points):
        return 0.0
    front = points[non_dominated(points, (False, True))]
    front = front[np.argsort(front[:, 1], kind="stable")]
    until = np.append(front[1:, 1], worst_latency)
    return float(((until - front[:, 1]) * (front[:, 0] - worst_top1)).sum())


def arguments_of(given: Sequence[str] | None, known: Sequence[str], doc: str | None) -> dict[str, str]:
    """`key=value` arguments of a script (None: the command's); prints its `doc` and ends where help is asked for.
    ConfigError for a key that is not `known`."""
    values = dict(argument.partition("=")[::2] for argument in (sys.argv[1:] if given is None else given))
    if {"-h", "--help"} & values.keys():
        print(doc)
        sys.exit(0)
    if unknown := [name for name in values if name not in known]:
        raise ConfigError(f"no option is called {unknown[0]!r}. There are: {', '.join(known)}.")
    return values


def space_of(name: str, table: LatencyTable) -> SearchSpace:
    """The space as the table's networks have it."""
    return SearchSpace.load(name, channels=table.key.channels, classes=table.key.classes)


def networks_of(table: LatencyTable, space_name: str) -> list[TimedNetwork]:
    """Valid networks of the space; TableError with too few."""
    found = [one for one in table.networks if one.space == space_name and one.measurement.valid]
    if len(found) < LEAST_NETWORKS:
        raise TableError(f"{table.path}: {len(found)} networks of space {space_name}; {LEAST_NETWORKS} are needed. "
                         f"Measure them: python -m hwnas.profile +target=… space={space_name}")
    return found


def figures(predicted_ms: np.ndarray, measured_ms: np.ndarray) -> dict[str, float | None]:
    """Mean error, shares within 5 and 10 %, rank correlations."""
    error = np.abs(predicted_ms / measured_ms - 1)
    return {"mean_error": float(error.mean()), "within_5": float((error <= 0.05).mean()),
            "within_10": float((error <= 0.10).mean()),
            "spearman": finite(correlate(spearman, predicted_ms, measured_ms)),
            "kendall": finite(correlate(kendall_tau, predicted_ms, measured_ms))}


def correlate(ranks: Callable[[Any, Any], float], first: np.ndarray, second: np.ndarray) -> float:
    """Correlate two rankings [n]; NaN for fewer than three networks."""
    return ranks(first, second) if len(first) > 2 else float("nan")


def circumstances(table: LatencyTable) -> dict[str, Any]:
    """Which measurements an experiment rests on, and where it ran."""
    return {"table": table.path.name if table.path else None, "measured_on": table.host_name,
            "runtime": table.runtime_version, "measured_at": table.created, "key": str(table.key),
            "computed_on": Host.detect().name}


def save_json(path: Path, data: Any) -> None:
    """Plain, readable JSON."""
    write_atomic(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line a row, with every digit; the first row names the columns."""
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([list(row.values()) for row in rows], columns=list(rows[0]), dtype=object)
    write_atomic(path, frame.to_csv(index=False, lineterminator="\n"))


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head, the first column names."""
    return "\n".join(table_lines(rows))


def percent(value: float | None) -> str:
    """With one decimal; a dash for what cannot be told."""
    return number(value, ".1%")
