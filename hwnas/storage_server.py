"""What a study on a database server needs beyond one in a file: how workers connect, and a lock over all hosts."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import sqlalchemy

from hwnas.storage_errors import driver_errors, parse_url

CONNECT_S = 15
LOCK_S = 60


def server_options(url: str) -> dict[str, Any]:
    """Keyword arguments of SQLAlchemy's create_engine; none for SQLite."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return {}
    # A training may last longer than firewalls and restarts leave a connection: it is tried before it is used.
    options: dict[str, Any] = {"pool_pre_ping": True}
    if parsed.get_backend_name() == "postgresql":
        options["isolation_level"] = "READ COMMITTED"  # What the locks rely on, whatever the server's default.
        if parsed.get_driver_name() in ("psycopg", "psycopg2"):
            options["connect_args"] = _connect_args(parsed)
    return options


def _connect_args(parsed: sqlalchemy.URL) -> dict[str, Any]:
    """Heartbeats are compared in one time zone, wherever workers stand and whatever the season does to clocks."""
    given = parsed.query.get("options", "")
    given = given if isinstance(given, str) else " ".join(given)
    return {"options": f"{given} -c timezone=UTC".strip(),
            "connect_timeout": int(str(parsed.query.get("connect_timeout", CONNECT_S)))}


@contextlib.contextmanager
def server_lock(url: str, what: str) -> Iterator[None]:
    """Held for `what` by one process at a time, over all hosts, in a PostgreSQL database; elsewhere it does nothing.

    It ends with its connection, so with its process, however that ends. Database errors pass, a lock that is not had
    within LOCK_S among them; ConfigError where the driver is missing.
    """
    if parse_url(url).get_backend_name() != "postgresql":
        yield
        return
    with driver_errors(url):
        engine = sqlalchemy.create_engine(url, **{
            **server_options(url), "poolclass": sqlalchemy.NullPool, "isolation_level": "AUTOCOMMIT"})
    key = int.from_bytes(hashlib.sha256(f"hwnas {what}".encode()).digest()[:8], signed=True)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"SET lock_timeout = {LOCK_S * 1000}"))
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})
        yield
