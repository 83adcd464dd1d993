"""The history of a latency table: what it predicted in searches, and what their verifications then measured.

A file of lines beside the user's own table. Every search and verification on this machine is so a test of the model, in
another session than the table's. And it refines the model: how the networks of a search differed enters the fits
of later ones (`LatencyModel.fit`), which go where earlier ones went. A table that is calibrated further has a new date,
and begins a new history.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.errors import HwnasError, UserError
from hwnas.latency.table import LatencyTable, table_path
from hwnas.space.family import Architecture  # which also reads networks of families
from hwnas.system.documents import MOST_JSON, WRONG
from hwnas.system.paths import home, write_atomic

MOST_HELD = 200  # measurements of a history that enter a fit, the latest: their share of its time stays small
_MOST_APART = 5.0  # times that a network takes what was predicted, or a session what the table's took


@dataclass(frozen=True, slots=True)
class Outcome:
    """A network that was predicted in a session, and measured in it.

    Attributes:
        run: The folder of the search.
        measured_at: ISO 8601, UTC.
        factor: Of the session: latency in it over the table's.
        id: The network's.
        predicted_ms: In that session.
        low_ms: Of the 90 % interval.
        high_ms: The same.
        measured_ms: In that session.
        table_ms: Predicted in that session by the table alone, without the history that it had; None: not known.
        architecture: The network, which enters fits; None where it is none of a space, or deployed otherwise than
            calibrations do.
    """

    run: str
    measured_at: str
    factor: float
    id: str
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    table_ms: float | None = None
    architecture: Architecture | None = None

    @property
    def error(self) -> float:
        """Signed share: above 0 where the network is faster than predicted."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low_ms <= self.measured_ms <= self.high_ms

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(replace(self, architecture=None)), "architecture": None if self.architecture is None else
                self.architecture.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """Inverse of `to_dict`; ValueError and the like where the values are of no network that was measured."""
        network = values.get("architecture")
        outcome = cls(**{**values, "architecture": None if network is None else Architecture.from_dict(
            network, "history")})
        told = (outcome.predicted_ms, outcome.low_ms, outcome.high_ms, outcome.table_ms or outcome.predicted_ms)
        if not all(1 / _MOST_APART <= ratio <= _MOST_APART
                   for ratio in (outcome.factor, *(ms / outcome.measured_ms for ms in told))):
            raise ValueError("a latency or factor that no machine has")
        if not all(isinstance(text, str) for text in (outcome.run, outcome.measured_at, outcome.id)):
            raise ValueError("a name is none")
        return outcome


def history_path(table: LatencyTable) -> Path:
    """Where the history of a table is kept, also that of a shipped one: in the user's folder."""
    path = table_path(home() / "latency_tables", table.host_name, table.key)
    return path.with_name(f"{path.stem}.history.jsonl")


def append_history(table: LatencyTable, tested: Sequence[Outcome]) -> None:
    """Add networks to the history of a table; UserError where it cannot be written. Lines of a run that is verified
    again take the place of its earlier ones when they are read."""
    path = history_path(table)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                file.write(b"\n")  # a disk that was full tore the last line
            file.write(_lines(table, tested).encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Free space, or set HWNAS_HOME=FOLDER.") from None


def keep_history(table: LatencyTable, path: Path, begun: bool = False) -> list[Outcome]:
    """The history that a run's predictions are made with: copied to `path` by the process that comes first, and read
    from there by all others, also on other machines and after more was measured. A run `begun` without has none."""
    if not path.exists():
        write_atomic(path, "" if begun else _lines(table, read_history(table)))
    return read_history(table, path)


def read_history(table: LatencyTable, path: Path | None = None) -> list[Outcome]:
    """The networks that this table predicted, by its own file or the one at `path`; of a run and network the last
    measurement. A torn or foreign line is skipped, as if it had not been measured."""
    latest: dict[tuple[str, str], Outcome] = {}
    try:
        with open(path or history_path(table), "rb") as file:
            text = file.read(MOST_JSON).decode(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            values = json.loads(line)
            if values.pop("table") == table.created:
                tested = Outcome.from_dict(values)
                if tested.architecture is None or _fits(tested.architecture, table):
                    latest[tested.run, tested.id] = tested
        except (*WRONG, HwnasError, RecursionError):
            continue
    return list(latest.values())


def _fits(network: Architecture, table: LatencyTable) -> bool:
    key = table.key
    return (network.channels, network.classes) == (key.channels, key.classes) and network.image_size in key.sizes


def _lines(table: LatencyTable, tested: Sequence[Outcome]) -> str:
    return "".join(json.dumps({"table": table.created, **each.to_dict()}, separators=(",", ":")) + "\n"
                   for each in tested)


def refining(tested: Sequence[Outcome], most: int = MOST_HELD) -> list[Outcome]:
    """The outcomes that enter a fit: the latest `most`, or MOST_HELD, of networks that are known."""
    told = [each for each in tested if each.architecture is not None]
    return sorted(told, key=lambda each: each.measured_at)[max(0, len(told) - min(most, MOST_HELD)):]


def describe_history(tested: Sequence[Outcome]) -> list[str]:
    """A line for each run, oldest first, and one for all."""
    lines = []
    for run in dict.fromkeys(each.run for each in sorted(tested, key=lambda each: each.measured_at)):
        of = [each for each in tested if each.run == run]
        lines.append(f"{of[0].measured_at[:16]}  {_figures(of)}  session {of[0].factor - 1:+.1%}  {run}")
    return [*lines, f"in all: {_figures(tested)}"] if lines else []


def _figures(tested: Sequence[Outcome]) -> str:
    errors = np.array([each.error for each in tested])
    alone = [abs(each.table_ms / each.measured_ms - 1) for each in tested if each.table_ms is not None]
    of = "" if len(alone) == len(tested) else f" for {len(alone)} of them"
    told = f" ({np.mean(alone):.1%} by the table alone{of})" if alone else ""
    return (f"{sum(each.inside for each in tested)} of {len(tested)} networks inside their interval, mean error "
            f"{np.abs(errors).mean():.1%}{told}, median {np.median(errors):+.1%}")
