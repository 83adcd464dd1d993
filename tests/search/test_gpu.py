"""A search for a GPU, whole and small, with the CPU in its place: names, fingerprints, front and card are of a GPU."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from table_fixtures import write_table

from hwnas.cli.command import as_typed, compose, run_command
from hwnas.cli.progress import Console
from hwnas.errors import TargetError
from hwnas.latency.timing import HERE
from hwnas.runtimes import onnxruntime_gpu
from hwnas.runtimes.onnxruntime_gpu import CudaRuntime
from hwnas.search.__main__ import main
from hwnas.search.plan import make_plan
from hwnas.system import gpu
from hwnas.system.run_folder import RunFolder
from hwnas.target import Host, Target
from hwnas.training import place
from hwnas.verify import making_of

pytestmark = pytest.mark.usefixtures("any_machine")
TARGET = Target("cuda_fp32", "onnxruntime_cuda", "fp32", device="cuda")
SMALL = ["+target=cuda_fp32", "dataset=digits", "dataset.image_size=16", "n_trials=2", "workers=1", "proxy.epochs=1",
         "proxy.min_steps=2", "proxy.train_images=256", "finalists.k=1", "finalists.recipe.max_steps=8", "baselines=[]",
         "controls=0", "verification.seconds=5", "space=mnasnet_small"]


class StandIn(CudaRuntime):
    """The CPU in place of the GPU: it runs all nodes, and another provider does not load."""

    memory = "cpu"
    providers = (("CPUExecutionProvider", {}),)

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def version(self) -> str:
        return f"{self.name} 1"


@pytest.fixture(scope="module")
def standing_in() -> Iterator[None]:
    """A made-up NVIDIA L4, whose work the CPU does."""
    nvml = SimpleNamespace(
        NVMLError=RuntimeError, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetName=lambda handle: "NVIDIA L4",
        nvmlSystemGetDriverVersion=lambda: "580.95", nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=24 << 30),
        nvmlDeviceGetClockInfo=lambda handle, kind: 1710, nvmlDeviceGetTemperature=lambda handle, kind: 61,
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x4)
    gpu._open_gpu.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", nvml)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(onnxruntime_gpu, "CudaRuntime", partial(StandIn, "CPUExecutionProvider"))
        yield
    gpu._open_gpu.cache_clear()


@pytest.fixture(scope="module")
def table(any_machine: None, standing_in: None) -> Path:
    """A made-up table of this host with that GPU."""
    return write_table(Path(os.environ["HWNAS_HOME"]), "cuda_fp32", 16, host_name=HERE.for_target(TARGET).host.name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, table: Path) -> Path:
    """A run on it."""
    out = tmp_path_factory.mktemp("gpu") / "run"
    assert run_command(main, "search", "usage", [*SMALL, f"out={out}"]) == 0
    return out


@pytest.mark.soak
def test_the_front_is_verified_on_the_gpu(run: Path) -> None:
    with (run / "front.csv").open() as file:
        row, = csv.DictReader(file)
    assert row["verified"] == "true", row["reason"]
    assert (row["target"], row["precision"], row["host"]) == ("cuda_fp32", "fp32", f"{Host.detect().name}-nvidia-l4")
    card = (run / "models" / row["id"] / "card.md").read_text()
    assert "## ONNX Runtime on CUDA" in card
    assert "assert session.get_providers()[0]" in card


def test_a_provider_that_does_not_load_is_told_before_the_trials(table, tmp_path, monkeypatch):
    assert table.parent.name == f"{Host.detect().name}-nvidia-l4"
    monkeypatch.setattr(onnxruntime_gpu, "CudaRuntime", partial(StandIn, "CUDAExecutionProvider"))
    with pytest.raises(TargetError, match="could not load its CUDAExecutionProvider"):
        make_plan(compose("search", as_typed([*SMALL, f"out={tmp_path}"])), Console(quiet=True))
    assert make_plan(compose("search", as_typed([*SMALL, f"out={tmp_path}"])), Console(quiet=True), trials_only=True)


@pytest.mark.soak
def test_a_machine_without_a_gpu_verifies_what_one_has_trained(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.open(run)
    environment = folder.read_environment()
    assert environment["recipe"]["device"] == "cpu"
    trained_there = {**environment, "recipe": {**environment["recipe"], "device": "cuda", "precision": "bf16"}}
    monkeypatch.setattr(place, "has_bf16", lambda: False)
    making = making_of(folder, folder.read_config(), trained_there, {})
    assert (making.recipe.device, making.recipe.precision) == ("cpu", "bf16")


@pytest.mark.soak
def test_its_condition_and_its_driver_are_kept(run: Path) -> None:
    host = json.loads((run / "environment.json").read_text())["host"]
    assert (host["gpu"], host["gpu_driver"], host["gpu_cuda"]) == ("NVIDIA L4", "580.95", "13.0")
    measured = json.loads((run / "measurements.json").read_text())
    turns = [state for network in measured["networks"].values() for state in network["gpu"]]
    assert turns
    assert all(state == [1710, 61, 0x4] for state in turns)
