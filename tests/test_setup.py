"""Set-up: ranges and pins agree, and a machine without the right Python hears so in one line."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    for requirement in map(Requirement, texts):
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_pins_name_no_build_of_their_own() -> None:
    """`torch==2.13.0+cpu` could not be met from PyPI, `torch==2.13.0` is met by either build."""
    assert not [name for name, version in pins().items() if "+" in version]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_missing_python_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(["make", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}", "setup"], cwd=ROOT,
                          capture_output=True, text=True, timeout=60, check=False)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2
    assert "3.11" in first
    assert "no-such-python" in first
    assert all(line.startswith("make") for line in rest)
    assert not list(tmp_path.iterdir())
