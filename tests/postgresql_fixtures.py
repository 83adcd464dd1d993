"""A private PostgreSQL server, and an empty database on it."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECRET = "s3cret-w0rd"


class Server:
    """A PostgreSQL server of its own, on a free port of this machine, as a user that is not root."""

    def __init__(self, binaries: Path, folder: Path, who: dict[str, Any]) -> None:
        self.binaries, self.folder, self.who = binaries, folder, who
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "password").write_text(SECRET)
        (folder / "password").chmod(0o644)
        self.setup = subprocess.run(
            [binaries / "initdb", "-D", folder / "data", "-U", "me", "--auth=scram-sha-256", "--encoding=UTF8",
             f"--pwfile={folder / 'password'}", "--no-sync", "--locale=C"], capture_output=True, text=True, **who)

    def start(self) -> None:
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off",
                   "timezone": "Asia/Kathmandu", "default_transaction_isolation": "serializable"}
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.folder / "data", "-p", str(self.port),
                 *(part for key, value in options.items() for part in ("-c", f"{key}={value}"))],
                stdout=log, stderr=log, **self.who)
        for _ in range(300):
            with contextlib.suppress(psycopg().OperationalError):
                psycopg().connect(self.url("postgres").replace("+psycopg", ""), connect_timeout=5).close()
                return
            time.sleep(0.1)
        raise AssertionError((self.folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """As an administrator stops it: open connections are cut."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
            self.process = None

    def url(self, database: str, password: str = SECRET) -> str:
        return f"postgresql+psycopg://me:{password}@127.0.0.1:{self.port}/{database}"


def psycopg() -> Any:
    return pytest.importorskip("psycopg", reason="no psycopg: pip install 'hwnas[postgres]'", exc_type=ImportError)


def _binaries() -> Path:
    packaged = Path("/usr/lib/postgresql").glob("*/bin/initdb")  # Debian puts none of them on the PATH.
    newest_last = sorted(packaged, key=lambda path: float(path.parts[4]) if path.parts[4].isdigit() else 0.0)
    for one in [*filter(None, [shutil.which("initdb")]), *reversed(newest_last)]:
        folder = Path(one).resolve().parent
        if (folder / "postgres").is_file():
            return folder
    pytest.skip("no PostgreSQL server (initdb, postgres) on this machine: apt-get install postgresql")


def _who() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.getuid():
        return {"cwd": "/"}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"cwd": "/", "user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL does not run as root, and there is no user postgres or nobody")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    psycopg()
    binaries, who = _binaries(), _who()
    folder = Path(tempfile.mkdtemp(prefix="hwnas-postgresql-"))
    try:
        try:
            if "user" in who:
                os.chown(folder, who["user"], who["group"])
            one = Server(binaries, folder, who)
        except PermissionError as error:
            pytest.skip(f"PostgreSQL does not run as root, and this process may not become another user ({error})")
        if one.setup.returncode:
            pytest.skip(f"initdb fails here: {(one.setup.stderr.strip().splitlines() or ['no message'])[-1]}")
        one.start()
        yield one
        one.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def place(server: Server, request: pytest.FixtureRequest) -> str:
    """URL of an empty database."""
    name = f"t{abs(hash(request.node.name))}"
    with psycopg().connect(server.url("postgres").replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return server.url(name)
