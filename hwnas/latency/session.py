"""Session: how fast a machine is now, compared with the session in which its latency table was made.

Clock, neighbours and places in memory differ from day to day, and make all networks faster or slower. So a few of the
table's own networks, the panel, are timed again before the table predicts. Their common change is the session's
factor; their differences from it give its error. Figures: docs/decisions/sessions.md.
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

PANEL, LEAST = 7, 4  # networks that are timed again, and how many of them must be valid for a factor
PANEL_S = 5.0  # most seconds of timing them
COPIES = 2  # compilations of each: their differences average out over the panel
FRESH_S = 3600.0  # a table that is no older is of this session
PANEL_TAKES_S = 12.0  # all of a panel: exports, compiling and timing
# Log standard deviation between sessions of one machine: within a day the reference took -2.0 to +5.4 % longer than in
# its table (experiments/latency_validation); after three days the difference was once larger.
BETWEEN_SESSIONS = 0.06
# Log standard deviation of single networks between sessions and processes, beyond the factor that all share: the median
# of 16 tables (experiments/latency/results/sessions/processes.csv).
NETWORKS_APART = 0.023
LEAST_ERROR = 0.005  # of a factor: seven networks may agree by chance
MOST_APART = 0.15  # standard deviation of the panel's logarithms beyond which one factor does not describe the machine


def _check(values: Mapping[str, Any]) -> None:
    """Raise ValueError for numbers that no session has."""
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
        log_std: Widens the log standard deviation of a prediction; 0 if it is the table's own session.
        table: Key and date of the table with which the session is compared.
        told: A sentence for the user.
    """

    factor: float
    log_std: float
    table: str
    told: str

    @classmethod
    def unknown(cls, table: LatencyTable, why: str) -> Session:
        """Return a session in which the panel was not timed, or not well enough."""
        return cls(1.0, math.hypot(BETWEEN_SESSIONS, NETWORKS_APART), _name_of(table),
                   f"this session's speed is not known ({why}): intervals are as wide as sessions differ, "
                   f"± {math.expm1(Z90 * BETWEEN_SESSIONS):.0%}")

    def save(self, path: Path) -> None:
        """Write it to a file, as a whole or not at all."""
        write_atomic(path, json.dumps({**SESSION.header, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def find(cls, path: Path, table: LatencyTable) -> Session | None:
        """Return the session in a file; None if there is none or it is of another table. StudyError for a bad file."""
        values = SESSION.find(path)
        if values is None or values["table"] != _name_of(table):
            return None
        return cls(**{each.name: values[each.name] for each in fields(cls)})


def measure_session(deployment: Deployment, table: LatencyTable, model: LatencyModel, console: Console) -> Session:
    """Time the panel on the deployment's machine, and estimate the session.

    Args:
        deployment: Target and machine. If the machine is not at hand, nothing is timed.
        table: The table whose networks are timed again.
        model: The model that is fitted on the table.
        console: It shows progress, and a sentence on the session.

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
        except (CandidateError, MeasurementInvalid) as error:  # a search needs no panel, but wider intervals
            session = Session.unknown(table, str(error))
        if changed := deployment.device.host.changes_since(table.host):
            session = replace(session, told=f"{session.told}; since the table was made: {changed}")
    console.note(session.told)
    return session


def choose_panel(table: LatencyTable, space_name: str) -> list[Architecture]:
    """Choose at most PANEL networks of the table, spread evenly over its latencies."""
    valid = sorted((network for network in table.networks if network.space == space_name and network.measurement.valid),
                   key=lambda network: network.measurement.latency_ms)
    indices = np.unique(np.linspace(0, len(valid) - 1, min(PANEL, len(valid)) + 2)[1:-1].round().astype(int))
    return [valid[int(index)].architecture for index in indices]


def estimate_session(table: LatencyTable, model: LatencyModel, again: Mapping[str, Measurement]) -> Session:
    """Estimate the session from the panel's measurements `again`, by architecture id.

    They are compared with the model's predictions, not with the networks' times in the table. The table scales a wave
    by its reference, which may be placed badly in memory (by 9 % in experiments/latency/results/sessions/panel.csv).
    The model has learnt such differences from all waves.

    Raises TableError if the panel's networks differ more among themselves than sessions do.
    """
    networks = {network.architecture.id: network.architecture for network in table.networks
                if network.measurement.valid}
    names = [name for name, measurement in again.items() if measurement.valid and name in networks]
    if len(names) < LEAST:
        reason = next((measurement.reason for measurement in again.values() if measurement.reason), "none ran")
        return Session.unknown(table, f"{len(names)} of {len(again)} networks were timed: {reason}")
    logs = np.log([again[name].latency_ms for name in names]) - np.log(
        model.predict_architectures([networks[name] for name in names]).mean)
    # `logs` are the networks' changes; their median is the session's, and its standard error says how well they agree.
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
    """Return whether a table was made at most FRESH_S ago; a time without a zone is UTC."""
    then = datetime.fromisoformat(table.created)
    return (datetime.now(UTC) - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds() <= FRESH_S
