"""A finished search for all tests that read one, made once in a test run, and how it is that any machine will do."""

from __future__ import annotations

import os
import runpy
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from table_fixtures import write_table

import hwnas
from hwnas.front import make

ROOT = Path(__file__).resolve().parents[1]
ANY_MACHINE = ROOT / "tests" / "any_machine"
PATHS = os.pathsep.join([str(ANY_MACHINE), str(ROOT)])
# The finished search as a command, where its target is xeon_int8.
SMALL = ["dataset=digits", "n_trials=3", "calibration.networks=12", "proxy.epochs=1", "proxy.min_steps=4",
         "proxy.train_images=256", "finalists.k=2", "finalists.recipe.max_steps=4",
         "finalists.recipe.batch_size=32", "baselines=[test_efficientnet]", "verification.seconds=2",
         "dataset.image_size=24", "controls=1"]
# The options of a finished search for each runtime.
SEARCHES: dict[str, dict[str, Any]] = {
    "openvino": {
        "target": "xeon_int8", "n_trials": 3, "calibration": {"networks": 12}, "controls": 1,
        "finalists": {"k": 2, "recipe": {"max_steps": 4, "batch_size": 32}}, "baselines": ["test_efficientnet"],
        "proxy": {"epochs": 1, "min_steps": 4, "train_images": 256}, "dataset": {"image_size": 24}},
    "litert": {
        "target": "edge_int8", "n_trials": 1, "controls": 0, "finalists": {"k": 1, "recipe": {"max_steps": 8}},
        "baselines": [], "proxy": {"epochs": 1, "min_steps": 2, "train_images": 256}, "dataset": {"image_size": 16}}}


@contextmanager
def on_any_machine(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Here and in processes started meanwhile, a measurement is valid however busy the machine is, and waits for none
    that other tests make. `folder` is for temporary files."""
    from hwnas.latency import measurement

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement.Measurement, "converged", measurement.Measurement.__dict__["converged"])
        patch.setattr(measurement, "WIDEST", measurement.WIDEST)  # both are put back at the end
        patch.setattr("hwnas.target.LOCK_FOLDERS", ())
        runpy.run_path(str(ANY_MACHINE / "sitecustomize.py"))
        patch.setenv("PYTHONPATH", str(ANY_MACHINE), prepend=os.pathsep)
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)
        yield patch


def use_few_images(patch: pytest.MonkeyPatch) -> None:
    """Let networks be quantised with 96 images, which take a fraction of the time."""
    few = make.calibration_images
    patch.setattr(make, "calibration_images", lambda data, n, seed: few(data, 96, seed))


def search_from_python(workers: int, runtime: str = "openvino") -> None:
    """Search on digits for a runtime, into the folder `run`."""
    options = dict(SEARCHES[runtime])
    target, dataset = options.pop("target"), options.pop("dataset")
    run = hwnas.search(target, "digits", dataset=dataset, verification={"seconds": 2}, workers=workers, out="run",
                       quiet=True, **options)
    assert run.to_frame()["verified"].all()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, _own_surroundings: None) -> Callable[[str], Path]:
    """`finished_run(runtime)` is the run folder of a finished search for this runtime, which no test changes. Its
    made-up latency table is this host's here, too."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def make_run(runtime: str) -> Path:
        folder = shared / f"finished-{runtime}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                (folder / "tmp").mkdir(parents=True, exist_ok=True)
                with on_any_machine(folder / "tmp") as patch:
                    patch.setenv("HWNAS_HOME", str(folder / "home"))
                    patch.chdir(folder)
                    use_few_images(patch)
                    options = SEARCHES[runtime]
                    write_table(folder / "home", options["target"], options["dataset"]["image_size"])
                    search_from_python(1, runtime)
                (folder / "done").touch()
        shutil.copytree(folder / "home" / "latency_tables", Path(os.environ["HWNAS_HOME"]) / "latency_tables",
                        dirs_exist_ok=True)
        return folder / "run"

    return make_run


@pytest.fixture(scope="session")
def finished(finished_run: Callable[[str], Path]) -> Path:
    """The finished run for OpenVINO."""
    return finished_run("openvino")
