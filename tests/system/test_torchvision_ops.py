"""torchvision's two operators are declared where its compiled library does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hwnas.system import torchvision_ops


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_timm_imports_after_declaring() -> None:
    done = _run("from hwnas.system.torchvision_ops import declare_missing as f; f(); f(); import timm, torch\n"
                "print(timm.is_model('resnet18'), hasattr(torch.ops.torchvision, 'nms'))")
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_missing_library_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torchvision_ops, "_loads_compiled", lambda: False)
    torchvision_ops.declare_missing.cache_clear()
    torchvision_ops.declare_missing()
    for name in ("nms", "qnms"):
        assert hasattr(torch.ops.torchvision, name)


def test_nothing_is_declared_where_the_library_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_ops, "_loads_compiled", lambda: True)
    monkeypatch.setattr(torchvision_ops, "_SCHEMAS", {"never": "not a schema"})
    torchvision_ops.declare_missing.cache_clear()
    kept = len(torchvision_ops._kept)
    torchvision_ops.declare_missing()  # the schema would be refused
    monkeypatch.undo()
    torchvision_ops.declare_missing.cache_clear()
    assert len(torchvision_ops._kept) == kept
