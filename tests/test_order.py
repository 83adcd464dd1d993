"""Packages stand in an order: imports never point up, and light modules stay light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hwnas

PACKAGE = Path(hwnas.__file__).parent
# A package imports packages before it only; commands come last, and nobody imports one.
ORDER = ("errors", "face", "stats", "pictures", "system", "cli", "space", "target", "data", "networks", "runtimes",
         "training", "latency", "accuracy", "study", "samplers", "front", "search", "certify", "compress", "benchmark")
COMMANDS = {"__main__", "profile", "validate", "roofline", "verify", "train", "report"}
OUTSIDE = {"api", "testing", "network", "architecture", "baselines"}  # for users, and old names
LIGHT = ("errors", "face", "stats.pareto", "system.paths", "space", "target", "study.objective",
         "latency.table", "latency.model")
HEAVY = {"torch", "torchvision", "timm", "openvino", "onnx", "onnxruntime", "optuna", "sklearn", "scipy", "matplotlib",
         "pandas"}


def module_files() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


FILES = module_files()


def imports(module: str) -> Iterator[str]:
    """Modules of hwnas that `module` imports, anywhere in its file."""
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write hwnas.… in full"
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name.removeprefix("hwnas.") for name in names if name.removeprefix("hwnas.") in FILES
                    and name.startswith("hwnas."))


GRAPH = {module: set(imports(module)) - {module} for module in FILES}


def room(module: str) -> str:
    """The package, or the module in the root, that `module` belongs to."""
    return module.partition(".")[0]


def test_every_module_has_a_place_in_the_order() -> None:
    assert {room(module) for module in FILES} == {*ORDER, *COMMANDS, *OUTSIDE, "__init__"}


def test_packages_import_only_those_before_them() -> None:
    rank = {name: number for number, name in enumerate(ORDER)}
    outer = len(ORDER)
    upward = [f"{module} imports {used}" for module, uses in GRAPH.items() for used in uses
              if room(used) != room(module) and rank.get(room(used), outer) >= rank.get(room(module), outer)]
    assert not upward


def test_no_cycles() -> None:
    graphlib.TopologicalSorter(GRAPH).prepare()


def light_imports() -> str:
    names = [f"hwnas.{name}" for name in FILES if name.startswith(LIGHT)]
    return "\n".join(f"import {name}" for name in ["hwnas", *names])


@pytest.mark.parametrize("statements", ["import hwnas", light_imports()], ids=["hwnas", "light modules"])
def test_light_modules_import_nothing_heavy(statements: str) -> None:
    script = f"{statements}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}} & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
