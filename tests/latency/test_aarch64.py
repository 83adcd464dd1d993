"""The agent on an aarch64 machine that QEMU's user mode makes up: for what it does, never for how fast.

HWNAS_AARCH64 names a folder that tests/aarch64/make_root.sh has made.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from device_fixtures import Board, program

from hwnas.latency.copies import TimedFile, noise
from hwnas.latency.measurement import Protocol
from hwnas.latency.timing import prepare_network, reference_network, time_files
from hwnas.runtimes.runtime import load_runtime
from hwnas.target import Target

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("any_machine")]
LEVELS = 2  # of the answer's, by which int8 may differ between CPUs
QUICK = Protocol(max_seconds=2.0, copies=1, min_rounds=2, max_rounds=2)


@pytest.fixture
def arm(board: Board) -> Board:
    """A board whose Python is of another architecture. The CPU is the one that the folder's /proc/cpuinfo tells of:
    with QEMU's `max`, XNNPACK takes instructions for int8 whose answers are wrong there."""
    root, qemu = os.environ.get("HWNAS_AARCH64"), shutil.which("qemu-aarch64-static")
    if qemu is None:
        pytest.skip("no qemu-aarch64-static here (Debian, Ubuntu: apt install qemu-user-static)")
    if not root or not Path(root, "packages").is_dir():
        pytest.skip("HWNAS_AARCH64 does not name a folder that tests/aarch64/make_root.sh made")
    root = os.path.abspath(root)
    python = program(board.folder / "python", "#!/bin/sh\n"
                     f"exec {qemu} -cpu cortex-a76 -L {root} -E PYTHONHOME={root}/usr "
                     f'-E PYTHONPATH={root}/packages {root}/usr/bin/python3.11 "$@"\n')
    return Board(board.folder, str(python))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("runtime", ["litert", "onnxruntime"])
def test_answers_are_those_of_here_within_two_levels(arm: Board, tmp_path: Path, runtime: str, precision: str) -> None:
    target = Target("t", runtime, precision)
    path = prepare_network(reference_network(), replace(target, runtime="litert"), tmp_path)  # its logits have levels
    images = noise(16, (1, 32, 32))
    device = arm.device()
    assert device.host.parts == "i41pd0br4p1"
    there = device.runtime(runtime).compile(path, target)
    here = load_runtime(runtime).compile(path, target)
    wanted = here.logits(images)
    step = np.abs(wanted).max() * 1e-5 if precision == "fp32" else np.diff(np.unique(wanted)).min()
    assert np.abs(there.logits(images) - wanted).max() <= LEVELS * step * 1.001
    assert there.execution.precision == here.execution.precision == precision
    measurement = time_files({"it": TimedFile(path, target, (1, 32, 32))}, target, reference_network(),
                             QUICK, device=device)["it"]
    assert measurement.turns
    device.close()
