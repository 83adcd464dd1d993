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


def test_missing_library_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(libraries, "_loads_compiled", lambda: False)
    libraries.declare_missing.cache_clear()
    libraries.declare_missing()
    for name in ("nms", "qnms"):
        assert hasattr(torch.ops.torchvision, name)


def test_nothing_is_declared_where_the_library_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_loads_compiled", lambda: True)
    monkeypatch.setattr(libraries, "_SCHEMAS", {"never": "not a schema"})
    libraries.declare_missing.cache_clear()
    kept = len(libraries._kept)
    libraries.declare_missing()  # the schema would be refused
    monkeypatch.undo()
    libraries.declare_missing.cache_clear()
    assert len(libraries._kept) == kept
