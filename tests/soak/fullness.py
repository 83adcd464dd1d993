"""A disk that is full: system calls of a process, and of all that it starts, answered with ENOSPC.

The kernel stops every call that may need space (seccomp's user notification, Linux 5.5) and asks this process, which
counts those on files below one folder and refuses them from the n-th on. So a call is met wherever it comes from
(Python, SQLite, a library in C++ or Rust, the C library's own buffers), and neither a compiler nor a privilege is
needed. A disk that is really full refuses less: it writes on where a file has its blocks already.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Numbers of system calls, and the argument with the file: a descriptor, or a path (of what is made).
_X86, _ARM = 0xC000003E, 0xC00000B7
_BY_FILE = {_X86: {1: "write", 18: "pwrite64", 20: "writev", 296: "pwritev", 328: "pwritev2", 40: "sendfile",
                   285: "fallocate", 74: "fsync", 75: "fdatasync"},
            _ARM: {64: "write", 68: "pwrite64", 66: "writev", 70: "pwritev", 287: "pwritev2", 71: "sendfile",
                   47: "fallocate", 82: "fsync", 83: "fdatasync"}}
_COPY = {_X86: {326: "copy_file_range"}, _ARM: {285: "copy_file_range"}}
_BY_PATH = {_X86: {83: ("mkdir", 0), 82: ("rename", 1), 86: ("link", 1), 88: ("symlink", 1)}, _ARM: {}}
_BY_PATH_AT = {_X86: {258: ("mkdirat", 0), 264: ("renameat", 2), 316: ("renameat2", 2), 265: ("linkat", 2),
                      266: ("symlinkat", 1), 257: ("openat", 0)},
               _ARM: {34: ("mkdirat", 0), 38: ("renameat", 2), 276: ("renameat2", 2), 37: ("linkat", 2),
                      36: ("symlinkat", 1), 56: ("openat", 0)}}
_ARCHITECTURE = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), 0)
_SECCOMP = {_X86: 317, _ARM: 277}
_MAKES = os.O_CREAT | (getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY)
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of the listener
_NOTICE = struct.Struct("=QII iIQ 6Q")  # id, process, flags, call, architecture, instruction, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_GO_ON = 1
_AT_CWD = -100
_MOST_PATH = 4096


def missing() -> str:
    """Why calls cannot be refused on this machine; empty where they can."""
    if not _ARCHITECTURE or platform.system() != "Linux":
        return "writes are refused on Linux only, on x86-64 and aarch64"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _listener()
            code = 0
        finally:
            os._exit(code)
    able = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return "" if able else "this kernel or container offers no seccomp notifications"


class _Step(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("then", ctypes.c_ubyte), ("otherwise", ctypes.c_ubyte),
                ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_Step)))


def _listener() -> int:
    """Have this process's calls stopped from now on; the descriptor that tells of them. OSError where it cannot be."""
    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    ask, allow = 0x7FC00000, 0x7FFF0000
    calls = [*_BY_FILE[_ARCHITECTURE], *_COPY[_ARCHITECTURE], *_BY_PATH[_ARCHITECTURE], *_BY_PATH_AT[_ARCHITECTURE]]
    *others, openat = calls
    steps = [(load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURE), (give, 0, 0, allow), (load, 0, 0, 0)]
    for number in others:
        steps += [(equal, 0, 1, number), (give, 0, 0, ask)]
    steps += [(equal, 0, 3, openat), (load, 0, 0, 16 + 8 * 2), (any_bit, 0, 1, _MAKES), (give, 0, 0, ask),
              (give, 0, 0, allow)]
    program = _Program(len(steps), (_Step * len(steps))(*steps))
    c = ctypes.CDLL(None, use_errno=True)
    new_listener, no_new_privileges = 8, 38
    if c.prctl(no_new_privileges, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    handle = int(c.syscall(_SECCOMP[_ARCHITECTURE], 1, new_listener, ctypes.byref(program)))
    if handle < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return handle


class FullDisk:
    """Files below `folder` on a disk that is full from write number `at` on (0: never), or at that one only (`once`).

    `filled` is called when it begins to be full, while the process that writes waits. Then: `writes` counts, `refused`
    names the first call that was refused and its file.
    """

    def __init__(self, folder: Path, at: int, once: bool = False, filled: Callable[[], None] | None = None) -> None:
        self._below, self._at, self._once, self._filled = f"{folder.resolve()}/", at, once, filled
        self._ours, self._theirs = socket.socketpair()
        self._listener = -1
        self._poll = select.poll()
        self.writes, self.refused = 0, ""

    def enter(self) -> None:
        """Put this process, and those that it will start, on the disk: to be called in a new one."""
        handle = _listener()
        socket.send_fds(self._theirs, [b"."], [handle])
        os.close(handle)

    def answer(self, within_s: float) -> bool:
        """Answer calls until none comes within so many seconds; whether a process is still on the disk."""
        if self._listener < 0:
            self._listener = socket.recv_fds(self._ours, 1, 1)[1][0]
            self._poll.register(self._listener, select.POLLIN)
        while events := self._poll.poll(1000 * within_s):
            if not events[0][1] & select.POLLIN:
                return False
            self._answer_next()
        return True

    def close(self) -> None:
        """End it; calls of processes still there then fail."""
        for file in (self._ours, self._theirs):
            file.close()
        if self._listener >= 0:
            os.close(self._listener)
            self._listener = -1

    def _answer_next(self) -> None:
        notice = bytearray(_NOTICE.size)
        with suppress(FileNotFoundError):  # it was killed
            fcntl.ioctl(self._listener, _RECEIVE, notice)
            number, process, _, call, _, _, *arguments = _NOTICE.unpack(notice)
            answer = (0, _GO_ON) if self._takes(process, call, arguments) else (-errno.ENOSPC, 0)
            fcntl.ioctl(self._listener, _SEND, bytearray(_ANSWER.pack(number, 0, *answer)))

    def _takes(self, process: int, call: int, arguments: list[int]) -> bool:
        name, path = _aim(process, call, arguments)
        if not path.startswith(self._below):
            return True
        self.writes += 1
        if not self._at or self.writes < self._at or (self._once and self.writes > self._at):
            return True
        if not self.refused:
            self.refused = f"{name} {path.removeprefix(self._below)}"
            if self._filled:
                self._filled()
        return False


def _aim(process: int, call: int, arguments: list[int]) -> tuple[str, str]:
    """The name of a call, and the path that it needs space at; "" where it needs none."""
    try:
        if name := _BY_FILE[_ARCHITECTURE].get(call):
            return name, os.readlink(f"/proc/{process}/fd/{arguments[0]}")
        if name := _COPY[_ARCHITECTURE].get(call):
            return name, os.readlink(f"/proc/{process}/fd/{arguments[2]}")
        if call in _BY_PATH[_ARCHITECTURE]:
            name, index = _BY_PATH[_ARCHITECTURE][call]
            path = _path(process, _AT_CWD, arguments[index])
        else:
            name, index = _BY_PATH_AT[_ARCHITECTURE][call]
            path = _path(process, ctypes.c_int(arguments[index] & 0xFFFFFFFF).value, arguments[index + 1])
        there = os.path.isfile(path) if name == "openat" else name.startswith("mkdir") and os.path.lexists(path)
        return name, "" if there else path
    except OSError:  # it was killed
        return "", ""


def _path(process: int, folder: int, address: int) -> str:
    """The absolute path at an address of a process."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        name = memory.read(_MOST_PATH).partition(b"\0")[0]  # fewer bytes where the memory ends
    base = os.readlink(f"/proc/{process}/cwd" if folder == _AT_CWD else f"/proc/{process}/fd/{folder}")
    return os.path.normpath(os.path.join(base, os.fsdecode(name)))
