"""Whole searches with two workers, whose accuracies come from a stub: killed, in a folder of any name, one worker lost.

The latency table of another host is shipped, so that nothing is measured; nothing is trained either.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from process_fixtures import attack, python_path, wait_until
from search_fixtures import acknowledged, workers_of

from hwnas.cli.command import run_command
from hwnas.search import road
from hwnas.search.__main__ import main

# The first evaluation of each process waits until two processes evaluate.
STUB = """
import os, sys, time
from pathlib import Path
from hwnas.accuracy.estimator import Estimate

class Stub:
    fingerprint = "stub"

    def __init__(self, folder, mode):
        self.folder, self.mode, self.helper = Path(folder), mode, any(text.startswith("run=") for text in sys.argv)

    def evaluate(self, architecture, history=(), seed=0):
        (self.folder / f"{os.getpid()}.runs").touch()
        while self.mode == "wait" or len(list(self.folder.glob("*.runs"))) < 2:
            time.sleep(0.01)
        if self.mode == "lose" and self.helper:
            sys.exit("no memory is left")
        value = int(architecture.id, 16) / 2**32
        return Estimate(value, value, value, 0.01, "stub")

def stub(dataset, space, config):
    return Stub(**config)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a search with two workers and the stub, which is installed as pip would."""
    (tmp_path / "stub.py").write_text(STUB)
    info = tmp_path / "stub-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stub\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hwnas.accuracy]\nstub = stub:stub\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    monkeypatch.delenv("HWNAS_OWN_TABLES")
    labels = np.repeat(np.arange(10), 10)
    np.savez(tmp_path / "images.npz", images=np.arange(100 * 32 * 32, dtype=np.uint8).reshape(100, 32, 32, 1) % 251,
             labels=labels)
    return ["+target=xeon_int8", "host=intel-xeon-f6m167s1-2c", "dataset=arrays",
            f"dataset.root={tmp_path / 'images.npz'}", "dataset.image_size=32", "accuracy=stub", "n_trials=4",
            "workers=2", "baselines=[]", "sampler=random", f"+stub.folder={tmp_path}"]


@pytest.mark.parametrize("number", [
    signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.soak) for number in (signal.SIGKILL, signal.SIGINT))])
def test_no_worker_outlives_the_search(command: list[str], number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "run"
    search = subprocess.Popen([sys.executable, "-m", "hwnas.search", *command, "+stub.mode=wait", f"out={out}"],
                              text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: len(list(tmp_path.glob("*.runs"))) == 2 or search.poll() is not None)
    said = attack(search, number, out / "study.db.lock")
    assert "Traceback" not in said


def test_two_workers_search_in_a_folder_of_any_name(command: list[str], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    out = tmp_path / "ü (1), x=y" / "it's ${HOME}"
    monkeypatch.chdir(tmp_path)
    out.parent.mkdir()
    assert run_command(main, "search", "", [*command, "+stub.mode=go", "out=ü (1), x=y/it's $HOME"]) == 0
    assert len(workers_of(tmp_path / "ü (1), x=y" / "it's $HOME")) == 2


def test_a_worker_that_ends_early_is_an_error_and_costs_no_trial(command: list[str], tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(road, "verified", lambda prepared, trials, console: ([], []))
    out = tmp_path / "run"
    assert run_command(main, "search", "", [*command, "+stub.mode=lose", f"out={out}"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(
        "WorkerError: 1 worker ended early, and the work was done without: no memory is left (exit code 1). ")
    kept = acknowledged(out)
    assert len(kept) == 4
    assert run_command(main, "search", "", [*command, "+stub.mode=go", f"out={out}"]) == 0
    assert acknowledged(out) == kept
