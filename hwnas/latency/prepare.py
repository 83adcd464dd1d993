"""Turns architectures into ONNX files to be timed, with random weights, on every core at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from hwnas.architecture import Architecture
from hwnas.errors import CandidateError
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


def prepare_networks(architectures: Sequence[Architecture], target: Target, folder: Path, workers: int,
                     progress: Callable[[float, str], None] | None = None) -> dict[str, Path]:
    """`prepare_network` for many; files by architecture id. The first failure is raised, naming its network."""
    if not architectures:
        return {}
    files: dict[str, Path] = {}
    workers = max(1, min(workers, len(architectures)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(prepare_network, one, target, folder): one for one in architectures}
        try:
            for job in as_completed(jobs):
                files[jobs[job].id] = job.result()
                if progress:
                    progress(len(files) / len(jobs), f"{len(files)} of {len(jobs)} networks exported")
        except CandidateError as error:
            pool.shutdown(cancel_futures=True)
            raise type(error)(f"{jobs[job].id}: {error}") from None
    return files
