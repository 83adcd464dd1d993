"""The wheel, installed where the checkout is not on the path, is all that a user needs, and all that a third party's
package needs to open every door."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "search_spaces", "latency_tables/amd-epyc-f25m17s1-2c")  # of tables, one host's

pytest.importorskip("hatchling", reason="building the wheel needs the dev extra")
pytestmark = pytest.mark.soak


def run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    return subprocess.run([str(part) for part in command], cwd=folder, env=surroundings, capture_output=True, text=True,
                          timeout=300, check=False, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, folder=out)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel; it sees our dependencies, but not the checkout: a .pth file adds the folder
    that holds them without reading the .pth files there, and so without an editable install of hwnas."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    interpreter = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
    done = run(sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check", "install",
               "--no-deps", "--no-index", wheel, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(sorted(shared)))
    return interpreter


def test_the_wheel_is_what_runs(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", "import hwnas; print(hwnas.__file__)", folder=tmp_path)
    assert python.parents[1] in Path(done.stdout.strip()).parents, done.stderr


def test_the_wheel_carries_every_shipped_file(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", "from hwnas.system.paths import shipped; print(shipped('conf').parent)", folder=tmp_path)
    data = Path(done.stdout.strip())
    assert python.parents[1] in data.parents, done.stderr
    for folder in FOLDERS:
        ours = {path.relative_to(ROOT): path.read_bytes() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert ours == {path: (data / path).read_bytes() for path in ours}
    assert [path.name for path in (data / "latency_tables").iterdir()] == [Path(FOLDERS[-1]).name]
    assert (data.parent / "py.typed").is_file()
    assert (data.parent / "zoo" / "published.csv").is_file()


def test_without_a_target_the_command_lists_them(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "hwnas.search", folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    targets = sorted(path.stem for path in (ROOT / "conf" / "target").glob("*.yaml"))
    assert targets
    assert all(name in done.stderr for name in targets)
    assert not list(tmp_path.iterdir())


CONTRACTS = """
from pathlib import Path
from hwnas.system.paths import home
from third_party import BYTES_READ, Cheapest, MyRuntime, linear, stripes
from hwnas.data import DatasetOptions
from hwnas.networks.network import build
from hwnas.networks.export import export_onnx
from hwnas.space.search_space import SearchSpace
from hwnas.target import Target
from hwnas.testing import check_cost, check_dataset, check_estimator, check_runtime, check_sampler
space = SearchSpace.load("mnasnet_small", channels=1, classes=3)
check_dataset(stripes, DatasetOptions("stripes", options={"n": 20}))
check_cost(BYTES_READ, space.reference.blocks())
check_sampler(Cheapest)
check_estimator(linear(None, space, {"slope": 1.0}), space.reference)
network = space.reference
export_onnx(build(network).eval(), Path("m.onnx"), (network.channels, network.image_size, network.image_size))
check_runtime(MyRuntime(), "m.onnx", Target("mine_fp32", "mine", "fp32"))
print("kept")

from hwnas.cli.command import run_command
from hwnas.search.__main__ import main
from table_fixtures import write_table
write_table(home(), "mine_fp32", None, "mine", 3)
print("ended with", run_command(main, "search", "usage", ["target=other"]))
"""
TARGET = "# @package target\nname: mine_fp32\nruntime: mine\nprecision: fp32\n"


@pytest.fixture(scope="module")
def third_party(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter, with the package of `third_party/` in its site-packages as well."""
    folder = tmp_path_factory.mktemp("third")
    shutil.copytree(Path(__file__).with_name("third_party"), folder / "source")
    done = run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--no-deps",
               "--no-index", "--no-build-isolation", folder / "source", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's folder with a space, a target of the third party's runtime, and one of a runtime that nobody has."""
    home, tests = tmp_path_factory.mktemp("home"), ROOT / "tests"
    (home / "conf" / "target").mkdir(parents=True)
    for name, runtime in (("mine_fp32", "mine"), ("other", "theirs")):
        (home / "conf" / "target" / f"{name}.yaml").write_text(TARGET.replace("runtime: mine", f"runtime: {runtime}"))
    (home / "search_spaces").mkdir()
    space = (ROOT / "search_spaces" / "mnasnet_small.yaml").read_text().replace("image_size: 32", "image_size: 12")
    (home / "search_spaces" / "mine.yaml").write_text(space)
    return {"HWNAS_HOME": str(home), "TMPDIR": str(tmp_path_factory.mktemp("tmp")),
            "PYTHONPATH": f"{tests / 'any_machine'}{os.pathsep}{tests}"}


@pytest.fixture(scope="module")
def contracts(third_party: Path, surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory
              ) -> subprocess.CompletedProcess[str]:
    """What CONTRACTS says, which also makes the latency table that the search reads: one start of Python for all."""
    return run(third_party, "-c", CONTRACTS, folder=tmp_path_factory.mktemp("contracts"), **surroundings)


def test_a_third_party_keeps_the_contracts(contracts: subprocess.CompletedProcess[str]) -> None:
    assert "kept" in contracts.stdout.split(), contracts.stdout + contracts.stderr


def test_a_runtime_that_is_not_there_is_told_with_those_that_are(contracts: subprocess.CompletedProcess[str]) -> None:
    assert "ended with 2" in contracts.stdout, contracts.stderr
    assert "theirs" in contracts.stderr
    assert "mine" in contracts.stderr


def test_one_search_goes_through_every_door(third_party, surroundings, tmp_path, contracts):
    done = run(third_party, "-m", "hwnas.search", "target=mine_fp32", "space=mine", "dataset=stripes",
               "dataset.options={n: 40}", "accuracy=linear", "linear.slope=1.5", "sampler=cheapest",
               "objective.known=[latency_ms,bytes_read]", "n_trials=4", "workers=1", "finalists.k=1",
               "baselines=[]", "controls=0",
               "finalists.recipe.max_steps=2", "out=run", folder=tmp_path, **surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "run" / "trials.csv", newline="") as file:
        trials = list(csv.DictReader(file))
    assert sum(row["outcome"] == "evaluated" for row in trials) == 4
    with open(tmp_path / "run" / "front.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    size = (tmp_path / "run" / "models" / row["id"] / "model.onnx").stat().st_size
    assert float(row["bytes_read"]) == pytest.approx(size / 1e3, rel=1e-5)  # measured, unlike the prediction
    assert float(row["bytes_read_predicted"]) == pytest.approx(float(row["macs"]) / 1e4, rel=1e-3)
    assert row["target"] == "mine_fp32"
    assert "mine 1.0" in (tmp_path / "run" / "environment.json").read_text()
