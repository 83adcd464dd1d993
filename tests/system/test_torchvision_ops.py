"""torchvision's two operators are declared where its compiled library does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hwnas.system import libraries


@pytest.mark.parametrize("module", ["timm", "torchvision"])
def test_it_imports_in_a_fresh_process_after_hwnas(module: str) -> None:
    code = f"import hwnas, sys; assert 'torch' not in sys.modules; import {module}, torch; torch.ops.torchvision.nms"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_operators_are_declared_only_where_the_library_does_not_load(monkeypatch):
    import torch

    monkeypatch.setattr(libraries, "_loads_compiled", lambda: False)
    libraries.declare_missing.cache_clear()
    libraries.declare_missing()
    for name in ("nms", "qnms"):
        assert hasattr(torch.ops.torchvision, name)
    monkeypatch.setattr(libraries, "_loads_compiled", lambda: True)
    monkeypatch.setattr(libraries, "_SCHEMAS", {"never": "not a schema"})
    libraries.declare_missing.cache_clear()
    kept = len(libraries._kept)
    libraries.declare_missing()  # the schema would be refused
    monkeypatch.undo()
    libraries.declare_missing.cache_clear()
    assert len(libraries._kept) == kept
