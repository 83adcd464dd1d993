"""The GPU as NVML tells of it: its name, its condition, and what becomes of both in fingerprints and measurements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hwnas.benchmark.report import describe_states
from hwnas.errors import TargetError
from hwnas.latency import harness
from hwnas.latency.measurement import Measurement, Protocol, Turn
from hwnas.latency.remote import RemoteDevice
from hwnas.latency.timing import HERE
from hwnas.system import gpu
from hwnas.system.gpu import GpuState, describe_gpu, read_gpu_state
from hwnas.target import Host, Target

CUDA = Target("cuda_fp16", "onnxruntime_cuda", "fp16", device="cuda")
CPU = Target("ort_fp32", "onnxruntime", "fp32")


class Missing(Exception):
    """NVML's error."""


def lacks(*_: Any) -> int:
    raise Missing("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A made-up NVIDIA L4."""
    module = SimpleNamespace(
        NVMLError=Missing, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"index {index}",
        nvmlDeviceGetHandleByUUID=lambda name: name or lacks(),
        nvmlDeviceGetName=lambda handle: "NVIDIA L4", nvmlSystemGetDriverVersion=lambda: "580.95.05",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13020,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 << 30),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1710, nvmlDeviceGetTemperature=lambda handle, kind: 61,
        nvmlDeviceGetCurrentClocksEventReasons=lacks,  # as with a driver that knows the other name only
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    gpu._open_gpu.cache_clear()
    yield module
    gpu._open_gpu.cache_clear()


def test_its_name_and_state_are_read_as_far_as_the_driver_tells_them(nvml):
    assert describe_gpu() == {"gpu": "NVIDIA L4", "gpu_driver": "580.95.05", "gpu_cuda": "13.2", "gpu_memory_gib": 24.0}
    assert read_gpu_state() == GpuState(1710, 61, 0x4)
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x40
    assert read_gpu_state().slowed
    nvml.nvmlDeviceGetClockInfo = lacks  # as of a part of a GPU
    assert read_gpu_state().sm_mhz == 0
    nvml.nvmlDeviceGetMemoryInfo = lacks
    assert describe_gpu()["gpu_memory_gib"] == 0


def test_a_power_limit_is_told_and_no_disturbance():
    assert (GpuState(reasons=0x4).slowed, GpuState(reasons=0x4).told) == (False, "power limit")
    assert (GpuState(reasons=0x1).slowed, GpuState(reasons=0x1).told) == (False, "")
    assert GpuState(1700, 60, 0x4).worse(GpuState(1500, 55, 0x20)) == GpuState(1500, 60, 0x24)
    assert GpuState(reasons=0x24).told == "power limit, heat (software)"
    states = [GpuState(1700, 60, 0x4), GpuState(1650, 62)]
    assert describe_states(states) == "clock 1650 to 1700 MHz, up to 62 °C, held down by power limit"
    assert describe_states(states[1:]) == "clock 1650 to 1650 MHz, up to 62 °C"


@pytest.mark.parametrize(("shown", "first"), [
    (None, "index 0"), ("2,3", "index 2"), ("GPU-1a2b,GPU-3c", "GPU-1a2b"), ("MIG-1", "MIG-1")])
def test_the_first_gpu_is_the_one_that_programs_get(shown, first, nvml, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    nvml.nvmlDeviceGetName = lambda handle: handle
    assert describe_gpu()["gpu"] == first


def test_a_machine_without_one_says_so_in_one_line(nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(TargetError, match=r"shows no GPU '' \(Not Supported\)\. See .* CUDA_VISIBLE_DEVICES names"):
            describe_gpu()
    nvml.nvmlInit = lacks
    with pytest.raises(TargetError, match=r"this machine shows no GPU '0' \(Not Supported\)\. .*nvidia-smi"):
        describe_gpu()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(TargetError, match=r"pip install 'hwnas\[cuda\]'"):
        describe_gpu()


def test_only_targets_on_a_gpu_have_it_in_their_fingerprint(nvml: SimpleNamespace) -> None:
    plain, here = Host.detect(), HERE.for_target(CUDA).host
    assert HERE.for_target(CPU) is HERE
    assert not [key for key in plain.to_dict() if "gpu" in key]
    assert here.name == f"{plain.name}-nvidia-l4"
    told = here.to_dict()
    assert (told["gpu"], told["gpu_driver"], told["gpu_cuda"], told["gpu_memory_gib"]) == (
        "NVIDIA L4", "580.95.05", "13.2", 24.0)
    assert {key: value for key, value in told.items() if "gpu" not in key and key != "name"} == {
        key: value for key, value in plain.to_dict().items() if key != "name"}


def test_gpus_elsewhere_are_refused() -> None:
    device = RemoteDevice.__new__(RemoteDevice)
    assert device.for_target(CPU) is device
    with pytest.raises(TargetError, match=r"cuda_fp16 runs on a GPU.*Leave device= out"):
        device.for_target(CUDA)


def test_the_state_is_kept_with_each_turn_and_heat_voids_it(virtual_clock: Any) -> None:
    states = iter([GpuState(1700, 60), GpuState(900, 90, 0x40), *[GpuState(1700, 60), GpuState(1650, 62)] * 100])
    protocol = Protocol(min_rounds=3, max_rounds=3, copies=1)
    measured = harness.measure({"one": virtual_clock.call(0.2)}, virtual_clock.call(0.1), protocol,
                               gpu=lambda: next(states))["one"]
    assert [turn.slowed for turn in measured.turns] == [True, False, False, False]
    assert [turn.gpu for turn in measured.turns] == [GpuState(900, 90, 0x40), *[GpuState(1650, 62)] * 3]
    assert measured.latency_ms == pytest.approx(0.2)


def test_measurements_come_back_with_and_without_a_gpu() -> None:
    for state in (None, GpuState(1650, 62, 0x4)):
        turn = Turn((0.2, 0.21), (100.0,), gpu=state)
        before = Measurement((turn,) * 3, 0.1, Protocol(copies=1))
        values = before.to_dict()
        assert ("gpu" in values) == (state is not None)
        assert Measurement.from_dict(values, before.protocol, "here").turns == before.turns
