"""Words <- pure logic <- heavy adapters <- commands: imports never point back, and light modules stay light."""

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
WORDS = {"__init__", "errors", "paths", "estimate", "blocks", "architecture", "target", "space"}
LOGIC = {"pareto", "objective", "latency", *(f"latency.{name}" for name in (
    "agreement", "anchors", "block_errors", "costs", "document", "features", "fit", "held_out", "measurement", "model",
    "operators", "planning", "prior", "residual", "table", "validation", "validation_file", "validation_report"))}
COMMANDS = {"search", "profile", "validate", "benchmark", "roofline", "verify", "train", "compress", "certify",
            "report", "worker"}
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


def layer(module: str) -> int:
    """0 words, 1 pure logic, 2 heavy adapters, 3 commands; `space_file` counts as `space`."""
    if module in WORDS or module.startswith("space_"):
        return 0
    return 1 if module in LOGIC else 3 if module in COMMANDS else 2


def test_imports_never_point_back() -> None:
    back = [f"{module} imports {used}" for module, uses in GRAPH.items() for used in uses
            if layer(used) > layer(module) or used in COMMANDS]
    assert not back


def test_no_cycles() -> None:
    graphlib.TopologicalSorter(GRAPH).prepare()


def light_imports() -> str:
    names = [f"hwnas.{name}" for name in FILES if layer(name) < 2 and name != "__init__"]
    return "\n".join(f"import {name}" for name in ["hwnas", *names])


@pytest.mark.parametrize("statements", ["import hwnas", light_imports()], ids=["hwnas", "words and logic"])
def test_light_modules_import_nothing_heavy(statements: str) -> None:
    script = f"{statements}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}} & {HEAVY!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
