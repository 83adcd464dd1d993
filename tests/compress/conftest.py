"""A small trained network for the tests of compression, hostile versions of it, and a clock that nobody disturbs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from compress_fixtures import NETWORK, job_of
from deployment_fixtures import measured
from safetensors.torch import save_file

from hwnas import train
from hwnas.cli.command import run_command
from hwnas.compress.job import CompressJob
from hwnas.latency import timing
from hwnas.networks.build import build
from hwnas.networks.export import export_onnx
from hwnas.networks.network import load_weights
from hwnas.system.run_folder import Manifest, ModelFolder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of hwnas.train: 8 px digits, about 94 %."""
    folder = tmp_path_factory.mktemp("compress")
    (folder / "architecture.yaml").write_text(NETWORK.to_yaml())
    code = run_command(train.main, "train", "usage", [
        "-q", f"architecture={folder / 'architecture.yaml'}", f"out={folder / 'net'}", "dataset=digits", "epochs=8",
        "lr=0.02", "threads=1", "ema_decay=0", "device=cpu"], target=False)
    assert code == 0
    return folder / "net"


@pytest.fixture(scope="session")
def checked(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> CompressJob:
    return job_of(trained, tmp_path_factory.mktemp("checked"))


@pytest.fixture
def job(checked: CompressJob, tmp_path: Path) -> CompressJob:
    """A compression of the trained network for ort_int8, with a folder of its own."""
    return replace(checked, folder=ModelFolder(tmp_path / "job"))


@pytest.fixture
def hostile(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Path]:
    """The same function with one channel of every expansion scaled by a factor and the depthwise filter behind it by
    its inverse: a large factor spoils one range of activations, a small one the weights of the whole tensor."""
    def scaled(factor: float) -> Path:
        folder = tmp_path_factory.mktemp("hostile")
        model = build(NETWORK).eval()
        load_weights(model, trained / "weights.safetensors", "weights", 10)
        with torch.no_grad():
            for block in (model.blocks[1][0], model.blocks[2][0]):
                channel = int(block.conv_dw.weight.abs().flatten(1).sum(1).argmax())
                block.bn1.weight[channel] *= factor
                block.bn1.bias[channel] *= factor
                block.conv_dw.weight[channel] /= factor
        about = {entry.key: entry.value for entry in onnx.load(str(trained / "model.onnx")).metadata_props}
        export_onnx(model, folder / "model.onnx", (1, 8, 8), about)
        save_file({name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()},
                  str(folder / "weights.safetensors"))
        shutil.copy(trained / "architecture.yaml", folder)
        Manifest.write(folder, folder.iterdir(), about["recipe"])
        return folder

    return scaled


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Milliseconds by name (0.2 otherwise) instead of measured ones; every copy makes its inference once."""
    times: dict[str, float] = {}

    def measure(calls, reference, protocol, **options):
        for copies in [*calls.values(), reference]:
            assert len(copies) == protocol.copies
            for call in copies:
                call()
        return {name: measured(times.get(name, 0.2)) for name in calls}

    monkeypatch.setattr(timing, "measure", measure)
    return times
