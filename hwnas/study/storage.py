"""The study's database, a file or a server: URLs, one-line errors, locks, and a storage for many processes.

The storage is Optuna's RDB storage with three changes. SQLite runs with a write-ahead log. It takes the write lock at
the start of each transaction, so that two processes cannot take the same queued trial. The parameters of a trial are
written in one transaction, and so are its attributes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from hwnas.errors import ConfigError, StudyError, hidden

_EXAMPLES = "sqlite:///runs/mine/study.db or postgresql+psycopg://user@host/name"
_DRIVERS = ("sqlite", "postgresql", "postgresql+psycopg", "postgresql+psycopg2")


def parse_url(url: str) -> sqlalchemy.URL:
    """Parse a database URL. Raises ConfigError if it is none. No message shows a password."""
    try:
        parsed = sqlalchemy.engine.make_url(url)
    except (SQLAlchemyError, ValueError):  # ValueError: a port that is no number.
        what = repr(hidden(url, whole=True)) if "://" in url else "the value"  # without :// a password may be anywhere
        raise ConfigError(f"storage: {what} is not a database URL. Write e.g. {_EXAMPLES}.") from None
    if parsed.drivername not in _DRIVERS:
        raise ConfigError(f"storage: {parsed.drivername} is no database of hwnas. Write e.g. {_EXAMPLES}.")
    if "@" in (parsed.host or ""):
        raise ConfigError(f"storage: {hidden(url, whole=True)} has an @ too many. Write an @ in the password as %40.")
    return parsed


def sqlite_path(url: str) -> Path | None:
    """Return the file of a SQLite URL, None for PostgreSQL. Raises ConfigError if the URL cannot be parsed."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError("storage: a study in memory would be lost. Name a file: sqlite:///runs/mine/study.db.")
    path = Path(str(parsed.database).replace("%3F", "?").replace("%25", "%"))  # a plain ? starts the URL's options
    return path.expanduser()


def shown(url: str) -> str:
    """Return the URL as text for messages: the path for SQLite, otherwise the URL with its password hidden."""
    path = sqlite_path(url)
    return str(path) if path else hidden(url, whole=True)


_ADVICE = {  # the next step, by words in the message of a database; the first match counts
    "The server starts or stops. When it is up, give the same command again: what is finished is kept.": (
        "the database system is", "terminating connection", "server closed", "connection is closed",
        "connection is lost", "connection reset"),
    "Start the server, or mend host and port in storage=.": (
        "connection refused", "resolve host", "timeout expired", "connection timeout",
        "connection to server on socket"),
    "Mend user and password in storage= or ~/.pgpass.": ("authentication failed",),
    "Write it in storage=, or better in ~/.pgpass.": ("no password supplied",),
    "Create it on the server (createdb NAME), or mend its name in storage=.": ("fatal: database",),
    "Create it on the server (createuser NAME), or mend the user in storage=.": ("fatal: role",),
    "Use fewer workers, or raise max_connections of the server.": ("too many",),
    "Grant the user CREATE on that schema, or name another database.": ("permission denied",),
    "Name a server and database that can be written.": ("read-only",),
    "Another worker holds it: give the same command again.": ("lock timeout",),
    "Move it away to start anew, or restore it from a copy.": ("not a database", "malformed"),
    "Free space on that disk, then give the same command again.": ("full", "no space left"),
    "Check the disk and its free space, then give the same command again.": ("disk i/o",),
    "Make file and folder writable, or choose another folder.": ("readonly",),
    "Check that its folder exists, can be written and has free space.": ("unable to open",),
    "Another program holds it: close that, then give the same command again.": ("locked",)}


@contextlib.contextmanager
def driver_errors(url: str) -> Iterator[None]:
    """Turn an ImportError inside, a missing driver of PostgreSQL, into a ConfigError that says how to install it."""
    try:
        yield
    except ImportError as error:
        fact = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        raise ConfigError(f"storage: no driver for {shown(url)} ({fact}). Install it: pip install 'hwnas[postgres]', "
                          "and write postgresql+psycopg://…") from None


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn database errors inside into a StudyError of one line: fact, place, next step."""
    try:
        yield
    except (StorageInternalError, SQLAlchemyError, sqlite3.Error) as error:
        # Only the driver's own message, at the end of the chain, says what happened.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # Drivers print more lines below the first: details of a row, every address that was tried.
        lines = str(getattr(cause, "orig", None) or cause).strip().splitlines()
        fact = " ".join(lines[0].split()).rstrip(".") if lines else type(cause).__name__
        step = next((advice for advice, words in _ADVICE.items() if any(word in fact.lower() for word in words)),
                    "Check the database, then give the same command again.")
        raise StudyError(f"study {shown(url)}: {fact}. {step}") from error


CONNECT_S = 15  # time to connect to a server
LOCK_S = 60.0  # time to wait for a lock of a server


def server_options(url: str) -> dict[str, Any]:
    """Return keyword arguments of SQLAlchemy's create_engine for PostgreSQL.

    A connection is tested before each use, because firewalls and restarts may end it during a long training. Its time
    zone is UTC, which Optuna's own heartbeats need if they are used. The locks rely on the isolation level.
    """
    parsed = parse_url(url)
    options = parsed.query.get("options", "")
    options = options if isinstance(options, str) else " ".join(options)
    seconds = str(parsed.query.get("connect_timeout", CONNECT_S))
    if not seconds.isdecimal():
        raise ConfigError(f"storage: connect_timeout is a whole number of seconds, got {seconds!r}.")
    return {"pool_pre_ping": True, "isolation_level": "READ COMMITTED",
            "connect_args": {"options": f"{options} -c timezone=UTC".strip(), "connect_timeout": int(seconds)}}


@contextlib.contextmanager
def server_lock(url: str, what: str, most_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock `what` of a PostgreSQL database, one process at a time over all hosts. For SQLite it does nothing.

    The lock ends with its connection, and so with its process, however the process ends. Database errors pass
    unchanged, also if the lock is not free within `most_s`. Raises ConfigError if the driver is missing.
    """
    if sqlite_path(url) is not None:
        yield
        return
    with driver_errors(url):
        engine = sqlalchemy.create_engine(url, **{
            **server_options(url), "poolclass": sqlalchemy.NullPool, "isolation_level": "AUTOCOMMIT"})
    # PostgreSQL knows such locks by a signed 64-bit number.
    key = int.from_bytes(hashlib.sha256(f"hwnas {what}".encode()).digest()[:8], signed=True)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"SET lock_timeout = {round(1000 * most_s)}"))
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})
        yield


BUSY_S = 60.0  # time to wait for the lock of another process on a SQLite file
PRAGMAS: tuple[str, ...] = ("PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL")  # a power cut loses no commit either
AnyTrial = optuna.Trial | FrozenTrial  # its key in the database is `_trial_id`, for which Optuna has no public name


class Storage(RDBStorage):
    """Optuna's RDB storage with two writes in one transaction each: a trial's parameters, and its attributes."""

    def __init__(self, reopen: Callable[[], Storage], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reopen = reopen
        self._params_to_write: list[tuple[str, float, BaseDistribution]] | None = None

    def __reduce__(self) -> tuple[Callable[[], Storage], tuple[()]]:
        """Let a copy open the same database with the same options, and close it at its own end."""
        return self._reopen, ()

    def fresh(self, trial: AnyTrial) -> FrozenTrial:
        """Return the trial as the database has it now."""
        return self.get_trial(trial._trial_id)

    @contextlib.contextmanager
    def params_together(self, trial: AnyTrial) -> Iterator[None]:
        """Collect the parameters that `trial` gets in the block, and write them in one transaction at its end.

        They are not compared with earlier trials' distributions: the study's space is checked when it is opened.
        """
        trial_id, self._params_to_write = trial._trial_id, []
        try:
            yield
        finally:
            params, self._params_to_write = self._params_to_write, None
            with _create_scoped_session(self.scoped_session) as session:
                self._lock_running(trial_id, session)
                session.add_all(models.TrialParamModel(
                    trial_id=trial_id, param_name=name, param_value=value,
                    distribution_json=distribution_to_json(distribution)) for name, value, distribution in params)

    def _set_trial_param(self, trial_id: int, param_name: str, param_value_internal: float,
                         distribution: BaseDistribution, previous_distribution: BaseDistribution | None) -> None:
        if self._params_to_write is None:
            super()._set_trial_param(trial_id, param_name, param_value_internal, distribution, previous_distribution)
        else:
            self._params_to_write.append((param_name, param_value_internal, distribution))

    def write_attrs(self, trial: AnyTrial, user: Mapping[str, Any], constraints: Mapping[str, float] | None = None
                    ) -> None:
        """Set user attributes and constraints of a running trial in one transaction."""
        trial_id = trial._trial_id
        with _create_scoped_session(self.scoped_session) as session:
            self._lock_running(trial_id, session)
            for key, value in user.items():
                self._set_trial_attr_without_commit(session, models.TrialUserAttributeModel, trial_id, key, value)
            for key, value in (constraints or {}).items():
                self._set_trial_attr_without_commit(
                    session, models.TrialSystemAttributeModel, trial_id, f"constraints:{key}", float(value))

    def _lock_running(self, trial_id: int, session: Any) -> Any:
        """Lock a trial that has not ended: no other process can finish it before this transaction ends."""
        trial: Any = models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
        self.check_trial_is_updatable(trial_id, trial.state)
        return trial


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    for pragma in PRAGMAS:
        connection.execute(pragma)
    return connection


def _read_only(path: Path) -> sqlite3.Connection:
    """Return a connection that writes nothing. Raises StudyError if the file's log is needed and cannot be read."""
    log = Path(f"{path}-wal")
    needed = log.exists() and log.stat().st_size > 0
    # "immutable" opens a file without locks. That is safe only if no process can write to it meanwhile.
    alone = not needed and not can_write(path)
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * alone}", timeout=BUSY_S,
                                 isolation_level=None, check_same_thread=False, uri=True)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
        if not needed:
            raise
        raise StudyError(f"study {path}: its last trials are in {log.name}, which cannot be read in this folder. "
                         "Copy both files to a folder that can be written.") from None
    return connection


def can_write(path: Path) -> bool:
    """Return whether a database can be written: SQLite needs its folder, too."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def back_up(url: str, copy: Path) -> None:
    """Copy a database of SQLite with all committed data, even while others write to it. Raises StudyError, one line."""
    path = sqlite_path(url)
    assert path is not None
    with (storage_errors(url), contextlib.closing(_read_only(path)) as source,
          contextlib.closing(sqlite3.connect(copy)) as target):
        source.backup(target)


def check_file(path: Path) -> None:
    """Check a file, if it exists. Raises StudyError if another program wrote it, and SQLite's errors if it is torn."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and not tables & {"studies", "version_info"}:
            raise StudyError(f"study {path}: it is a database of something else ({', '.join(sorted(tables)[:4])}). "
                             "Choose another folder or storage.")
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"malformed: {verdict}")


def fold_in(path: Path) -> None:
    """Move the content of a database's write-ahead log into the database file, unless another process uses it.

    After a kill the trials may be in the log only, and a copy of the file alone would lose them.
    """
    place = f"{path.absolute().as_uri()}?mode=rw"
    with (contextlib.suppress(sqlite3.Error, OSError),
          contextlib.closing(sqlite3.connect(place, timeout=0, uri=True)) as connection):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _close(engine: sqlalchemy.Engine, path: Path | None) -> None:
    engine.dispose()
    if path is not None:
        fold_in(path)


def open_storage(url: str, *, read_only: bool = False) -> Storage:
    """Open or create the database at `url`. Raises ConfigError for a bad URL, StudyError for a bad database.

    `read_only` can also read a file in a folder without write permission; no other process may write to it then.
    """
    path = sqlite_path(url)
    with storage_errors(url), driver_errors(url):
        if path is not None:
            if not read_only:
                check_file(path)
                fold_in(path)
            options: dict[str, Any] = {"creator": partial(_read_only if read_only else _connect, path)}
        else:
            options = server_options(url)
        # Under a lock, because two processes must not create the tables of a server at once.
        with warnings.catch_warnings(), server_lock(url, "tables"):
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            try:
                storage = Storage(partial(open_storage, url, read_only=read_only), url, engine_kwargs=options,
                                  skip_table_creation=read_only)
            except RuntimeError as error:  # Optuna raises it for a schema of another version.
                raise StudyError(f"study {shown(url)}: {' '.join(str(error).split())}") from error
    weakref.finalize(storage, _close, storage.engine, None if read_only else path)  # or at the end of the process
    if path is not None and not read_only:
        sqlalchemy.event.listen(storage.engine, "begin",
                                lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))  # the write lock
    return storage
