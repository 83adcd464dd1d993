"""Names of processes that other processes can check: alive, or gone for good."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path


def _started(pid: int) -> str:
    """Kernel ticks at which a process started, '' where /proc does not say or the process is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@cache
def _machine() -> str:
    """Names the process table that a pid belongs to: host, boot and pid namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip()[:8])
        except OSError:
            parts.append("")
    return "/".join(parts)


def worker_name() -> str:
    """This process: machine, pid, start."""
    return f"{_machine()}/{os.getpid()}/{_started(os.getpid())}"


def is_dead(worker: str) -> bool:
    """Whether `worker` ran here and is gone. A worker elsewhere is never called dead: its heartbeat tells."""
    machine, pid, started = worker.rsplit("/", 2)
    if machine != _machine() or not pid.isdigit():
        return False
    if started:
        return _started(int(pid)) != started
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
