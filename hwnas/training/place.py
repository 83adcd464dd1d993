"""The device that trains networks: the CPU, or the first GPU of CUDA. See docs/decisions/gpu.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from hwnas.cli.options import option
from hwnas.errors import TargetError
from hwnas.lazy import nn, torch
from hwnas.system.cores import free_memory_mb, usable_cores
from hwnas.target import Host

CPU = "cpu"
PLACES = ("cpu", "cuda", "auto")
PRECISIONS = ("auto", "fp32", "bf16")
PROCESS_MB = 640  # of memory that a training takes, with small networks and few images
MOST_ON_A_GPU = 4  # processes at once: each has its own context and images in the GPU's memory
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """The device and precision of training. All recipes of a search use them, unless their sections say otherwise."""

    device: str = option(CPU, choices=PLACES, help="auto: cuda where torch finds a GPU")
    precision: str = option("auto", choices=PRECISIONS, help="bf16: autocast; auto: on a CPU with bf16, otherwise fp32")


def resolved(asked: str, option: str = "training.device") -> str:
    """Return `cpu` or `cuda` for one of PLACES. Raises TargetError, with the `option`, if torch finds no GPU for it."""
    if asked not in PLACES[1:]:
        return asked
    if torch.cuda.is_available():
        return "cuda"
    if asked == "auto":
        return CPU
    raise TargetError(f"{option}=cuda: torch {torch.__version__} finds no CUDA here. Use {option}=cpu, or install a "
                      "CUDA build of torch on a machine that has a GPU.")


def check_precision(precision: str, device: str, option: str = "precision") -> None:
    """Raise TargetError, with the name of the `option`, if `precision` is bf16 and the device does not have it."""
    if precision == "bf16" and not (torch.cuda.is_bf16_supported() if device == "cuda" else has_bf16()):
        raise TargetError(f"{option}=bf16: this {'GPU' if device == 'cuda' else 'CPU'} has no bf16. Use {option}=fp32.")


def resolved_precision(asked: str, device: str) -> str:
    """Return `fp32` or `bf16` for one of PRECISIONS on this device."""
    return asked if asked != "auto" else "bf16" if device == CPU and has_bf16() else "fp32"


def has_bf16() -> bool:
    """Return whether this CPU has instructions for bf16."""
    return bool(_BF16 & set(Host.detect().flags))


def processes(asked: int, device: str) -> int:
    """Return the number of trainings at once: as asked, or for 0 one for each core, as many as the memory holds, and
    MOST_ON_A_GPU at most on a GPU."""
    most = min(len(usable_cores()), max(1, free_memory_mb() // PROCESS_MB))
    return asked or (most if device == CPU else min(most, MOST_ON_A_GPU))


def tell_idle(device: str, say: Callable[[str], None]) -> None:
    """Write a note if torch finds a GPU, but networks are trained on the CPU."""
    if device != CPU:
        return
    if torch.cuda.is_available():
        say(f"note: torch sees a GPU ({torch.cuda.get_device_name()}), which stays idle: networks are trained on the "
            "CPU. training.device=cuda trains them there.")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a network's parameters, or of its buffers if it has none; the CPU if it has neither."""
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device(CPU) if tensor is None else tensor.device


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Use deterministic kernels of cuDNN and true fp32 inside a block: GPUs would round factors to TF32's ten bits."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = True, False, False, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, products.allow_tf32 = before
