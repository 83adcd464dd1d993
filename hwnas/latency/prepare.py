"""Turns architectures into ONNX files to be timed, with random weights."""

from __future__ import annotations

from pathlib import Path

from hwnas.architecture import Architecture
from hwnas.target import Target


def prepare_network(architecture: Architecture, target: Target, folder: Path) -> Path:
    """Build with weights seeded by the architecture, export, and quantise for int8; returns the file to time.

    Synthetic quantisation ranges give the graph that real ones give. Fresh weights would not do: their zero biases are
    optimised away.
    """
    import torch

    from hwnas.export import export_onnx, randomise
    from hwnas.network import build

    torch.set_num_threads(1)
    network = build(architecture).eval()
    randomise(network, int(architecture.id, 16))
    fp32 = folder / f"{architecture.id}.onnx"
    shape = (architecture.channels, architecture.image_size, architecture.image_size)
    export_onnx(network, fp32, shape)
    if target.precision != "int8":
        return fp32
    from hwnas.quantize import quantize_static, tuning_of

    int8 = folder / f"{architecture.id}_int8.onnx"
    quantize_static(fp32, int8, None, tuned_for=tuning_of(target))
    fp32.unlink()
    return int8


def prepare_compiled(architecture: Architecture, target: Target, folder: Path) -> tuple[Path, Path | None]:
    """`prepare_network`, and the compiled network beside it where the runtime can keep one (else None)."""
    from hwnas.runtimes import load_runtime

    path = prepare_network(architecture, target, folder)
    save = getattr(load_runtime(target.runtime), "save_compiled", None)
    return path, None if save is None else save(path, target)
