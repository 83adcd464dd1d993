"""One finished search for all tests that read one: made once in a test run, whichever process asks first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from table_fixtures import write_table

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join([str(ROOT / "tests" / "any_machine"), str(ROOT)])
# The search as a command, where its target is xeon_int8.
SMALL = ["dataset=digits", "n_trials=3", "calibration.networks=12", "proxy.epochs=1", "proxy.min_steps=4",
         "proxy.train_images=256", "finalists.k=2", "finalists.recipe.max_steps=4", "baselines=[test_efficientnet]",
         "verification.seconds=5", "dataset.image_size=24", "controls=1"]
# The same from Python: an unguarded script, which starts a worker and pools.
SCRIPT = """
import hwnas

run = hwnas.search("xeon_int8", "digits", n_trials=3, calibration={"networks": 12}, proxy={
    "epochs": 1, "min_steps": 4, "train_images": 256}, finalists={"k": 2, "recipe": {"max_steps": 4}},
    baselines=["test_efficientnet"], verification={"seconds": 5}, dataset={"image_size": 24}, controls=1,
    workers=2, out="run", quiet=True)
assert len(run.to_frame()) >= 5
print("ended")
"""


def _make(folder: Path) -> None:
    write_table(folder / "home", "xeon_int8", 24)
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=900,
                          check=False, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PYTHONPATH": PATHS, "HWNAS_HOME": str(folder / "home")})
    (folder / "done.json").write_text(json.dumps([done.returncode, done.stdout, done.stdout + done.stderr]))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, _own_surroundings: None) -> Path:
    """The run folder of SCRIPT, which no test changes. Its made-up latency table is this host's here, too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done.json").exists():
            _make(folder)
    code, printed, said = json.loads((folder / "done.json").read_text())
    assert code == 0, said
    assert printed.split() == ["ended"], "run once, and by the main process alone"
    shutil.copytree(folder / "home" / "latency_tables", Path(os.environ["HWNAS_HOME"]) / "latency_tables",
                    dirs_exist_ok=True)
    return folder / "run"
