"""A device over OpenSSH itself: a server on the loopback address with keys of its own, under this user."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device_fixtures import Server, agents, key, wait_for_agents

from hwnas.cli.progress import Console
from hwnas.errors import DeviceError
from hwnas.latency import remote
from hwnas.latency.copies import TimedFile, noise
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import prepare_network, reference_network, time_files
from hwnas.system import ssh
from hwnas.system.ssh import Address
from hwnas.target import Target

ORT = Target("ort_fp32", "onnxruntime", "fp32")
QUICK = Protocol(max_seconds=2.0, copies=2, min_rounds=2, max_rounds=3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network for grey images of 32 px."""
    return prepare_network(reference_network(), ORT, tmp_path_factory.mktemp("file"))


@pytest.mark.usefixtures("any_machine")
def test_it_is_timed_over_there_and_nothing_is_left_but_the_cache(sshd: Server, file: Path) -> None:
    device = sshd.device()
    assert device.host.name == "loopback-2c"
    named = {"mine": TimedFile(file, ORT, (1, 32, 32))}
    measurement = time_files(named, ORT, reference_network(), QUICK, device=device)["mine"]
    assert measurement.turns
    device.close()
    wait_for_agents(sshd.folder)
    cache = sshd.folder / ".cache/hwnas-agent"
    left = {path.relative_to(cache).parts[0] for path in cache.rglob("*") if path.is_file()}
    assert {"files"} <= left <= {"files", "quiet_runs.json"}  # the second only after a quiet run


def test_a_connection_that_is_killed_is_made_again_and_its_agent_ends(sshd: Server, file: Path) -> None:
    device = sshd.device()
    compiled = device.runtime("onnxruntime").compile(file, ORT)
    assert device.connection is not None
    process = device.connection.process
    before = agents(sshd.folder)
    assert len(before) > 1
    process.kill()
    assert len(compiled.logits(noise(1, (1, 32, 32)))) == 1
    assert device.connection.process.pid != process.pid
    wait_for_agents(sshd.folder, before)
    del compiled, device
    wait_for_agents(sshd.folder)


@contextmanager
def kept(path: Path) -> Iterator[Path]:
    """Inside, a file of all tests may be changed."""
    before = path.read_text()
    try:
        yield path
    finally:
        path.write_text(before)


def test_unknown_and_changed_keys_passwords_and_closed_ports_are_told_apart(sshd):
    with kept(sshd.folder / "known_hosts") as known:
        known.write_text("")
        with pytest.raises(DeviceError, match=rf"host key that is not known .* by hand .*: ssh -p {sshd.port} "):
            sshd.device()
        known.write_text(f"[127.0.0.1]:{sshd.port} {key(sshd.folder / 'another')}")
        with pytest.raises(DeviceError, match=rf"another host key .* ssh-keygen -R '\[127\.0\.0\.1\]:{sshd.port}'"):
            sshd.device()
    with kept(sshd.folder / "authorized_keys") as allowed:
        allowed.write_text("")
        with pytest.raises(DeviceError, match=rf"takes no key of yours .* ssh-copy-id -p {sshd.port} "):
            sshd.device()
    with pytest.raises(DeviceError, match=r"cannot be reached: .*refused.* Try by hand: ssh -p 1 nobody@127\.0\.0\.1"):
        remote.RemoteDevice(Address.read("nobody@127.0.0.1:1"), None, Console(quiet=True))


@pytest.mark.soak
@pytest.mark.usefixtures("any_machine")
def test_of_twenty_killed_connections_nothing_is_lost(sshd, file, monkeypatch):
    """ssh is killed at moments spread over connecting, sending and timing; every measurement comes back whole."""
    monkeypatch.setattr(remote, "WAITS_S", (0.1,) * 40)
    device = sshd.device()
    kills: list[int] = []
    made = remote.Connection

    def noting(*given: Any) -> ssh.Connection:
        connection = made(*given)
        if len(kills) < 20:
            kills.append(connection.process.pid)
            threading.Timer(0.15 * len(kills), connection.process.kill).start()
        return connection

    monkeypatch.setattr(remote, "Connection", noting)
    assert device.connection is not None
    device.connection.process.kill()
    files = {f"n{number}": TimedFile(file, replace(ORT, batch=1 + number), (1, 32, 32)) for number in range(3)}
    measured = 0
    while len(kills) < 20:
        measurements = time_files(files, ORT, reference_network(), QUICK, device=device)
        assert list(measurements) == list(files)
        assert all(measurement.valid for measurement in measurements.values())
        measured += 1
    print(f"{len(kills)} connections killed, {measured} measurements")
    assert not any(subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode == 0
                   for pid in kills[:-1])
    del device
    wait_for_agents(sshd.folder)
