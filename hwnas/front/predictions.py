"""Predictions beside what a verification measures: they are moved to its session before."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hwnas.cli.progress import Console
from hwnas.errors import TableError
from hwnas.front.rows import FrontRow
from hwnas.latency.deployment import Deployment
from hwnas.latency.model import LatencyModel, predict_known, widen
from hwnas.latency.session import BETWEEN_SESSIONS, Session, measure_session, name_of
from hwnas.latency.table import LatencyTable, find_table
from hwnas.space.architecture import Architecture
from hwnas.system.run_folder import ENVIRONMENT

_KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")  # of a table, which names a file: no folder


@dataclass(frozen=True)
class Predicted:
    """The source of a run's predictions: the table, the space of it, and the session that predictions are of. `model`:
    in that session; if it is not at hand, one is fitted on the table."""

    session: Session
    table: LatencyTable
    space_name: str
    model: LatencyModel | None = None

    def predict(self, networks: Sequence[Architecture]) -> np.ndarray:
        """Latency in ms [n], in the table's session, of networks that the table holds."""
        if self.model is not None:
            return np.asarray(self.model.predict_architectures(networks).mean / self.session.factor)
        return predict_known(self.table, self.space_name, networks)


def move_to_now(rows: Sequence[FrontRow], predicted: Predicted, deployment: Deployment, console: Console
                ) -> tuple[list[FrontRow], Session]:
    """Move predictions to the machine as it is now.

    Args:
        rows: With predictions of the session of `predicted`.
        predicted: Networks of its table are timed again, unless its session was measured within the last hour.
        deployment: The machine that verifies.
        console: Hears what the session is.

    Returns:
        The rows, and the session that they are of. Where the session cannot be told, intervals get as wide as sessions
        differ, nothing else is moved, and `why` of the session says the reason.
    """
    began = session = predicted.session
    if began.why or not began.is_fresh:
        try:
            session = measure_session(deployment, predicted.table, predicted.predict, predicted.space_name, console)
        except TableError as error:  # the front is measured all the same
            console.say(f"note: predictions are left as they were. {error}")
            session = replace(began, why=str(error))
        if session.why:
            session = replace(began, why=session.why, standard_error=max(began.standard_error, BETWEEN_SESSIONS),
                              reference_ms=0.0)
    variance = session.log_std**2 - began.log_std**2
    return [_in_session(row, session.factor / began.factor, variance) for row in rows], session


def move_all_to_now(rows: Sequence[FrontRow], predicted: Mapping[str, tuple[Predicted, Deployment]], console: Console
                    ) -> tuple[list[FrontRow], dict[str, Session]]:
    """As `move_to_now` for the rows of each deployment, by its name; returns the rows, and the session of each."""
    moved, sessions = {row.id: row for row in rows}, {}
    for name, (by, deployment) in predicted.items():
        mine, sessions[name] = [row for row in rows if row.deployment == name], by.session
        if not mine:  # no network of the front runs so, and its session is of no use
            continue
        part, sessions[name] = move_to_now(mine, by, deployment, console)
        moved |= {row.id: row for row in part}
    return [moved[row.id] for row in rows], sessions


def follow_reference(rows: Sequence[FrontRow], sessions: Mapping[str, Session], reference_ms: float | None, name: str
                     ) -> tuple[list[FrontRow], dict[str, Session]]:
    """Move predictions on to the moment at which their networks were timed.

    Args:
        rows: As verified.
        sessions: That their predictions are of, by deployment.
        reference_ms: Of the reference network, which was timed beside them; None where nothing was.
        name: The deployment that ran the reference: what it says of others is not known, and their rows stay.
    """
    if reference_ms is None or name not in sessions:
        return list(rows), dict(sessions)
    session = sessions[name].drifted(reference_ms)
    pace = session.factor / sessions[name].factor
    return [_in_session(row, pace, 0.0) if row.deployment == name else row for row in rows], {**sessions, name: session}


def find_prediction(environment: Mapping[str, Any], rows: Sequence[FrontRow], host_name: str, runtime_version: str,
                    path: Path, deployment: str = "") -> Predicted | None:
    """Return what predicted a run's networks for this host, by what its environment says.

    Args:
        environment: Content of the file `path`.
        rows: Of the run's front, those of this deployment.
        host_name: The machine that verifies.
        runtime_version: Of the runtime that it has.
        path: For errors.
        deployment: The name of the target, if the run has several; otherwise empty.

    Returns:
        None if the run does not say, or was searched for another host. None if the table is not here any more,
        cannot be read, or is of another version of the runtime. None if a kill came between the files of an earlier
        verification, so that rows and session do not belong together.

    Raises:
        StudyError: The environment holds no such session.
    """
    held = environment.get("session")
    if isinstance(held, dict) and deployment:
        several = held.get("of_deployments")
        held = several.get(deployment) if isinstance(several, dict) else None
    if not isinstance(held, dict) or environment.get("searched_for") != host_name:
        return None
    with ENVIRONMENT.reading(path):
        session = Session.from_dict(held)
    key = session.table.rpartition(" of ")[0]
    try:
        table = find_table(host_name, key) if _KEY.fullmatch(key) else None
    except TableError:
        return None
    if (table is None or not table.networks or name_of(table) != session.table
            or table.runtime_version != runtime_version or held.get("of") != digest_predictions(rows)):
        return None
    space = environment.get("space")
    return Predicted(session, table, str(space) if space in table.spaces() else min(table.spaces()))


def digest_predictions(rows: Sequence[FrontRow]) -> str:
    """Names the predictions of these rows, as `front.csv` holds them."""
    told = sorted(f"{row.id} {row.latency_ms_predicted:.6g}" for row in rows if row.latency_ms_predicted is not None)
    return hashlib.sha256(" ".join(told).encode()).hexdigest()[:16]


def describe_sessions(sessions: Mapping[str, Session], rows: Sequence[FrontRow]) -> dict[str, Any]:
    """Return what `environment.json` holds of the sessions that the predictions of `rows` are of, by deployment; the
    one of a run with a single target has no name."""
    described = {name: {**asdict(session), "told": str(session),
                        "of": digest_predictions([row for row in rows if row.deployment == name])}
                 for name, session in sessions.items()}
    if "" in described:
        return described[""]
    return {"told": "; ".join(f"{name}: {each['told']}" for name, each in described.items()),
            "of_deployments": described}


def _in_session(row: FrontRow, pace: float, variance: float) -> FrontRow:
    """The row with predicted latencies for another session.

    Args:
        row: Predicted for one session.
        pace: How many times as long networks take in the other.
        variance: Of the logarithm of how fast that one is, less the same of the first: intervals get wider by it.
    """
    predicted_ms, low_ms, high_ms = (row.latency_ms_predicted, row.latency_ms_predicted_low,
                                     row.latency_ms_predicted_high)
    if predicted_ms is None or low_ms is None or high_ms is None:
        return row
    middle_ms = math.sqrt(low_ms * high_ms)
    half = math.exp(float(widen(np.array(math.log(high_ms / middle_ms)), variance)))
    return replace(row, latency_ms_predicted=pace * predicted_ms, latency_ms_predicted_low=pace * middle_ms / half,
                   latency_ms_predicted_high=pace * middle_ms * half)
