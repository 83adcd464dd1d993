"""Cores: quotas of control groups, physical cores, and which are the quietest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hwnas.system import cores
from hwnas.system.cores import (
    busy_seconds,
    choose_cores,
    describe_cores,
    free_memory_mb,
    throttled_periods,
    usable_cores,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of four cores whose /proc and /sys are files of the test."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cores, "STAT", tmp_path / "stat")
    monkeypatch.setattr(cores, "DEVICES", tmp_path / "devices")
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(("own", "files", "n"), [
    ("0::/", {}, 4),
    ("0::/", {"cpu.max": "250000 100000"}, 2),
    ("0::/", {"cpu.max": "max 100000"}, 4),
    ("0::/user/job", {"user/job/cpu.max": "100000 100000"}, 1),  # Slurm, a systemd slice: no namespace
    ("0::/user/job", {"user/cpu.max": "200000 100000", "user/job/cpu.max": "max 100000"}, 2),  # the least on the path
    ("0::/user/job", {"user/cpu.max": "300000 100000", "user/job/cpu.max": "50000 100000"}, 1),
    ("3:cpuset:/x\n2:cpu,cpuacct:/q", {"cpu/q/cpu.cfs_quota_us": "100000", "cpu/q/cpu.cfs_period_us": "100000"}, 1),
    ("2:cpu:/q", {"cpu/q/cpu.cfs_quota_us": "-1", "cpu/q/cpu.cfs_period_us": "100000"}, 4),
    ("2:cpu:/q\n0::/", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ("2:memory:/q", {"memory/q/cpu.max": "100000 100000"}, 4),
    ("0::/../outside", {"outside/cpu.max": "100000 100000"}, 1),
    ("nonsense", {"cpu.max": "1 0"}, 4)])
def test_the_least_quota_on_the_path_of_the_own_group_counts(machine, own, files, n):
    put(machine / "own", own)
    for name, text in files.items():
        put(machine / "cgroup" / name, text)
    assert len(usable_cores()) == n


@pytest.mark.parametrize(("own", "files", "mb"), [
    ("0::/", {"memory.max": "max", "memory.current": "5"}, None),
    ("0::/", {"memory.max": str(400 << 20), "memory.current": str(300 << 20),
              "memory.stat": f"anon 5\ninactive_file {20 << 20}"}, 120),
    ("0::/a/b", {"a/memory.max": str(90 << 20), "a/memory.current": "0", "a/b/memory.max": "max"}, 90),
    ("9:memory:/q", {"memory/q/memory.limit_in_bytes": str(70 << 20), "memory/q/memory.usage_in_bytes": "0"}, 70),
    ("9:memory:/q", {"memory/q/memory.limit_in_bytes": "9223372036854771712"}, None)])
def test_memory_is_what_the_own_group_leaves(machine, own, files, mb):
    before = free_memory_mb()
    put(machine / "own", own)
    for name, text in files.items():
        put(machine / "cgroup" / name, text)
    assert free_memory_mb() == mb if mb is not None else abs(free_memory_mb() - before) < 2048


def test_stops_by_a_quota_and_busy_seconds_are_read_where_the_system_says(machine):
    assert throttled_periods() == 0
    put(machine / "own", "0::/job")
    put(machine / "cgroup/job/cpu.stat", "usage_usec 5\nnr_periods 100\nnr_throttled 34")
    assert throttled_periods() == 34
    assert busy_seconds([0, 1]) == {}
    put(machine / "stat", "cpu  9 9 9 9 9 9 9 9\ncpu0 100 0 50 1000 3 0 0 25 0 0\ncpu1 torn")
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_seconds([0]) == {0: 175 / ticks}
    assert busy_seconds([0, 1]) == {0: 175 / ticks}


def siblings(machine: Path, *groups: str) -> None:
    for group in groups:
        for core in cores._core_list(group):
            put(machine / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", group)


def test_the_quietest_cores_are_taken_and_whole_physical_ones_while_there_are_enough(machine):
    assert choose_cores(1, {}) == [3]
    assert choose_cores(1, {0: 0.0, 1: 0.01, 2: 0.9, 3: 0.4}) == [1]
    assert choose_cores(1, {0: 0.02, 1: 0.5, 2: 0.5, 3: 0.5}) == [0]
    assert choose_cores(2, {0: 0.0, 1: 0.9, 2: 0.0, 3: 0.9}) == [0, 2]
    assert choose_cores(0, {}) == [0, 1, 2, 3]
    assert choose_cores(9, {}) == [0, 1, 2, 3]
    siblings(machine, "0,2", "1,3")
    assert choose_cores(2, {}) in ([2, 3], [0, 3], [1, 2])  # one of each physical core
    assert choose_cores(1, {2: 0.9}) in ([1], [3])  # the thread beside a busy one is no quiet place
    assert choose_cores(3, {}) == sorted({*choose_cores(3, {})})
    assert "shares a physical core" in describe_cores([0], range(4))


def test_of_equally_busy_cores_those_of_one_socket_are_taken(machine: Path) -> None:
    for core in range(4):  # as many servers number them
        put(machine / f"devices/system/cpu/cpu{core}/topology/physical_package_id", str(core % 2))
    assert choose_cores(1, {}) == [3]
    assert choose_cores(2, {}) == [1, 3]
    assert choose_cores(2, {3: 0.9}) == [0, 2]
    assert choose_cores(2, {0: 0.9, 3: 0.9}) == [1, 2]
    assert choose_cores(3, {3: 0.9}) == [0, 1, 2]


def test_cores_of_one_kind_are_taken_the_fastest_first(machine: Path) -> None:
    put(machine / "devices/cpu_core/cpus", "0-1")
    put(machine / "devices/cpu_atom/cpus", "2-3")
    assert choose_cores(1, {}) == [1]
    assert choose_cores(2, {}) == [0, 1]
    assert choose_cores(3, {}) != [0, 1]  # more than there are of one kind
    assert "of the fastest kind" in describe_cores([1], range(4))
    for core, capacity in enumerate((446, 446, 1024, 1024)):
        put(machine / f"devices/system/cpu/cpu{core}/cpu_capacity", str(capacity))
    assert choose_cores(1, {3: 0.5}) == [2]
