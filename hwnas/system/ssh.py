"""A Python program on another machine over OpenSSH: nothing is installed there and no port is opened.

`ssh` is run as the user would run it, with the user's configuration, keys and known hosts. It never asks for anything,
and it never takes a host key that it does not know. The program reads frames on its standard input.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import IO

from hwnas.errors import ConfigError, DeviceError
from hwnas.system.frames import LinkLost, exactly, readable

REFUSED = 78  # what a program ends with that cannot run over there; its last line says why
CONNECT_S = 30  # to the other machine's first word, once it is reached
_OPTIONS = ("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o",
            "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no", "-o",
            "StrictHostKeyChecking=yes")  # the last: whatever the user's configuration says
_ADDRESS = re.compile(r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@"
                      r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,253}[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?")
_PYTHON = re.compile(r"(?:~/)?[A-Za-z0-9_./+][A-Za-z0-9_./+-]{0,400}")
_MOST_GREETING = 1 << 16  # bytes that a login shell may print before the program speaks
_MOST_SAID = 1 << 14  # bytes of standard error that are kept
_WORDS = 300
# The whole command stands in single quotes, and holds nothing that any login shell reads otherwise.
_COMMAND = "{python} -c 'import sys; exec(sys.stdin.readline(100000))'"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a device is: user@host[:port], where the host may be a name of the user's ssh configuration; and its
    Python there."""

    text: str
    python: str = "python3"

    @classmethod
    def read(cls, text: str, python: str = "python3") -> Address:
        """ConfigError for anything that ssh or a shell could take for more than a name."""
        if not (match := _ADDRESS.fullmatch(text)) or int(match["port"] or 22) > 65_535:
            raise ConfigError(f"device must be user@host or user@host:port, in letters, digits, dots and dashes, "
                              f"got {text[:100]!r}.")
        if not _PYTHON.fullmatch(python):
            raise ConfigError("device_python must be a command or a path in letters, digits, dots, dashes and slashes, "
                              f"such as /home/pi/venv/bin/python, got {python[:100]!r}.")
        return cls(text, python)

    def __str__(self) -> str:
        return self.text

    @property
    def arguments(self) -> list[str]:
        """What names the machine on ssh's command line."""
        name, colon, port = self.text.partition(":")
        return [*(("-p", port) if colon else ()), "--", name]

    @property
    def by_hand(self) -> str:
        """How the user connects."""
        name, colon, port = self.text.partition(":")
        return f"ssh {f'-p {port} ' if colon else ''}{name}"


class Connection:
    """A program that runs over there: file descriptors to write to and to read from, until `close`."""

    def __init__(self, process: subprocess.Popen[bytes], address: Address) -> None:
        self.process, self._address = process, address
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.to, self.back = process.stdin.fileno(), process.stdout.fileno()
        self._said = bytearray()
        self._listener = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        self._listener.start()

    def _listen(self, stream: IO[bytes]) -> None:
        """Keep the end of what ssh and the program say on standard error, however much that is."""
        with stream:
            while part := stream.read(_MOST_SAID):
                self._said[:] = (self._said + part)[-_MOST_SAID:]

    def close(self, grace_s: float = 3.0) -> None:
        """End it: its input ends, and ssh with it, at the latest by a signal."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def lost(self) -> LinkLost:
        """End it, and say why it ended, in one line; `Refused` where another attempt cannot help."""
        self.close()
        self._listener.join(1.0)
        return _why(self._said.decode(errors="replace"), self.process.returncode, self._address)


class Refused(LinkLost):
    """No connection, for a reason that only the user can mend."""


def connect(address: Address, program: str) -> Connection:
    """Run `program`, Python in one line that reads frames, over there. It must print `marker` on a line of its own as
    soon as it can hear; what a login shell prints before is passed over.

    LinkLost where that fails; DeviceError where there is no ssh here.
    """
    ssh = shutil.which("ssh")
    if ssh is None:
        raise DeviceError("device= needs the ssh command, which is not here. Install OpenSSH's client (Debian, Ubuntu: "
                          "apt install openssh-client).")
    marker = f"hwnas-{secrets.token_hex(8)}"
    process = subprocess.Popen(
        [ssh, *_OPTIONS, *address.arguments, _COMMAND.format(python=address.python)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True)
    connection = Connection(process, address)
    try:
        os.write(connection.to, f"marker = {marker!r}; {program}\n".encode())
        _await(connection.back, marker.encode() + b"\n")
    except (OSError, LinkLost):
        raise connection.lost() from None
    except BaseException:
        connection.close(grace_s=0)
        raise
    return connection


def _await(line: int, marker: bytes) -> None:
    """Read up to the marker; LinkLost where it does not come."""
    heard, until = bytearray(), time.monotonic() + CONNECT_S
    while not heard.endswith(marker):
        if len(heard) > _MOST_GREETING or time.monotonic() > until or not readable(line, CONNECT_S):
            raise LinkLost("its login prints too much, or nothing")
        heard += exactly(line, 1)


def one_line(text: str) -> str:
    """What another machine said, for a terminal: one line without control characters, not too long."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:_WORDS]


def _why(said: str, code: int, address: Address) -> LinkLost:
    """The reason in ssh's words or the shell's, and what the user can do."""
    lines = [one_line(line) for line in said.splitlines() if line.strip()]
    last, hand = lines[-1] if lines else f"ssh ended with exit code {code}", address.by_hand
    if code == REFUSED:
        return Refused(f"{address}: {last}")
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        name = address.arguments[-1].rpartition("@")[2]
        return Refused(f"{address} has another host key than before. Make sure that it is that machine; then "
                       f"ssh-keygen -R '{_known_as(name, address)}', and once by hand: {hand}")
    if "Host key verification failed" in said or "host key is known" in said:
        return Refused(f"{address} has a host key that is not known here. Connect once by hand and compare its "
                       f"fingerprint: {hand}")
    if "Permission denied" in said and code != 126:
        return Refused(f"{address} takes no key of yours ({last}), and passwords are not asked for. Let it take a key: "
                       f"{hand.replace('ssh', 'ssh-copy-id', 1)}")
    missing = [line for line in lines if re.search(r"not found|[Nn]o such file|[Uu]nknown command|[Pp]ermission", line)]
    if code == 127 or (code == 126 and missing):
        return Refused(f"{address} has no {address.python} to run ({(missing or [last])[0]}). Install Python 3.11 or "
                       "newer there, or name one: device_python=/path/to/python")
    if "Bad owner or permissions" in said or "Bad configuration option" in said:
        return Refused(f"ssh cannot use its configuration here: {last}. Mend it; then give the same command again.")
    return LinkLost(f"{last}. Try by hand: {hand} true")


def _known_as(name: str, address: Address) -> str:
    port = address.text.partition(":")[2]
    return f"[{name}]:{port}" if port and port != "22" else name
