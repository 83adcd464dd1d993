"""Databases that are servers or files: URLs parsed and shown without secrets, one-line errors, locks, time-outs."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

from hwnas.errors import ConfigError, StudyError

_EXAMPLES = "sqlite:///runs/mine/study.db or postgresql+psycopg://user@host/name"
# Everything up to the last @, since a password may hold one that should have been written %40.
_IN_FRONT = re.compile(r"(?<=://)([^:@/\n]*):.*@")
_BEHIND = re.compile(r"([?&](?:ssl)?password=)[^&\n]*")


def parse_url(url: str) -> sqlalchemy.URL:
    """ConfigError for what is no database URL; none of its messages shows a password."""
    try:
        parsed = sqlalchemy.engine.make_url(url)
    except (SQLAlchemyError, ValueError):  # ValueError: a port that is no number.
        raise ConfigError(f"storage: {hidden(url)!r} is not a database URL. Write e.g. {_EXAMPLES}.") from None
    if "@" in (parsed.host or ""):
        raise ConfigError(f"storage: {hidden(url)} has an @ too many. Write an @ in the password as %40.")
    return parsed


def hidden(url: str) -> str:
    """The URL without its passwords, whether or not it can be read; also a text of lines that hold URLs."""
    return _IN_FRONT.sub(r"\1:***@", _BEHIND.sub(r"\1***", url))


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL, None for another database; ConfigError when the URL cannot be read."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError("storage: a study in memory would be lost. Name a file: sqlite:///runs/mine/study.db.")
    return Path(str(parsed.database))


def shown(url: str) -> str:
    """The URL as messages may print it: a path for SQLite, otherwise with the password hidden."""
    path = sqlite_path(url)
    return str(path) if path else hidden(url)


_AGAIN = "When it is up, give the same command again: what is finished is kept."
_PLACE = "Start the server, or mend host and port in storage=."
_ADVICE = (
    ("the database system is", f"The server starts or stops. {_AGAIN}"),
    ("terminating connection", f"The server stopped or restarted. {_AGAIN}"),
    ("server closed", f"The server stopped or restarted. {_AGAIN}"),
    ("connection is closed", f"The server stopped or restarted. {_AGAIN}"),
    ("connection is lost", f"The server stopped or restarted. {_AGAIN}"),
    ("connection reset", f"The server stopped or restarted. {_AGAIN}"),
    ("connection refused", _PLACE),
    ("resolve host", _PLACE),
    ("timeout expired", _PLACE),
    ("connection timeout", _PLACE),
    ("connection to server on socket", _PLACE),
    ("authentication failed", "Mend user and password in storage= or ~/.pgpass."),
    ("no password supplied", "Write it in storage=, or better in ~/.pgpass."),
    ("fatal: database", "Create it on the server (createdb NAME), or mend its name in storage=."),
    ("fatal: role", "Create it on the server (createuser NAME), or mend the user in storage=."),
    ("too many", "Use fewer workers, or raise max_connections of the server."),
    ("permission denied", "Grant the user CREATE on that schema, or name another database."),
    ("read-only", "Name a server and database that can be written."),
    ("lock timeout", "Another worker holds it: give the same command again."),
    ("not a database", "Move it away to start anew, or restore it from a copy."),
    ("malformed", "Move it away to start anew, or restore it from a copy."),
    ("full", "Free space on that disk, then give the same command again."),
    ("no space left", "Free space on that disk, then give the same command again."),
    ("disk i/o", "Check the disk and its free space, then give the same command again."),
    ("readonly", "Make file and folder writable, or choose another folder."),
    ("unable to open", "Check that its folder exists and can be written."),
    ("locked", "Another program holds it: close that, then give the same command again."),
)


@contextlib.contextmanager
def driver_errors(url: str) -> Iterator[None]:
    """Turn the lack of a database's driver into a ConfigError that says how to install it."""
    try:
        yield
    except (ImportError, NoSuchModuleError) as error:
        backend = parse_url(url).get_backend_name()
        step = "Install it: pip install 'hwnas[postgres]', and write postgresql+psycopg://…"
        if backend not in ("postgresql", "postgres"):
            step = f"Install its driver for SQLAlchemy, or write e.g. {_EXAMPLES}."
        fact = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise ConfigError(f"storage: no driver for {shown(url)} ({fact}). {step}") from None


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn database errors inside into a StudyError of one line: fact, place, next step."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # Drivers say more below: details of a row, every address that was tried.
        lines = str(getattr(cause, "orig", None) or cause).strip().splitlines()
        fact = " ".join(lines[0].split()).rstrip(".") if lines else type(cause).__name__
        step = next((advice for word, advice in _ADVICE if word in fact.lower()),
                    "Check the database, then give the same command again.")
        raise StudyError(f"study {shown(url)}: {fact}. {step}") from error

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
