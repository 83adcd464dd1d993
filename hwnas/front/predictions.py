"""Predictions beside what a verification measures: moved to its session before, kept in the table's history after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwnas.errors import UserError
from hwnas.front.rows import FrontRow, in_session
from hwnas.latency.history import Outcome, append_history
from hwnas.latency.session import Session, measure_session, name_of
from hwnas.latency.table import LatencyTable, find_table
from hwnas.system.documents import now
from hwnas.system.run_folder import ENVIRONMENT, RunFolder

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.latency.deployment import Deployment


def move_to_now(rows: Sequence[FrontRow], began: Session, table: LatencyTable, space_name: str, deployment: Deployment,
                console: Console) -> tuple[list[FrontRow], Session]:
    """Move predictions to the machine as it is now.

    Args:
        rows: Their predictions are of the session `began`, the one in which the search predicted.
        table: What predicted them; networks of `space_name` in it are timed again, unless `began` was measured within
            the last hour.
        deployment: The machine that verifies.
        console: Hears what the session is.

    Returns:
        The rows, and the session that they are of. Where the machine is too busy to tell it, that is `began`.
    """
    session = began
    if began.why or not began.is_fresh:
        measured = measure_session(deployment, table, space_name, console)
        session = began if measured.why else measured
    return [in_session(row, session.factor / began.factor) for row in rows], session


def find_prediction(environment: Mapping[str, Any], host_name: str, path: Path
                    ) -> tuple[Session, LatencyTable, str] | None:
    """The session, table and space by which a run's networks were predicted for this host.

    None where the run does not say, or where the table is not here any more; StudyError where `environment`, the
    content of the file `path`, holds no such session.
    """
    held = environment.get("session")
    if not isinstance(held, dict) or environment.get("searched_for") != host_name:
        return None
    with ENVIRONMENT.reading(path):
        session = Session.from_dict(held)
    table = find_table(host_name, session.table.rpartition(" of ")[0])
    if table is None or name_of(table) != session.table:
        return None
    space = environment.get("space")
    return session, table, str(space) if space in table.spaces() else min(table.spaces())


def keep_outcomes(table: LatencyTable, rows: Sequence[FrontRow], run: RunFolder, session: Session, console: Console
                  ) -> None:
    """Append what was predicted and then measured to the table's history; a line where that cannot be written."""
    tested = [Outcome(str(run.path.absolute()), now(), session.factor, row.id, row.latency_ms_predicted,
                      row.latency_ms_predicted_low, row.latency_ms_predicted_high, row.latency_ms)
              for row in rows if row.verified and row.latency_ms is not None and row.latency_ms_predicted is not None
              and row.latency_ms_predicted_low is not None and row.latency_ms_predicted_high is not None]
    try:
        append_history(table, tested)
    except UserError as error:  # a home that cannot be written: the front does not need it
        console.say(f"note: {error}")


def describe_session(session: Session) -> dict[str, Any]:
    """What `environment.json` holds of a session."""
    return {**asdict(session), "told": str(session)}
