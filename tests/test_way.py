"""The picture of a trial's way names functions that are there, each called in the module that it hangs on."""

from __future__ import annotations

import ast
import importlib
import runpy
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

import hwnas

trial = SimpleNamespace(**runpy.run_path(str(Path(hwnas.__file__).resolve().parents[1] / "docs" / "trial.py")))
ASKED = [(hop.module, function) for hop in trial.WAY for function in hop.asks]
CALLED = [(trial.caller(index).module, hop.function) for index, hop in enumerate(trial.WAY) if index]


@pytest.mark.parametrize("function", dict.fromkeys([*(hop.function for hop in trial.WAY), *(f for _, f in ASKED)]))
def test_every_function_of_the_way_is_there(function: str) -> None:
    module, _, name = function.partition(":")
    assert callable(attrgetter(name)(importlib.import_module(module)))


@pytest.mark.parametrize(("module", "function"), CALLED)
def test_every_function_of_the_way_is_used_in_the_module_it_hangs_on(module: str, function: str) -> None:
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8"))
    used = {node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Name)}
    assert function.rpartition(":")[2].rpartition(".")[2] in used


def test_the_way_is_short() -> None:
    hops, files = trial.counted()
    assert hops <= 20
    assert files <= 12


def test_the_picture_is_drawn_from_the_way() -> None:
    assert trial.PICTURE.read_text(encoding="utf-8") == trial.draw(), "draw it again: python docs/trial.py"
