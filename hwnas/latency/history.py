"""The history of a latency table: what it predicted in searches, and what their verifications then measured.

A file of lines beside the user's own table. Every search and verification on this machine is so a test of the model, in
another session than the table's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hwnas.errors import UserError
from hwnas.latency.table import LatencyTable, table_path
from hwnas.system.paths import home


@dataclass(frozen=True, slots=True)
class Outcome:
    """A network that was predicted in a session, and measured in it: latencies in ms, `low` to `high` is the 90 %
    interval, `factor` the session's."""

    run: str
    measured_at: str
    factor: float
    id: str
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Signed share: above 0 where the network is faster than predicted."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.low_ms <= self.measured_ms <= self.high_ms


def history_path(table: LatencyTable) -> Path:
    """Where the history of a table is kept, also that of a shipped one: in the user's folder."""
    path = table_path(home() / "latency_tables", table.host_name, table.key)
    return path.with_name(f"{path.stem}.history.jsonl")


def append_history(table: LatencyTable, tested: Sequence[Outcome]) -> None:
    """Add networks to the history of a table; UserError where it cannot be written. Lines of a run that is verified
    again take the place of its earlier ones when they are read."""
    path = history_path(table)
    lines = "".join(json.dumps({"table": table.created, **asdict(each)}, separators=(",", ":")) + "\n"
                    for each in tested)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Free space, or set HWNAS_HOME=FOLDER.") from None


def read_history(table: LatencyTable) -> list[Outcome]:
    """The networks that this table predicted; of a run and network the last measurement. A torn or foreign line is
    skipped: the history decides nothing."""
    latest: dict[tuple[str, str], Outcome] = {}
    try:
        text = history_path(table).read_text(errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            values = json.loads(line)
            if values.pop("table") == table.created:
                tested = Outcome(**values)
                tested.inside, tested.error  # noqa: B018  both need numbers
                latest[tested.run, tested.id] = tested
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
            continue
    return list(latest.values())


def describe_history(tested: Sequence[Outcome]) -> list[str]:
    """A line for each run, oldest first, and one for all."""
    lines = []
    for run in dict.fromkeys(each.run for each in sorted(tested, key=lambda each: each.measured_at)):
        of = [each for each in tested if each.run == run]
        lines.append(f"{of[0].measured_at[:16]}  {_figures(of)}  session {of[0].factor - 1:+.1%}  {run}")
    return [*lines, f"in all: {_figures(tested)}"] if lines else []


def _figures(tested: Sequence[Outcome]) -> str:
    errors = np.array([each.error for each in tested])
    return (f"{sum(each.inside for each in tested)} of {len(tested)} networks inside their interval, mean error "
            f"{np.abs(errors).mean():.1%}, median {np.median(errors):+.1%}")
