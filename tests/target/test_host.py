"""The host's fingerprint: stable, named, cut to what the process may use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hwnas import target as host_module
from hwnas.errors import TargetError
from hwnas.target import Host, measuring_lock

EPYC = Host("AMD EPYC 9654 96-Core Processor", "amd", 25, 17, 1, ("avx2",), 4, 15.5, "6.1", "performance")


@pytest.mark.parametrize(("host", "name"), [
    (EPYC, "amd-epyc-9654-f25m17s1-4c"),
    (replace(EPYC, cpu="Intel(R) Xeon(R) Platinum 8480+ CPU @ 2.00GHz", vendor="intel", family=6, model=143),
     "intel-xeon-platinum-8480-f6m143s1-4c"),
    (replace(EPYC, cpu="", vendor="aarch64"), "aarch64-x86-64-f25m17s1-4c"),
    (replace(EPYC, given="kitchen-board"), "kitchen-board")])
def test_the_name_is_a_folder_name_made_of_the_cpu(host, name, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86-64")
    assert host.name == name


def test_what_a_machine_sets_otherwise_than_its_table_says_is_named():
    before = replace(EPYC, huge_pages="always").to_dict()
    assert EPYC.changes_since(before) == "huge pages always then, unknown now"
    assert replace(EPYC, kernel="6.2", huge_pages="always").changes_since(before) == "kernel 6.1 then, 6.2 now"
    assert EPYC.changes_since({"kernel": "6.1"}) == ""  # an older table says less


PI = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: {variant}
CPU part\t: {part}
CPU revision\t: {revision}
"""
PI4, PI5 = PI.format(variant="0x0", part="0xd08", revision=3), PI.format(variant="0x4", part="0xd0b", revision=1)


@pytest.mark.parametrize(("cores", "name"), [
    ([PI4] * 4, "aarch64-i41pd08r0p3-4c"), ([PI5] * 4, "aarch64-i41pd0br4p1-4c"),
    ([PI4, PI4, PI5, PI5], "aarch64-i41pd08r0p3-i41pd0br4p1-4c")])
def test_boards_of_other_cores_have_other_names(cores, name, monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("\n".join(cores) + "\nHardware\t: BCM2835\n")
    monkeypatch.setattr(host_module, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(host_module, "usable_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("platform.processor", lambda: "")
    assert Host.detect().name == Host.detect().to_dict()["name"] == name


def test_a_host_that_looks_like_others_is_asked_for_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(host_module, "CPUINFO", tmp_path / "none")
    with pytest.raises(TargetError, match="HWNAS_HOST=my-board"):
        _ = Host.detect().name
    monkeypatch.setenv("HWNAS_HOST", "shelf-3")
    assert Host.detect().name == "shelf-3"
    monkeypatch.setenv("HWNAS_HOST", "../up")
    with pytest.raises(TargetError, match="no plain name"):
        Host.detect()


MEASURING = """
import os, sys
from pathlib import Path
import filelock
from hwnas import target as host
if os.getuid() == 0:
    os.setuid(65534)  # nobody
host.LOCK_FOLDERS = (Path(sys.argv[1]),)
with host.measuring_lock([0]):
    print("measures", flush=True)
    sys.stdin.read()
"""


def test_a_measurement_waits_for_that_of_another_user_with_another_tmpdir(tmp_path, monkeypatch, request):
    """And says who it is, and since when."""
    folder = Path(tempfile.mkdtemp(prefix="hwnas-locks-"))  # outside of what this user keeps to himself
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o1777)  # as /dev/shm
    monkeypatch.setattr(host_module, "LOCK_FOLDERS", (folder,))
    measuring = subprocess.Popen([sys.executable, "-c", MEASURING, folder], stdin=subprocess.PIPE, text=True,
                                 stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert measuring.stdout is not None
    assert measuring.stdout.readline() == "measures\n"
    heard: list[str] = []
    asked, had = threading.Event(), threading.Event()

    def measure() -> None:
        with measuring_lock([0], lambda _, note: (heard.append(note), asked.set())):
            had.set()
        asked.set()  # it did not wait

    waiting = threading.Thread(target=measure)
    waiting.start()
    assert asked.wait(300)
    assert not had.is_set()
    measuring.communicate("")
    waiting.join()
    assert had.is_set()
    assert folder.joinpath("hwnas-measuring-core0.lock").stat().st_mode & 0o666 == 0o666  # any user may take it
    _, _, who = heard[0].partition(": ")
    assert re.fullmatch(rf"process {measuring.pid} \(.*python.*\), since \d\d:\d\d:\d\d|another process", who)


def test_the_lock_is_of_the_machine_whatever_tmpdir_says():
    code = "from hwnas.target import _lock_folder; print(_lock_folder())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": "/"}, capture_output=True,
                          text=True, check=True)
    folder = Path(done.stdout.strip())
    shared = [path for path in (Path("/dev/shm"), Path("/run/lock")) if path.is_dir()]
    assert folder in (shared or [Path("/")])
