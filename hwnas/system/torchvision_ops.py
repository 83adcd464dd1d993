"""Declare torchvision's two operators where its compiled library cannot be loaded, so that `import timm` works.

At import torchvision describes `nms` and `qnms` to torch, whether or not its library was loaded. With a CPU build of
torch beside PyPI's CUDA build of torchvision that ends in "operator torchvision::nms does not exist".
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept: list[Any] = []  # torch forgets a declaration when its Library object is collected


@cache
def declare_missing() -> None:
    """Call before the first `import timm` or `import torchvision`; does nothing where the compiled operators load.

    The declared operators have no kernels: calling one fails as before, and no classifier does.
    """
    import torch

    if _loads_compiled():
        return
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(schema)
            _kept.append(library)


def _loads_compiled() -> bool:
    """Whether torchvision's own library loads into this torch (loading it twice is harmless), or none is installed."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    for path in sorted(Path(spec.origin).parent.glob("_C*")):
        if path.suffix in (".so", ".pyd", ".dylib"):
            try:
                torch.ops.load_library(str(path))
            except (ImportError, OSError):
                continue
            return True
    return False
