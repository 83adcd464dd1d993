"""The wheel, built and installed where the checkout is not on the path, is all that a user needs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("conf", "search_spaces", "latency_tables", "certificates")

pytest.importorskip("hatchling", reason="building the wheel needs the dev extra")


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    surroundings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
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
    done = run(python, "-c", "from hwnas.system.paths import config_dir; print(config_dir().parent)", folder=tmp_path)
    data = Path(done.stdout.strip())
    assert python.parents[1] in data.parents, done.stderr
    for folder in FOLDERS:
        ours = {path.relative_to(ROOT): path.read_bytes() for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert ours == {path: (data / path).read_bytes() for path in ours}
    assert (data.parent / "py.typed").is_file()


def test_without_a_target_the_command_lists_them(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "hwnas.search", folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    targets = sorted(path.stem for path in (ROOT / "conf" / "target").glob("*.yaml"))
    assert targets
    assert all(name in done.stderr for name in targets)
    assert not list(tmp_path.iterdir())
