"""Packages stand in an order: imports never point up, and light modules stay light."""

from __future__ import annotations

import graphlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hwnas

PACKAGE = Path(hwnas.__file__).parent
# A package imports packages before it only; commands come last, and nobody imports one.
ORDER = ("errors", "lazy", "face", "stats", "pictures", "system", "cli", "space", "target", "tasks", "data", "networks",
         "runtimes", "training", "latency", "accuracy", "study", "samplers", "front", "zoo",
         "search", "benchmark", "choose")
COMMANDS = {"__main__", "profile", "validate", "quantize", "verify", "train", "predict", "report", "export",
            "worker"}
OUTSIDE = {"api", "testing"}  # for users
LIGHT = ("errors", "lazy", "face", "stats", "system.paths", "space", "target", "study.objective",
         "latency.table", "latency.model")
HEAVY = {"torch", "torchvision", "timm", "openvino", "onnx", "onnxruntime", "optuna", "sklearn", "scipy", "matplotlib",
         "pandas"}


rooms = SimpleNamespace(**runpy.run_path(str(PACKAGE.parent / "docs" / "rooms.py")))
FILES = rooms.module_files()
room = rooms.room


def graph() -> dict[str, set[str]]:
    """Modules that each module imports; `__init__` is api's face."""
    return {module: used for module, used in rooms.graph().items() if module != "__init__"}


def test_every_module_has_a_place_in_the_order() -> None:
    assert {room(module) for module in FILES} == {*ORDER, *COMMANDS, *OUTSIDE, "__init__"}


def test_packages_import_only_those_before_them() -> None:
    rank = {name: number for number, name in enumerate(ORDER)}
    outer = len(ORDER)
    upward = [f"{module} imports {used}" for module, uses in graph().items() for used in uses
              if room(used) != room(module) and rank.get(room(used), outer) >= rank.get(room(module), outer)]
    assert not upward


def test_no_cycles() -> None:
    graphlib.TopologicalSorter(graph()).prepare()


def test_light_modules_import_nothing_heavy() -> None:
    names = ["hwnas", *(f"hwnas.{name}" for name in FILES if name.startswith(LIGHT))]
    script = (f"import sys, {', '.join(names)}\n"
              f"print(*sorted({{name.split('.')[0] for name in sys.modules}} & {HEAVY!r}))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_picture_of_rooms_is_drawn_from_these_imports() -> None:
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.draw(), "draw it again: python docs/rooms.py"
