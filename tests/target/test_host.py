"""The host's fingerprint: stable, named, cut to what the process may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hwnas.target import host as host_module
from hwnas.target.host import Host, measuring_lock, usable_cores

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


MEASURING = """
import os, sys
from pathlib import Path
import filelock
from hwnas.target import host
if os.getuid() == 0:
    os.setuid(65534)  # nobody
host.LOCK_FOLDERS = (Path(sys.argv[1]),)
with host.measuring_lock([0]):
    print("measures", flush=True)
    sys.stdin.read()
"""


def test_a_measurement_waits_for_that_of_another_user_with_another_tmpdir(tmp_path, monkeypatch):
    """And says who it is, and since when."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)  # as /dev/shm
    monkeypatch.setattr(host_module, "LOCK_FOLDERS", (folder,))
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o755)  # only root becomes another user, and may
    measuring = subprocess.Popen([sys.executable, "-c", MEASURING, folder], stdin=subprocess.PIPE, text=True,
                                 stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert measuring.stdout is not None
    assert measuring.stdout.readline() == "measures\n"
    heard: list[str] = []
    asked, had = threading.Event(), threading.Event()

    def measure() -> None:
        with measuring_lock([0], lambda who: (heard.append(who), asked.set())):
            had.set()

    waiting = threading.Thread(target=measure)
    waiting.start()
    assert asked.wait(300)
    assert not had.is_set()
    measuring.communicate("")
    waiting.join()
    assert had.is_set()
    assert re.fullmatch(rf"process {measuring.pid} \(.*python.*\), since \d\d:\d\d:\d\d|another process", heard[0])


def test_the_lock_is_of_the_machine_whatever_tmpdir_says():
    code = "from hwnas.target.host import _lock_folder; print(_lock_folder())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": "/"}, capture_output=True,
                          text=True, check=True)
    folder = Path(done.stdout.strip())
    shared = [path for path in (Path("/dev/shm"), Path("/run/lock")) if path.is_dir()]
    assert folder in (shared or [Path("/")])
