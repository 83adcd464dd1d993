"""Calibration, for real but small: what is stored, what a second space and a second call reuse."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from hwnas.cli.command import run_command
from hwnas.latency.draws import TimingPlan
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import NetworkTimer
from hwnas.profile import profile as main
from hwnas.space.search_space import SearchSpace

pytestmark = pytest.mark.usefixtures("any_machine")
QUICK = ["-q", "calibration.networks=12", "calibration.minutes=60"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, any_machine: None):
    """A user folder of its own for this module."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("HWNAS_HOME", str(folder))
        yield folder


def profile(*overrides: str) -> int:
    return run_command(main, "profile", "usage", [*QUICK, *overrides])


@pytest.mark.parametrize("target", ["ort_fp32", *(
    pytest.param(name, marks=pytest.mark.soak) for name in ("ort_int8", "epyc_fp32"))])
def test_a_table_holds_whole_networks_and_what_its_model_is_worth(home, target, capsys):
    assert profile(f"+target={target}") == 0
    assert re.search(r"covers \d+% .* half-width \d+\.\d%", capsys.readouterr().err)
    runtime, precision = ("onnxruntime", target[4:]) if target.startswith("ort") else ("openvino", "fp32")
    table = LatencyTable.load(next(home.rglob(f"{runtime}-{precision}-*.json")))
    assert len(table.networks) == 12
    assert table.error["mnasnet_small"]["n"] == 12
    assert table.processes == {"mnasnet_small": 1}


@pytest.mark.soak
def test_a_second_call_adds_and_never_times_a_network_twice(home):
    if not list(home.rglob("onnxruntime-fp32-*.json")):
        assert profile("+target=ort_fp32") == 0
    assert profile("+target=ort_fp32", "calibration.seed=99") == 0
    table = LatencyTable.load(next(home.rglob("onnxruntime-fp32-*.json")))
    names = [one.architecture.id for one in table.networks]
    assert len(names) == len(set(names)) > 12


def test_a_precision_that_the_runtime_lacks_is_refused_before_anything_is_measured(home, capsys):
    assert profile("+target=ort_fp32", "target.precision=bf16") == 2
    error = capsys.readouterr().err
    assert "bf16" in error
    assert "fp32, int8" in error
    assert not list(home.rglob("onnxruntime-bf16-*.json"))


def test_the_plan_is_seeded_distinct_and_spans_the_space(monkeypatch):
    monkeypatch.setattr("hwnas.latency.draws.POPULATION", 200)
    monkeypatch.setattr("hwnas.latency.draws.GENERATIONS", 1)
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)

    def planned(seed: int):
        plan = TimingPlan(space, seed, set())
        return plan.wave(20, None) + plan.wave(20, lambda codes: 1.0 + codes.sum(axis=1))

    found = planned(5)
    assert found == planned(5)
    assert found != planned(6)
    networks = [one for _, one in found]
    assert len({one.id for one in networks}) == 40
    assert {one.id for one in space.known.values()} <= {one.id for one in networks}
    assert sum(origin == "front" for origin, _ in found) == 10
    macs = np.array([one.macs for one in networks])
    assert macs.max() > 8 * macs.min()
    space = SearchSpace.load("mnasnet_small", channels=1, classes=10)
    held = {one.id for _, one in TimingPlan(space, 5, set()).wave(30, None)}
    assert not held & {one.id for _, one in TimingPlan(space, 5, held).wave(30, None)}


WAITING = """
import sys, time
import hwnas.latency.calibration
from hwnas.cli.command import run_command
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import NetworkTimer
from hwnas.profile import profile as main

save = LatencyTable.save

def saving(self, *place):
    save(self, *place)
    NetworkTimer.time_next = lambda *wave, **options: time.sleep(3600)

LatencyTable.save = saving
hwnas.latency.calibration.WAVE = int(sys.argv[1])
run_command(main, "profile", "usage", sys.argv[2:])
"""


WAVE = 6  # networks that the killed process times at once


@pytest.mark.soak
def test_killed_while_measuring_it_keeps_every_finished_wave_and_goes_on(tmp_path):
    """SIGKILL in the second wave: that one is lost; the same command finishes what was begun."""
    overrides = ["+target=ort_fp32", f"calibration.networks={WAVE + 6}", "budget.minutes=5"]
    environment = {**os.environ, "HWNAS_HOME": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(WAVE), *overrides], env=environment,
                               start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 900
        while not list(tmp_path.rglob("*.partial.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    kept = LatencyTable.load(next(tmp_path.rglob("*.partial.json")))
    assert 0 < len(kept.networks) <= WAVE  # less what may be INVALID
    done = subprocess.run([sys.executable, "-m", "hwnas.profile", *overrides], env=environment, capture_output=True,
                          text=True, check=True)
    assert f"going on with an unfinished calibration: {len(kept.networks)} networks" in done.stderr
    assert not list(tmp_path.rglob("*.partial.json"))
    table = LatencyTable.load(next(tmp_path.rglob("onnxruntime-*.json")))
    names = [one.architecture.id for one in table.networks]
    assert {one.architecture.id for one in kept.networks} <= set(names)
    assert len(names) == len(set(names)) <= WAVE + 6


def test_a_machine_too_restless_for_the_only_wave_is_told_so(home, capsys, monkeypatch):
    def time_next(self: NetworkTimer, **options: object) -> dict[str, SimpleNamespace]:
        return {network.id: SimpleNamespace(valid=False, reason="no turn was quiet")
                for network, job in self.waves.popleft()}

    monkeypatch.setattr(NetworkTimer, "time_next", time_next)
    monkeypatch.setattr(NetworkTimer, "wait_exported", lambda self: None)
    monkeypatch.setattr(NetworkTimer, "_start_export", lambda self, architecture, folder: None)
    assert profile("+target=ort_fp32", "space=fused") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "0 networks of space fused could be timed, and 10 are needed: no turn was quiet. Stop" in error
    next(home.rglob("*.partial.json")).unlink()


def test_a_torn_unfinished_calibration_is_one_clear_line(home, capsys):
    table = next(home.rglob("onnxruntime-fp32-*.json"))
    partial = table.with_suffix(".partial.json")
    partial.write_text(table.read_text()[:1000])
    try:
        assert profile("+target=ort_fp32") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "not whole JSON" in error
        assert partial.name in error
    finally:
        partial.unlink()


def test_a_second_calibration_of_the_same_table_says_that_it_waits(home, capsys, monkeypatch):
    from hwnas.cli.progress import Console
    from hwnas.latency.deployment import calibration_lock

    table = LatencyTable.load(next(home.rglob("onnxruntime-fp32-*.json")))
    monkeypatch.setattr("hwnas.latency.deployment.calibrate", lambda *given, **options: table)
    waited = threading.Event()
    with calibration_lock(table.host_name, table.key, Console()):
        second = threading.Thread(
            target=lambda: profile("+target=ort_fp32", "calibration.seed=5") == 0 and waited.set())
        second.start()
        said, deadline = "", time.monotonic() + 900
        while f"waiting for another calibration of {table.key}" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capsys.readouterr().err
        assert f"waiting for another calibration of {table.key}" in said
        assert not waited.is_set()
    second.join()
    assert waited.is_set()
