"""Predictions beside what a verification measures: they follow the reference network from their session to then."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hwnas.front.rows import FrontRow
from hwnas.latency.session import Session, drift


def describe_session(sessions: Mapping[str, Session], rows: Sequence[FrontRow]) -> dict[str, Any]:
    """Return what `environment.json` holds of the session that the predictions of `rows` are of.

    Args:
        sessions: By deployment, of which the first runs the reference network when rows are timed.
        rows: As they were predicted.
    """
    several = len(sessions) > 1
    told = "; ".join(f"{name}: {session}" if several else str(session) for name, session in sessions.items())
    return {"told": told, "reference_ms": next(iter(sessions.values())).reference_ms, "of": _digest(rows)}


def follow_reference(rows: Sequence[FrontRow], session: Mapping[str, Any], reference_ms: float | None, name: str
                     ) -> tuple[list[FrontRow], dict[str, Any]]:
    """Move predictions to the moment at which their networks were timed.

    Args:
        rows: As verified.
        session: What `environment.json` holds of it.
        reference_ms: Of the reference network, which was timed beside them; None where nothing was.
        name: The deployment that ran the reference: what it says of others is not known, and their rows stay.
    """
    before_ms = session.get("reference_ms", 0.0)
    if reference_ms is None or before_ms <= 0:
        return list(rows), dict(session)
    pace = float(drift(np.array([reference_ms]), before_ms)[0])
    moved = [row.at_pace(pace / session.get("drift", 1.0)) if row.deployment == name else row for row in rows]
    return moved, {**session, "drift": pace, "of": _digest(moved)}


def can_follow(rows: Sequence[FrontRow], environment: Mapping[str, Any], host_name: str, runtime_version: str) -> bool:
    """Return whether the predictions of a run's `rows` are of the session that its environment holds, on this host and
    this version of the runtime. They are not if a kill came between the files of an earlier verification."""
    session = environment["session"]
    return (session.get("of") == _digest(rows) and session.get("drift", 1.0) > 0
            and environment.get("searched_for") == host_name
            and runtime_version in environment.get("runtime", "").split(", "))


def _digest(rows: Sequence[FrontRow]) -> str:
    """Names the predictions of these rows, as `front.csv` holds them."""
    told = sorted(f"{row.id} {row.latency_ms_predicted:.6g}" for row in rows if row.latency_ms_predicted is not None)
    return hashlib.sha256(" ".join(told).encode()).hexdigest()[:16]
