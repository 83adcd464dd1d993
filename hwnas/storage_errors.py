"""Where a study is and what went wrong there, in one line."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from hwnas.errors import ConfigError, StudyError


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite URL, None for another database; ConfigError when the URL cannot be read."""
    try:
        parsed = sqlalchemy.engine.make_url(url)
    except SQLAlchemyError:
        raise ConfigError(f"storage: {url!r} is not a database URL. Write e.g. sqlite:///runs/mine/study.db or "
                          "postgresql+psycopg://user@host/name.") from None
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError("storage: a study in memory would be lost. Name a file: sqlite:///runs/mine/study.db.")
    return Path(str(parsed.database))


def shown(url: str) -> str:
    """The URL as messages may print it: a path for SQLite, otherwise with the password hidden."""
    path = sqlite_path(url)
    return str(path) if path else sqlalchemy.engine.make_url(url).render_as_string(hide_password=True)


_ADVICE = (
    ("not a database", "Move it away to start anew, or restore it from a copy."),
    ("malformed", "Move it away to start anew, or restore it from a copy."),
    ("full", "Free space on that disk, then give the same command again."),
    ("disk i/o", "Check the disk and its free space, then give the same command again."),
    ("readonly", "Make file and folder writable, or choose another folder."),
    ("unable to open", "Check that its folder exists and can be written."),
    ("locked", "Another program holds it: close that, then give the same command again."),
)


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn database errors inside into a StudyError of one line: fact, place, next step."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        fact = " ".join(str(getattr(cause, "orig", None) or cause).split())
        step = next((advice for word, advice in _ADVICE if word in fact.lower()),
                    "Check the database, then give the same command again.")
        raise StudyError(f"study {shown(url)}: {fact}. {step}") from error
