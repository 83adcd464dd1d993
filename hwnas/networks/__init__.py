"""Networks: built from architectures or by timm, exported to ONNX, quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwnas.face import face

if TYPE_CHECKING:
    from hwnas.networks.export import export_onnx as export_onnx
    from hwnas.networks.quantize import quantize_static as quantize_static

__getattr__, __dir__ = face(__name__, {"export_onnx": "export", "quantize_static": "quantize"})
