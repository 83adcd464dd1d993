"""Session: how fast a machine is now, beside the session in which its latency table was made.

Clock, neighbours and the places of memory differ from day to day, and all networks get faster or slower by it. So a few
of the table's own networks, the panel, are timed again before the table predicts. Their common part is the
session's factor; the rest is its error. Figures: docs/decisions/sessions.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hwnas.errors import CandidateError, MeasurementInvalid, StudyError, TableError
from hwnas.latency.measurement import Measurement, robust_error
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import time_networks
from hwnas.space.architecture import Architecture
from hwnas.stats import Z90
from hwnas.system.documents import Document
from hwnas.system.paths import write_atomic

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.latency.deployment import Deployment

PANEL, LEAST = 7, 4  # networks that are timed again, and that must be quiet enough to tell the factor
PANEL_S = 5.0  # most seconds of timing them
COPIES = 2  # compiled of each: what copies differ by averages out over the panel
FRESH_S = 3600.0  # a table that is no older is of this session
PANEL_TAKES_S = 12.0  # all of a panel: exports, compiling and timing
# Log standard deviation between sessions of one machine: within a day the reference stood -2.0 to +5.4 % beside its
# table (experiments/latency_validation); after three days it once stood further off.
BETWEEN_SESSIONS = 0.06
# Log standard deviation of single networks between sessions and processes, beyond the factor that all share: the median
# of 16 tables (experiments/latency/results/sessions/processes.csv).
NETWORKS_APART = 0.023
LEAST_ERROR = 0.005  # of a factor: seven networks may agree by chance
MOST_APART = 0.15  # standard deviation of the panel's logarithms beyond which one factor does not tell the machine


def _check(values: Mapping[str, Any]) -> None:
    """ValueError for numbers that no session has."""
    if not (values["factor"] > 0 and values["log_std"] >= 0):
        raise ValueError("factor must be above 0, log_std at least 0")


SESSION = Document("hwnas-session", 2, "the session of a search", "Delete it, and the machine's state is measured "
                   "again.", StudyError, rule=_check, shape={
                       "factor": float, "log_std": float, "table": str, "told": str})


@dataclass(frozen=True, slots=True)
class Session:
    """The factor by which networks take longer now than in the session of their table.

    Attributes:
        factor: Latency now over the table's (1.1: a network takes 10 % longer).
        log_std: Added to the log standard deviation of a prediction; 0 if it is the table's own session.
        table: The table that it stands beside: its key and date.
        told: A sentence on it.
    """

    factor: float
    log_std: float
    table: str
    told: str

    @classmethod
    def unknown(cls, table: LatencyTable, why: str) -> Session:
        """A session in which the panel was not timed."""
        return cls(1.0, math.hypot(BETWEEN_SESSIONS, NETWORKS_APART), _name_of(table),
                   f"this session's speed is not known ({why}): intervals are as wide as sessions differ, "
                   f"± {math.expm1(Z90 * BETWEEN_SESSIONS):.0%}")

    def save(self, path: Path) -> None:
        """Write it to a file, whole or not at all."""
        write_atomic(path, json.dumps({**SESSION.header, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def find(cls, path: Path, table: LatencyTable) -> Session | None:
        """The session in a file, where it stands beside this table; StudyError for a file that cannot be read."""
        values = SESSION.find(path)
        if values is None or values["table"] != _name_of(table):
            return None
        return cls(**{each.name: values[each.name] for each in fields(cls)})


def measure_session(deployment: Deployment, table: LatencyTable, model: LatencyModel, console: Console) -> Session:
    """Time the panel on the deployment's machine, and estimate the session.

    Args:
        deployment: Target and machine; where it is not at hand, nothing is timed.
        table: The table whose networks are timed again.
        model: Fitted on the table.
        console: Hears progress, and what the session is.

    Raises:
        TableError: The panel's networks do not agree on one factor: the table is of another machine or another state.
    """
    if not deployment.at_hand:
        session = Session.unknown(table, f"{deployment.host_name} is not this machine")
    elif _is_fresh(table):
        session = Session(1.0, 0.0, _name_of(table), "the latency table is of this session")
    else:
        panel = choose_panel(table, model.space.name)
        try:
            with console.step(f"time {len(panel)} networks of the latency table again", PANEL_TAKES_S) as report:
                again = time_networks(panel, deployment.target, table.reference,
                                      replace(table.protocol, max_seconds=PANEL_S, copies=COPIES), progress=report,
                                      device=deployment.device)
            session = estimate_session(table, model, again)
        except (CandidateError, MeasurementInvalid) as error:  # it needs no panel to go on, with wider intervals
            session = Session.unknown(table, str(error))
        if changed := deployment.device.host.changes_since(table.host):
            session = replace(session, told=f"{session.told}; since the table was made: {changed}")
    console.note(session.told)
    return session


def choose_panel(table: LatencyTable, space_name: str) -> list[Architecture]:
    """Choose at most PANEL networks of the table, spread evenly over its latencies."""
    valid = sorted((network for network in table.networks if network.space == space_name and network.measurement.valid),
                   key=lambda network: network.measurement.latency_ms)
    picked = np.unique(np.linspace(0, len(valid) - 1, min(PANEL, len(valid)) + 2)[1:-1].round().astype(int))
    return [valid[int(index)].architecture for index in picked]


def estimate_session(table: LatencyTable, model: LatencyModel, again: Mapping[str, Measurement]) -> Session:
    """The session that the panel's measurements show, by architecture id.

    They stand beside what the model predicts of them, not beside their times in the table: a wave of a calibration is
    put to the table's speed by its reference, which may itself land badly in a wave (by 9 % in
    experiments/latency/results/sessions/panel.csv). The model knows that, as it knows all waves.

    TableError where its networks differ more among themselves than sessions do.
    """
    held = {network.architecture.id: network.architecture for network in table.networks if network.measurement.valid}
    names = [name for name, measurement in again.items() if measurement.valid and name in held]
    if len(names) < LEAST:
        reason = next((measurement.reason for measurement in again.values() if measurement.reason), "none ran")
        return Session.unknown(table, f"{len(names)} of {len(again)} networks were timed: {reason}")
    logs = np.log([again[name].latency_ms for name in names]) - np.log(
        model.predict_architectures([held[name] for name in names]).mean)
    error = max(robust_error(logs), LEAST_ERROR)
    if error * math.sqrt(len(logs)) > MOST_APART:
        raise TableError(f"{table.path or table.key} does not fit this machine any more: of its networks, timed again, "
                         f"one takes {np.expm1(logs.min()):+.0%} and another {np.expm1(logs.max()):+.0%}. Measure it "
                         f"anew: hwnas profile target=NAME space={model.space.name} {table.key.images} fresh=true")
    apart = math.expm1(float(np.median(logs)))
    return Session(1 + apart, math.hypot(error, NETWORKS_APART), _name_of(table),
                   f"this session is {abs(apart):.1%} {'slower' if apart > 0 else 'faster'} than the latency table's "
                   f"(± {error:.1%}, by {len(logs)} of its networks; intervals add what single networks differ by "
                   "between sessions)")


def _name_of(table: LatencyTable) -> str:
    return f"{table.key} of {table.created}"


def _is_fresh(table: LatencyTable) -> bool:
    """Return whether a table is of the last hour."""
    then = datetime.fromisoformat(table.created)
    return (datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds() <= FRESH_S
