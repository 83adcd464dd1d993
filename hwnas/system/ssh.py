"""A Python program on another machine over OpenSSH: nothing is installed there and no port is opened.

`ssh` is run as the user would run it, with the user's configuration, keys and known hosts. It never asks for anything,
and it never takes a host key that it does not know. The messages to the program and from it are lines of JSON.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from hwnas.errors import ConfigError, DeviceError

_FAILED = 1  # Python's exit code if a program cannot run over there; its last line says why
_GRACE_S = 3.0
CONNECT_S = 30  # seconds from the start of ssh to the program's marker
MOST_LINE = 64 << 20  # bytes of one message
_OPTIONS = ("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o",
            "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no", "-o",
            "StrictHostKeyChecking=yes")  # the last: whatever the user's configuration says
_ADDRESS = re.compile(r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@"
                      r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,253}[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?")
_PYTHON = re.compile(r"(?:~/)?[A-Za-z0-9_./+][A-Za-z0-9_./+-]{0,400}")
_MOST_LINES = 50  # that are kept until they are read
_MOST_WORDS = 300  # letters of another machine's text, in a line for the user
# The code is in single quotes, and has nothing in it that some login shell reads in another way.
_COMMAND = "{python} -c 'import sys; exec(sys.stdin.readline())'"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a device, user@host[:port], and the command of its Python. The host may be a name of the user's
    ssh configuration."""

    text: str
    python: str = "python3"

    @classmethod
    def read(cls, text: str, python: str = "python3") -> Address:
        """Return a checked address. Raises ConfigError for a text that ssh or a shell may take for more than a name."""
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
        """The arguments that name the machine on ssh's command line."""
        name, _, port = self.text.partition(":")
        return [*(["-p", port] if port else []), "--", name]

    @property
    def by_hand(self) -> str:
        """The command by which the user connects."""
        return " ".join(["ssh", *(part for part in self.arguments if part != "--")])


class Connection:
    """A program that runs on another machine until `close`: `lines` has what it prints, an empty line at its end.

    Args:
        address: The machine.
        program: Python in one line, with the variables `content` and `marker`. It must print `marker` on a line of its
            own as soon as it can read messages. The lines of a login shell before it are passed over.
        content: Any bytes for the program.

    Raises:
        ConnectionError: The program does not run.
        DeviceError: There is no ssh here.
    """

    def __init__(self, address: Address, program: str, content: bytes = b"") -> None:
        ssh = shutil.which("ssh")
        if ssh is None:
            raise DeviceError("device= needs the ssh command, which is not here. Install OpenSSH's client (Debian, "
                              "Ubuntu: apt install openssh-client).")
        self.process = subprocess.Popen(
            [ssh, *_OPTIONS, *address.arguments, _COMMAND.format(python=address.python)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        # A thread for each output of ssh, so that neither fills up: errors go to `_said`, lines to `lines`.
        self.lines: queue.Queue[bytes] = queue.Queue(_MOST_LINES)
        self._address, self._said = address, deque[bytes](maxlen=_MOST_LINES)
        self._listener = threading.Thread(target=_read, args=(self.process.stderr, self._said.append, _MOST_WORDS),
                                          daemon=True)
        self._listener.start()
        threading.Thread(target=_read, args=(self.process.stdout, self.lines.put, MOST_LINE), daemon=True).start()
        encoded, marker, until = base64.b64encode(content), secrets.token_hex(8), time.monotonic() + CONNECT_S
        # The first line of its input is the program itself. Then wait for the marker, at most CONNECT_S.
        try:
            self.write(f"import base64; content = base64.b64decode({encoded!r}); marker = {marker!r}; {program}")
            line = b""
            while not line.endswith(f"{marker}\n".encode()):
                if not (line := self.lines.get(timeout=max(0.0, until - time.monotonic()))):
                    raise ConnectionError
        except queue.Empty:
            self.close()
            raise ConnectionError(f"{address}: {address.python} did not start within {CONNECT_S:g} s. Try by hand: "
                                  f"{address.by_hand} {address.python} -V") from None
        except ConnectionError:
            raise self.close() from None
        except BaseException:
            self.close()
            raise

    def write(self, line: str) -> None:
        """Write a line, which is given without its end. Raises ConnectionError if nobody reads it any more."""
        self.process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def close(self) -> ConnectionError:
        """End the program by the end of its input, and ssh with it, at the latest by a signal. Return an error that
        says in one line why it ended before."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._listener.join(1.0)
        text = b"".join(self._said).decode(errors="replace")
        return ConnectionError(_why(text, self.process.returncode, self._address))


def _read(stream: IO[bytes], put: Callable[[bytes], object], most: int) -> None:
    """Pass each line of a stream to `put`, an empty one at its end; a line of more than `most` bytes is divided."""
    with stream:
        while line := stream.readline(most):
            put(line)
    put(b"")


def one_line(value: Any, most: int | None = _MOST_WORDS) -> Any:
    """Return plain values that another machine sent, each text as one line of at most `most` printable letters."""
    if isinstance(value, str):
        plain = value if value.isprintable() else "".join(letter if letter.isprintable() else " " for letter in value)
        return " ".join(plain.split())[:most]
    if isinstance(value, dict):
        return {one_line(key, most): one_line(part, most) for key, part in value.items()}
    return [one_line(part, most) for part in value] if isinstance(value, list) else value


def _why(said: str, code: int, address: Address) -> str:
    """Return the reason in ssh's words or the shell's, and the user's next step."""
    lines = [one_line(line) for line in said.splitlines() if line.strip()]
    last, hand = lines[-1] if lines else f"ssh ended with exit code {code}", address.by_hand
    if code == _FAILED:
        return (f"{address}: {last}. It needs Python 3.11 or newer on Linux (device_python=/path/to/python), space in "
                f"~/.cache, and what this installs: {address.python} -m pip install numpy filelock onnx")
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        # The name in the list of known hosts: of an alias it is another, and the key may be that of a jump host.
        changed = re.search(r"Host key for ([\w.:%\[\]-]+) has changed", said)
        known_as = changed[1] if changed else address.text.partition("@")[2]
        return (f"{address} has another host key than before. Make sure that it is that machine; then ssh-keygen -R "
                f"'{known_as}', and once by hand: {hand}")
    if "Host key verification failed" in said or "host key is known" in said:
        return (f"{address} has a host key that is not known here. Connect once by hand and compare its fingerprint: "
                f"{hand}")
    if "Permission denied" in said and code != 126:
        return (f"{address} takes no key of yours ({last}), and passwords are not asked for. Let it take a key: "
                f"{hand.replace('ssh', 'ssh-copy-id', 1)}")
    missing = [line for line in lines if re.search(r"not found|[Nn]o such file|[Uu]nknown command|[Pp]ermission", line)]
    # A shell's code 127 means that a program is not found, 126 that it cannot be run.
    if code == 127 or (code == 126 and missing):
        return (f"{address} has no {address.python} to run ({(missing or [last])[0]}). Install Python 3.11 or newer "
                "there, or name one: device_python=/path/to/python")
    if "Bad owner or permissions" in said or "Bad configuration option" in said:
        return f"ssh cannot use its configuration here: {last}. Mend it; then give the same command again."
    return f"{address} cannot be reached: {last}. Try by hand: {hand} true"
