"""The host's fingerprint: stable, named, cut to what the process may use."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from hwnas.target import host as host_module
from hwnas.target.host import Host, usable_cores

EPYC = Host("AMD EPYC 9654 96-Core Processor", "amd", 25, 17, 1, ("avx2",), 4, 15.5, "6.1", "performance")


@pytest.mark.parametrize(("host", "name"), [
    (EPYC, "amd-epyc-9654-f25m17s1-4c"),
    (replace(EPYC, cpu="Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", vendor="intel", family=6, model=143),
     "intel-xeon-platinum-8480-f6m143s1-4c"),
    (replace(EPYC, cpu="", vendor="aarch64"), "aarch64-x86-64-f25m17s1-4c")])
def test_the_name_is_a_folder_name_made_of_the_cpu(host, name, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86-64")
    assert host.name == name


def test_detection_is_stable_and_names_a_core_at_least():
    first, second = Host.detect(), Host.detect()
    assert first == second
    assert first.cores >= 1
    assert first.to_dict()["name"] == first.name


def test_affinity_and_quota_cut_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(host_module, "_cgroup_quota", lambda: 2.5)
    assert usable_cores() == [0, 1]
    monkeypatch.setattr(host_module, "_cgroup_quota", lambda: 0.5)
    assert usable_cores() == [0]
    monkeypatch.setattr(host_module, "_cgroup_quota", lambda: None)
    assert usable_cores() == [0, 1, 2, 3]
