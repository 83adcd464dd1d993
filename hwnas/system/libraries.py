"""Tell libraries of others what they need: torchvision's operators, ONNX Runtime's telemetry, the C library's memory.

At import torchvision describes `nms` and `qnms` to torch, whether or not its library was loaded. With a CPU build of
torch beside PyPI's CUDA build of torchvision that ends in "operator torchvision::nms does not exist". If the
compiled library cannot be loaded, the two operators are declared here, so that `import timm` works.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hwnas.lazy import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_kept: list[Any] = []  # torch forgets a declaration when its Library object is collected


@cache
def declare_missing() -> None:
    """Declare them; `import hwnas` has this called before torchvision is imported. Operators that load stay.

    The declared operators have no kernels: calling one fails as before, and no classifier does.
    """
    if _loads_compiled():
        return
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define(schema)
            _kept.append(library)


def _loads_compiled() -> bool:
    """Return whether torchvision's own library loads into this torch (twice is harmless), or none is installed."""
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


_SWITCH = "ORT_DISABLE_TELEMETRY"


@cache
def import_onnxruntime() -> Any:
    """The module `onnxruntime`; use this in place of an import.

    While it is imported it begins a session of its telemetry, and leaves an identifier in the folder of temporary
    files, unless the environment forbids it.
    """
    given = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        import onnxruntime
    finally:
        if given is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = given
    onnxruntime.disable_telemetry_events()  # where others had imported it before
    return onnxruntime


_IN_PLACE_OF = {"onnxruntime": "onnxruntime-gpu"}  # both are the module onnxruntime, so that one of them is installed


def version_of(package: str) -> str:
    """The version of an installed package, or of the one that takes its place; PackageNotFoundError."""
    try:
        return version(package)
    except PackageNotFoundError:
        if package not in _IN_PLACE_OF:
            raise
        return version(_IN_PLACE_OF[package])


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # of mallopt(3)
_NEVER = -1
# Outside the block: the values that glibc reaches by itself once large blocks have been freed. Any mallopt ends glibc's
# own adaptation, so that the process keeps these values.
_OUTSIDE = {_M_MMAP_MAX: 65_536, _M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 64 << 20}
_INSIDE = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER}


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Inside, this process keeps freed memory for its next allocation.

    Otherwise blocks of 32 MB and more (activations) go back to the system each time. Their pages are then faulted in
    and cleared again: a fifth of the CPU time of a training step of small networks (benchmarks/bench_training.py). The
    end of the block gives the memory back. Nothing is done where the user's environment says how to allocate.
    """
    given = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if given or platform.libc_ver()[0] != "glibc":
        yield
        return
    try:
        _configure(_INSIDE)
        yield
    finally:
        _configure(_OUTSIDE)
        release_memory()


def release_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, and hundreds of trials add up. So does torch with a GPU's,
    which other processes and runtimes need."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _configure(options: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in options.items():
            mallopt(option, value)
