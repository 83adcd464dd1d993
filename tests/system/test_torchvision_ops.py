"""torchvision's two operators are declared where its compiled library does not load."""

from __future__ import annotations

from hwnas.system import libraries


def test_timm_imports_after_declaring() -> None:
    libraries.declare_missing()
    libraries.declare_missing()
    import timm
    import torch

    assert timm.is_model("resnet18")
    assert hasattr(torch.ops.torchvision, "nms")


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
