"""Set-up: ranges and pins agree, and a machine without the right Python hears so in one line."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
OF_A_GPU = {"pynvml": "nvidia-ml-py"}  # not among what `make setup` installs


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    for requirement in map(Requirement, texts):
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_what_is_imported_is_what_is_declared() -> None:
    nodes = [node for path in (ROOT / "hwnas").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]
    names = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module).split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {str(node.args[0].value).split(".")[0] for node in nodes if isinstance(node, ast.Call) and node.args
              and (getattr(node.func, "attr", "") == "import_module" or getattr(node.func, "id", "") == "find_spec")
              and isinstance(node.args[0], ast.Constant)}
    owners = packages_distributions()
    imported = {name: {canonicalize_name(owner) for owner in owners.get(name, [OF_A_GPU.get(name, "not installed")])}
                for name in names - {"hwnas"} - set(sys.stdlib_module_names)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    optional = {canonicalize_name(Requirement(text).name)
                for texts in project["optional-dependencies"].values() for text in texts}
    assert not [name for name, distributions in imported.items() if not distributions & (declared | optional)]
    assert not declared - set().union(*imported.values())


def test_pins_name_no_build_of_their_own() -> None:
    """`torch==2.13.0+cpu` could not be met from PyPI, `torch==2.13.0` is met by either build."""
    assert not [name for name, version in pins().items() if "+" in version]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_missing_python_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(["make", "PYTHON=no-such-python", f"VENV={tmp_path / 'venv'}", "setup"], cwd=ROOT,
                          capture_output=True, text=True, timeout=300, check=False)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 2
    assert "3.11" in first
    assert "no-such-python" in first
    assert all(line.startswith("make") for line in rest)
    assert not list(tmp_path.iterdir())
