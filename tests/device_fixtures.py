"""Other machines that are this one: an `ssh` that runs the agent here, and a real sshd on the loopback address."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from hwnas.cli.progress import Console
from hwnas.latency.remote import RemoteDevice
from hwnas.system.ssh import Address

# {before} may limit the agent, {through} is what its answers go through.
SSH = """#!/bin/bash
for last; do :; done
if [ "$1" = -G ]; then exit 0; fi
echo "$@" >> {folder}/calls
calls=$(wc -l < {folder}/calls)
export HOME={folder}/home XDG_CACHE_HOME=
{before}
bash -c "$last" {through}
"""
# Passes at most so many bytes on, so many at a time; then it ends, and with it the connection.
RELAY = """
import os, signal, sys
left, piece = int(sys.argv[1]), int(sys.argv[2])
while left and (part := os.read(0, min(left, piece))):
    os.write(1, part)
    left -= len(part)
os.killpg(0, signal.SIGKILL)
"""
NEEDED = ("numpy", "filelock")
ONNX = ("onnx", "google", "ml_dtypes", "typing_extensions")  # with what it needs itself
# Like a board: what is needed alone, no site packages, a wall clock that jumps, no lock that others hold.
BOARD = """
import builtins, random, sys, time
time.time = lambda: random.uniform(-1e9, 1e10)
ordinary = builtins.__import__
def importing(name, *rest, **more):
    module = ordinary(name, *rest, **more)
    target = sys.modules.get("hwnas.target")
    if target is not None and hasattr(target, "LOCK_FOLDERS"):
        target.LOCK_FOLDERS = ()
    return module
builtins.__import__ = importing
exec(sys.argv[2])
"""


@dataclass(frozen=True)
class Board:
    """A machine that is this one: `folder` holds its home, its Python, and the ssh that reaches it."""

    folder: Path
    python: str = sys.executable

    @property
    def files(self) -> Path:
        """Where the agent keeps what was sent."""
        return self.folder / "home/.cache/hwnas-agent/files"

    @property
    def calls(self) -> int:
        """How often a connection was made."""
        return len((self.folder / "calls").read_text().splitlines())

    def reached(self, before: str = "", through: str = "") -> Board:
        """The same, over an ssh that does this before, and sends answers through that."""
        script = SSH.format(folder=self.folder, before=before, through=through)
        program(self.folder / "bin/ssh", script)
        return self

    def device(self, name: str | None = "board-2c") -> RemoteDevice:
        """It, connected."""
        return RemoteDevice(Address.read("me@board", self.python), name, Console(quiet=True))

    def relayed(self, most: str, piece: int) -> Board:
        """The same, whose answers come `piece` bytes at a time, and no more of them than `most`, a number in bash."""
        (self.folder / "relay.py").write_text(RELAY)
        return self.reached(through=f"| python3 -I {self.folder}/relay.py {most} {piece}")

    def bare(self, *packages: str) -> Board:
        """The same with a Python that has these packages alone."""
        links, home = self.folder / "packages", Path(numpy.__file__).parents[1]
        links.mkdir(exist_ok=True)
        for package in packages:
            for name in (package, f"{package}.py", f"{package}-*.dist-info", f"{package}.libs"):
                for path in home.glob(name):
                    if not (links / path.name).exists():
                        (links / path.name).symlink_to(path)
        (self.folder / "board.py").write_text(BOARD)
        program(self.folder / "python",
                f'#!/bin/sh\nPYTHONPATH={links} exec {sys.executable} -S {self.folder}/board.py "$@"\n')
        return Board(self.folder, str(self.folder / "python"))


def cut(device: RemoteDevice) -> None:
    """End the ssh of a device and all that it started here, as a broken line would."""
    assert device.connection is not None
    os.killpg(device.connection.process.pid, signal.SIGKILL)


def program(path: Path, text: str) -> Path:
    """An executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """A machine that is reached by an ssh, first in PATH, that runs everything here in a home of its own."""
    folder = tmp_path / "board"
    (folder / "home").mkdir(parents=True)
    (folder / "calls").touch()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Board(folder).reached()


@dataclass(frozen=True)
class Server:
    """A real sshd on the loopback address; `folder` holds its keys, and the user's of the `ssh` first in PATH."""

    folder: Path
    port: int

    @property
    def name(self) -> str:
        """As it is written behind device=."""
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    def device(self) -> RemoteDevice:
        """It, connected."""
        return RemoteDevice(Address.read(self.name, sys.executable), "loopback-2c", Console(quiet=True))


def key(path: Path) -> str:
    """A new key pair; its public part."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path.with_suffix(".pub").read_text()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for this user, with a host key and an authorized key of its own; skips where there is no OpenSSH."""
    program_path = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    real = shutil.which("ssh")
    if program_path is None or real is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no OpenSSH server and client here")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path_factory.mktemp("sshd")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    host_key, user_key = key(folder / "host_key"), key(folder / "user_key")
    (folder / "authorized_keys").write_text(user_key)
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication yes\nPermitRootLogin prohibit-password\n"
        f"SetEnv HOME={folder}\n")
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known_hosts\n")
    program(folder / "bin/ssh", f'#!/bin/sh\nexec {real} -F {folder}/ssh_config "$@"\n')
    process = subprocess.Popen([program_path, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.DEVNULL)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
            _listening(port, process)
            yield Server(folder, port)
    finally:
        process.kill()
        process.wait()


def _listening(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as line:
            if line.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.skip("sshd does not run here")


def wait_for_agents(folder: Path, of: Collection[int] | None = None) -> None:
    """Return once none is left, of these processes or at all; AssertionError after ten seconds."""
    deadline = time.monotonic() + 10
    while left := [process for process in agents(folder) if of is None or process in of]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def agents(folder: Path) -> list[int]:
    """Processes of agents and of their ssh whose surroundings or words name `folder`."""
    mine = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and int(path.name) != os.getpid() and stat.S_ISDIR(path.stat().st_mode):
                said = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if str(folder).encode() in said and b"exec(sys.stdin.readline" in said and state not in "ZX":
                    mine.append(int(path.name))
        except (OSError, IndexError):
            continue
    return mine
