"""The cores that this process may use: how they belong together, how busy others keep them, and the quietest ones.

Sources: proc(5) for /proc/stat, cgroups(7) and the kernel's admin-guide (cgroup-v1/sched-bwc, cgroup-v2, cputopology).
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hwnas.errors import TargetError

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
STAT = Path("/proc/stat")
DEVICES = Path("/sys/devices")
LOOK_S = 0.3  # seconds in which the load of cores is watched: thirty ticks of /proc/stat
_BUSY = (1, 2, 3, 6, 7, 8)  # columns of /proc/stat: user, nice, system, irq, softirq, steal
_STEPS = 20.0  # cores whose busy shares differ by less than 1/20 count as equally busy


def allowed_cores() -> list[int]:
    """Return the cores that this process may run on, by its affinity; at least one. Raises TargetError on a system
    that gives processes no cores of their own, such as macOS."""
    if not hasattr(os, "sched_getaffinity"):
        raise TargetError(f"hwnas times networks on Linux alone, and this is {platform.system()}. Give the command on "
                          "Linux, which may run in a virtual machine.")
    return sorted(os.sched_getaffinity(0))


def usable_cores() -> list[int]:
    """Return as many allowed cores as the quota of this process' control groups permits; at least one."""
    quotas = [quota for folder in _own_groups() if (quota := _quota_in(folder)) is not None]
    return allowed_cores()[: max(1, int(min(quotas)))] if quotas else allowed_cores()


def throttled_periods() -> int:
    """Return the number of periods in which the quota has stopped this process' control groups; 0 if unknown."""
    return max((_entry(folder / "cpu.stat", "nr_throttled") for folder in _own_groups()), default=0)


def _own_groups(controller: str = "cpu") -> list[Path]:
    """Return the folders of the control groups that limit this process' CPU or memory, from its own up to the root.

    Without a namespace (Slurm, systemd slices, some of Kubernetes) the group is not the root of the mounted tree. The
    path in /proc/self/cgroup is therefore followed, for versions 1 and 2.
    """
    folders: dict[Path, None] = {}  # without repeats, in order
    # Lines of version 1: "4:cpu,cpuacct:/path"; of version 2: "0::/path", without controllers.
    for line in text_of(OWN_CGROUPS).splitlines() or ["0::/"]:
        controllers, _, path = line.partition(":")[2].partition(":")
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        if not controllers:
            roots = [CGROUP, CGROUP / "unified"]  # the second: version 2 beside version 1
        elif controller in controllers.split(","):
            roots = [CGROUP / each for each in (controllers, controller, "cpu,cpuacct")]
        else:
            continue
        for root in roots:
            for depth in range(len(parts), -1, -1):
                folders.setdefault(root.joinpath(*parts[:depth]))
    return list(folders)


def _quota_in(folder: Path) -> float | None:
    limit, _, period = text_of(folder / "cpu.max").partition(" ")
    if not limit:  # version 1
        limit, period = (text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    try:
        return int(limit) / int(period) if int(limit) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max", or nothing
        return None


def physical_cores(cores: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Return the kind of each physical core of `cores`, by the tuple of its logical cores; a larger kind is faster.

    The kind is the kernel's capacity of a core (ARM), or 1 for an Intel P-core beside E-cores with 0; 0 if all are
    alike. A core of which the kernel says nothing counts as a physical core.
    """
    kinds = dict[tuple[int, ...], int]()
    fast = _core_list(text_of(DEVICES / "cpu_core/cpus"))
    for core in cores:
        siblings = _core_list(text_of(DEVICES / f"system/cpu/cpu{core}/topology/thread_siblings_list")) or [core]
        logical = tuple(sibling for sibling in siblings if sibling in cores) or (core,)
        capacity = whole_number(text_of(DEVICES / f"system/cpu/cpu{core}/cpu_capacity"))
        kinds.setdefault(logical, capacity or int(core in fast))
    return kinds


def busy_shares(cores: Collection[int]) -> dict[int, float]:
    """Return the share of the next LOOK_S seconds in which each core is busy; empty if /proc/stat does not say.

    This process sleeps meanwhile, so all of the load is the work of others.
    """
    before = busy_seconds(cores)
    start = time.monotonic()
    time.sleep(LOOK_S)
    after, took = busy_seconds(cores), time.monotonic() - start
    return {core: max(0.0, after[core] - before[core]) / max(took, 1e-6) for core in after if core in before}


def busy_seconds(cores: Collection[int]) -> dict[int, float]:
    """Return the seconds since boot that each core was not idle, to a hundredth; empty if /proc/stat does not say."""
    names, ticks = {f"cpu{core}": core for core in cores}, dict[int, float]()
    with suppress(IndexError, ValueError, OSError):
        for line in STAT.read_text().splitlines():
            words = line.split()
            if words and words[0] in names:
                ticks[names[words[0]]] = sum(int(words[column]) for column in _BUSY) / os.sysconf("SC_CLK_TCK")
    return ticks


def choose_cores(threads: int, busy: Mapping[int, float], cores: Sequence[int] | None = None) -> list[int]:
    """Choose the quietest cores for `threads` threads: of whole physical cores, and of one kind.

    Args:
        threads: The number of cores; 0: as many as this process may use.
        busy: The share of the time that others keep each core busy (`busy_shares`).
        cores: The cores to choose from; None: all that this process may run on.

    Returns:
        Logical cores, one of each physical core while there are enough. Of equally busy cores those of one socket are
        taken, and the last, because the first serve most interrupts.
    """
    cores = allowed_cores() if cores is None else sorted(cores)
    threads = min(threads or len(usable_cores()), len(cores))
    # The fastest kind that has enough physical cores; if none has, cores of all kinds.
    physical = physical_cores(cores)
    for fastest in sorted({*physical.values()}, reverse=True):
        alike = [logical for logical, kind in physical.items() if kind == fastest]
        if len(alike) >= threads:
            break
    else:
        alike = [*physical]

    def load(logical: tuple[int, ...]) -> tuple[float, int]:
        return round(_STEPS * sum(busy.get(each, 0.0) for each in logical)), -max(logical)

    # Threads on several sockets wait for each other's caches: of equally quiet cores, those of one socket.
    quietest, sockets = sorted(alike, key=load), dict[str, list[tuple[int, ...]]]()
    for logical in quietest:
        socket = text_of(DEVICES / f"system/cpu/cpu{logical[0]}/topology/physical_package_id")
        sockets.setdefault(socket, []).append(logical)
    least = sum(load(logical)[0] for logical in quietest[:threads])
    quietest = next((own for own in sockets.values() if len(own) >= threads
                     and sum(load(logical)[0] for logical in own[:threads]) == least), quietest)
    # Of each quiet physical core its quietest logical one; the siblings follow only if more threads are needed.
    chosen = [min(logical, key=lambda each: (busy.get(each, 0.0), -each)) for logical in quietest[:threads]]
    rest = [each for logical in quietest for each in logical if each not in chosen]
    return sorted([*chosen, *rest[: threads - len(chosen)]])


def describe_cores(cores: Collection[int], all_cores: Sequence[int]) -> str:
    """Return some of `all_cores` of this machine in words, such as "core 3 of 4"."""
    chosen = sorted(cores)
    words = f"core {chosen[0]}" if len(chosen) == 1 else f"cores {', '.join(map(str, chosen[:-1]))} and {chosen[-1]}"
    kinds = physical_cores(all_cores)
    own_kinds = {logical: kind for logical, kind in kinds.items() if {*logical} & {*chosen}}
    is_fastest = max(own_kinds.values(), default=0) == max(kinds.values())
    kind = "" if len({*kinds.values()}) < 2 else f", {'' if is_fastest else 'not '}of the fastest kind"
    shared = any(len(logical) > 1 for logical in own_kinds)
    return f"{words} of {len(all_cores)}{', which shares a physical core with another' if shared else ''}{kind}"


def _core_list(text: str) -> list[int]:
    """Return the cores of a list such as "0-3,8"; empty for anything else."""
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        return []
    return cores


def whole_number(text: str) -> int:
    """Return a text as a whole number; 0 if it is none."""
    return int(text) if text.strip().isdecimal() else 0


def text_of(path: Path) -> str:
    """Return the text of a file of /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _entry(path: Path, name: str) -> int:
    """Return the number behind `name` in a file of /proc or /sys with a name and a number in each line; or else 0."""
    words = (line.split() for line in text_of(path).splitlines())
    return next((whole_number(part[1]) for part in words if part[:1] == [name] and part[1:]), 0)


def free_memory_mb() -> int:
    """Return the MiB of memory that processes can have, by the system and the control groups; 2**20 if unknown."""
    free_mb = [free for folder in _own_groups("memory") if (free := _memory_left_in(folder)) is not None]
    if available := _entry(Path("/proc/meminfo"), "MemAvailable:"):  # only Linux has it
        free_mb.append(available >> 10)
    return min(free_mb, default=1 << 20)


def _memory_left_in(folder: Path) -> int | None:
    """Return the MiB that a control group's limit leaves, with the cached files it can drop; None without a limit."""
    for limit, used, cached in (("memory.max", "memory.current", "inactive_file"),
                                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        if (most := text_of(folder / limit)).isdigit():
            free = int(most) - whole_number(text_of(folder / used)) + _entry(folder / "memory.stat", cached)
            return max(0, free) >> 20
    return None
