"""What a GPU must show of its targets: who executes the nodes, answers, tables, a front with cards. `make test-gpu`."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hwnas.cli.command import run_command
from hwnas.latency.copies import TimedFile
from hwnas.latency.measurement import Protocol
from hwnas.latency.table import LatencyTable
from hwnas.latency.timing import reference_network, time_files
from hwnas.networks.export import export_onnx, randomise
from hwnas.runtimes.runtime import load_runtime
from hwnas.system.gpu import describe_gpu
from hwnas.target import Target
from hwnas.testing import check_runtime, contract_images

pytestmark = pytest.mark.gpu
TARGETS = ("cuda_fp32", "cuda_fp16")
ERRORS = {"cuda_fp32": 1e-3, "cuda_fp16": 0.05}  # of the largest logit


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MobileNetV3 with squeeze-and-excite and hard-swish."""
    from hwnas.networks.baselines import Baseline

    torch.manual_seed(0)
    model = randomise(Baseline("mobilenetv3_small_050").build(3, 10, 64), 0)
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    export_onnx(model, path, (3, 64, 64))
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_the_contract_and_the_answers(name: str, file: Path, needs: Callable[[str], Target]) -> None:
    cpu = load_runtime("onnxruntime").compile(file, Target("t", "onnxruntime", "fp32"))
    for batch in (1, 4):
        target = replace(needs(name), batch=batch)
        check_runtime(load_runtime(target.runtime), file, target, relative_error=ERRORS[name],
                      reference=cpu.logits(contract_images(file, 8)))


@pytest.mark.parametrize("name", TARGETS)
def test_the_gpu_executes_every_convolution(name: str, file: Path, needs: Callable[[str], Target],
                                            shown: Callable[[str], None]) -> None:
    target = needs(name)
    compiled = load_runtime(target.runtime).compile(file, target)
    execution = compiled.execution
    shown(f"{name}: {dict(execution.precisions)}, left to others: {dict(execution.outside) or 'nothing'}")
    assert execution.fallback_share == 0
    assert set(execution.precisions) <= {target.precision, "fp32"}
    assert not [kind for kind in execution.outside if "Conv" in kind or "Gemm" in kind]
    times = compiled.profile(contract_images(file, 1), 20)
    assert {time.device for time in times if time.kind in ("Conv", "FusedConv", "Gemm")} <= {"cuda"}
    assert sum(time.ms for time in times) > 0


@pytest.mark.parametrize("name", TARGETS)
def test_the_same_file_timed_twice(name: str, file: Path, needs: Callable[[str], Target],
                                   shown: Callable[[str], None]) -> None:
    target = needs(name)
    protocol = Protocol(max_seconds=30.0)
    timed = TimedFile(file, target, (3, 64, 64))
    runs = [time_files({"first": timed, "second": timed}, target, reference_network(3, 10, 64), protocol,
                       seed=seed) for seed in range(2)]
    measured = [measurement for run in runs for measurement in run.values()]
    assert all(measurement.valid for measurement in measured), [measurement.reason for measurement in measured]
    times = np.array([measurement.latency_ms for measurement in measured])
    states = [turn.gpu for measurement in measured for turn in measurement.turns if turn.gpu]
    reasons = {state.told for state in states if state.told}
    shown(f"{name}: {times.mean():.4f} ms, four timings differ by {np.ptp(times) / times.mean():.1%} at most; one "
          f"compilation from the next by {np.median([m.copy_spread for m in measured]):.1%}; clock "
          f"{min(state.sm_mhz for state in states)} to {max(state.sm_mhz for state in states)} MHz, up to "
          f"{max(state.celsius for state in states)} °C, slowed by: {', '.join(sorted(reasons)) or 'nothing'}")
    assert states, "the GPU's condition is kept with every turn"


@pytest.mark.parametrize("name", TARGETS)
def test_a_calibration(name: str, needs: Callable[[str], Target], shown: Callable[[str], None]) -> None:
    from hwnas.profile import profile

    target = needs(name)
    code = run_command(profile, "profile", "usage", [
        f"+target={name}", "space=mnasnet_small", "channels=1", "classes=10", "image_size=32", "budget.minutes=6",
        "calibration.networks=24"])
    assert code == 0
    path, = Path(os.environ["HWNAS_HOME"]).glob(f"latency_tables/*/{target.runtime}-{target.precision}-*.json")
    table = LatencyTable.load(path)
    assert table.host["gpu"] == describe_gpu()["gpu"]
    assert all(turn.gpu for network in table.networks for turn in network.measurement.turns)
    error = table.error["mnasnet_small"]
    shown(f"{name}: {len(table.networks)} networks, held-out error {error['mean_error']:.1%}, within 10 % "
          f"{error['within_10']:.0%}")


def test_a_search_that_trains_and_measures_on_the_gpu(needs: Callable[[str], Target], tmp_path: Path,
                                                      shown: Callable[[str], None]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA GPU")
    from hwnas.search.__main__ import main

    needs("cuda_fp16")
    out = tmp_path / "run"
    assert run_command(main, "search", "usage", [
        "+target=cuda_fp16", "dataset=digits", "dataset.image_size=16", "space=mnasnet_small", "n_trials=6",
        "workers=2", "training.device=cuda", "training.precision=fp32", "finalists.k=2", "controls=1",
        "baselines=[mobilenetv3_small_050]", "calibration.networks=24", "calibration.minutes=4", f"out={out}"]) == 0
    with (out / "front.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["verified"] == "true" for row in rows if not row["reason"]), rows
    assert [row for row in rows if row["verified"] == "true"]
    for row in rows:
        shown(f"front: {row['id']} {float(row['top1_test'] or 'nan'):.1%} in {row['latency_ms']} ms, predicted "
              f"{row['latency_ms_predicted']}")
        if row["verified"] == "true":
            assert "CUDAExecutionProvider" in (out / "models" / row["id"] / "card.md").read_text()
    environment: dict[str, Any] = json.loads((out / "environment.json").read_text())
    assert environment["host"]["gpu"] == describe_gpu()["gpu"]
    assert (out / "report.html").is_file()


def test_a_hidden_gpu_is_an_error_and_not_the_cpu(needs: Callable[[str], Target], file: Path) -> None:
    needs("cuda_fp32")
    script = ("import sys; from hwnas.runtimes.runtime import load_runtime; from hwnas.target import Target; "
              "load_runtime('onnxruntime_cuda').compile(sys.argv[1], Target('cuda_fp32', 'onnxruntime_cuda', 'fp32', "
              "device='cuda'))")
    done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=300, check=False)
    assert done.returncode != 0
    assert "TargetError" in done.stderr
    assert "could not load its CUDAExecutionProvider" in done.stderr
